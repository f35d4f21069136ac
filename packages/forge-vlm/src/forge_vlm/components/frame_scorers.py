"""Which frames of a clip are shown for a question, and what scores them: `select = { name = "diverse", scorer = { ... } }`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt, Lt

from forge_core.component import DATA, FREE, Component, Place, Slot

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from forge_vlm.data.frame_selection import FrameChooser, FrameScorer


@dataclass(frozen=True, kw_only=True)
class ImageText(Component):
    """Cosine of the features of frame and question, by a frozen model of transformers: CLIP, SigLIP or SigLIP 2."""

    key_class: ClassVar = DATA

    path: str
    """Folder of the model in the Hugging Face format, with tokenizer and preprocessor."""
    store: Annotated[str | None, FREE, Place] = None
    """File that stores features by the content of frames and questions, for later preparations and other machines; by default
    none are stored."""
    batch: Annotated[int, Gt(0), FREE] = 16
    """Number of frames that are encoded together."""
    device: Annotated[str, FREE] = "cpu"
    """Device of torch that encodes."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[ImageText]":
        """Returns a tiny model, without and with a file."""
        from forge_vlm.data import example_images

        path = example_images.image_text_model(folder)
        return (cls(path=path), cls(path=path, store=str(folder / "features")))

    def build(self) -> "FrameScorer":
        from forge_vlm.data.frame_scores import FeatureFile, FeatureScorer, ImageTextEncoder

        file = None if self.store is None else FeatureFile(self.store, new=True)
        return FeatureScorer(ImageTextEncoder(self.path, self.batch, self.device), file)


@dataclass(frozen=True, kw_only=True)
class StoredScores(Component):
    """Cosine of features that `image_text` stored; needs neither the model nor transformers. A frame or a question without
    features is a broken record."""

    key_class: ClassVar = DATA

    path: str
    """The file of `store`."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[StoredScores]":
        """Returns the stored features of the frames of the checks."""
        from forge_vlm.data import example_images

        encoder = ImageText(path=example_images.image_text_model(folder), store=str(folder / "stored"))
        encoder.build()(example_images.CHECKED_FRAMES, example_images.CHECKED_QUESTION)
        return (cls(path=str(folder / "stored")),)

    def build(self) -> "FrameScorer":
        from forge_vlm.data.frame_scores import FeatureFile, FeatureScorer

        return FeatureScorer(None, FeatureFile(self.path, new=False))


@dataclass(frozen=True, kw_only=True)
class FrameSelection:
    """How frames of a clip are chosen; chosen frames stay in the order of time. See `forge_vlm.data.frame_selection`."""

    key_class: ClassVar = DATA

    name: Literal["uniform", "top_k", "diverse"] = "uniform"
    """`uniform`: equally spaced in time. `top_k`: those that fit the question best. `diverse`: those that fit the question and
    differ from each other, by a determinantal point process (MDP3, Sun et al., 2025)."""
    scorer: Annotated[Component | None, Slot("forge.frame_scorers")] = Slot.unset()
    """Scores frames by the question."""
    candidates: Annotated[int, Gt(0)] = 32
    """Number of frames, equally spaced in time, that are scored."""
    relevance: Annotated[float, Gt(0), Lt(1)] = 0.7
    """diverse: weight of the scores; the rest is the weight of the differences."""

    def __post_init__(self) -> None:
        if self.name == "uniform" and self.scorer is not None:
            raise ValueError("select.name = 'uniform' needs no scorer; remove it, or set select.name = 'top_k' or 'diverse'")
        if self.name != "uniform" and self.scorer is None:
            raise ValueError(f"select.name = {self.name!r} needs scores; set scorer = {{ name = 'image_text', path = FOLDER }}")

    def chooser(self) -> "FrameChooser | None":
        """Returns what chooses frames by a question; None if frames are equally spaced in time."""
        from forge_vlm.data.frame_selection import FrameChooser

        if self.scorer is None:
            return None
        return FrameChooser(self.scorer.build(), self.candidates, self.relevance if self.name == "diverse" else None)
