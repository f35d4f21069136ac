"""Chooses the frames of a clip that fit a question, by scores of a frozen encoder of text and images.

top_k    the frames with the largest scores
diverse  frames that fit the question and differ from each other: a determinantal point process (Kulesza and Taskar, 2012), as
         MDP3 (Sun et al., 2025) uses one. With relevance t, scores r scaled to [0, 1], unit features f and the kernel
         S_ij = (1 + f_i . f_j) / 2, frames are added one by one to the set Y that maximizes

             t * sum of r over Y  +  (1 - t) * log det S_Y

         (Chen, Zhang and Zhou, "Fast Greedy MAP Inference for Determinantal Point Process", 2018, section 5 and algorithm 1).

Of equal frames the earlier one is chosen, so the result is the same on every machine.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from forge_core.errors import DataError
from forge_vlm.data.clips import Footage, choose_frames

_DIGITS = 9
"""Digits to which gains are rounded before they are compared, so that the order of sums on a machine chooses no frame."""
_SMALLEST = 1e-10
"""Smallest conditional variance of a frame; below it, a frame is a copy of chosen ones."""


class FrameScores(NamedTuple):
    """How well frames fit a question.

    Attributes:
        scores: (frames,) numbers, larger for frames that fit better.
        features: (frames, width) vectors whose directions tell how similar frames are.
    """

    scores: np.ndarray
    features: np.ndarray


class FrameScorer(Protocol):
    """Scores frames by a question. Several threads may call it.

    Attributes:
        identity: text that changes if the scores change; part of the names of prepared data.
    """

    identity: str

    def __call__(self, frames: Sequence[bytes], question: str) -> FrameScores:
        """Returns the scores of frames, which are image files; a frame's score does not depend on the other frames.

        Raises:
            DataError: scores cannot be computed.
        """
        ...


def top_k(scores: np.ndarray, count: int) -> list[int]:
    """Returns the places of the `count` largest of (frames,) scores, ascending."""
    return sorted(np.argsort(-scores, kind="stable")[:count].tolist())


def diverse(scores: np.ndarray, features: np.ndarray, count: int, relevance: float) -> list[int]:
    """Returns the places of `count` frames, ascending: the greedy maximum in the docstring of this module.

    Args:
        scores: (frames,) numbers, not all equal.
        features: (frames, width) vectors.
        count: number of frames, at most that of `scores`.
        relevance: weight of the scores, between 0 and 1.
    """
    wide = features.astype(np.float64)
    unit = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    kernel = (1 + unit @ unit.T) / 2
    least, most = float(scores.min()), float(scores.max())
    fits = (scores.astype(np.float64) - least) / (most - least)
    variances = kernel.diagonal().copy()  # of each frame, given the chosen ones
    factors = np.zeros((count, len(scores)))  # rows of the Cholesky factor of the kernel
    chosen: list[int] = []
    for step in range(count):
        gains = relevance * fits + (1 - relevance) * np.log(np.maximum(variances, _SMALLEST))
        gains[chosen] = -np.inf
        best = int(np.argmax(np.round(gains, _DIGITS)))
        chosen.append(best)
        if variances[best] > _SMALLEST:
            factors[step] = (kernel[best] - factors[:step].T @ factors[:step, best]) / np.sqrt(variances[best])
            variances -= factors[step] ** 2
    return sorted(chosen)


class FrameChooser:
    """Chooses frames of clips by questions.

    Attributes:
        identity: text that changes if other frames may be chosen.
    """

    def __init__(self, scorer: FrameScorer, candidates: int, relevance: float | None) -> None:
        """
        Args:
            scorer: scores the candidates.
            candidates: number of frames, equally spaced in time, among which to choose.
            relevance: see `diverse`; None chooses the `top_k`.
        """
        self._scorer, self._candidates, self._relevance = scorer, candidates, relevance
        self.identity = f"{candidates} {relevance} {scorer.identity}"

    def choose(self, footage: Footage, fetch: Callable[[str], bytes], question: str, count: int) -> list[int]:
        """Returns the numbers of at most `count` frames, ascending.

        If all scores are equal, the frames are equally spaced in time.

        Args:
            footage: frames of the clip.
            fetch: reads a frame by its reference.
            question: text that the frames should fit.
            count: maximum number of frames.

        Raises:
            DataError: a frame or its score cannot be computed.
        """
        candidates = choose_frames(footage.times, self._candidates)
        if len(candidates) <= count:
            return candidates
        references = footage.references(candidates)
        scores, features = self._scorer([fetch(reference) for reference in references], question)
        if scores.shape != (len(candidates),) or len(features) != len(candidates):
            raise DataError(
                f"the scorer returned scores of shape {scores.shape} and features of shape {features.shape} for "
                f"{len(candidates)} frames; it must return one score and one vector for each frame"
            )
        if not (np.isfinite(scores).all() and np.isfinite(features).all()):
            raise DataError(f"the scorer returned numbers that are not finite for {references[0]}; choose another scorer")
        if scores.max() == scores.min():
            return choose_frames(footage.times, count)
        found = top_k(scores, count) if self._relevance is None else diverse(scores, features, count, self._relevance)
        return [candidates[place] for place in found]
