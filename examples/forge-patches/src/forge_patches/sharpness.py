"""Scores the frames of a clip by their sharpness, whatever the question is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image

from forge_core import DATA, Component
from forge_vlm import FrameScorer, FrameScores


@dataclass(frozen=True, kw_only=True)
class Sharpness(Component):
    """Variance of the differences between neighboring pixels: low for frames that are blurred or black."""

    key_class: ClassVar = DATA

    @classmethod
    def examples(cls, folder: Path) -> "Iterable[Sharpness]":
        """Returns the scorer."""
        return (cls(),)

    def build(self) -> FrameScorer:
        return SharpnessScorer()


class SharpnessScorer:
    """Scores frames; the features are their gray values on 8 x 8 pixels, by which `diverse` tells frames apart."""

    identity = "sharpness of neighboring pixels"

    def __call__(self, frames: Sequence[bytes], question: str) -> FrameScores:
        """Returns the scores of image files."""
        grays = [Image.open(BytesIO(frame)).convert("L") for frame in frames]
        scores = [float(np.diff(np.asarray(gray, dtype=np.float64), axis=1).var()) for gray in grays]
        features = [np.asarray(gray.resize((8, 8)), dtype=np.float32).ravel() + 1 for gray in grays]
        return FrameScores(np.array(scores, dtype=np.float32), np.stack(features))
