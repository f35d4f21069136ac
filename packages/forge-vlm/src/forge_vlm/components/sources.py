"""Sources of documents with images, selected by `[[data.sources]]` or `[data.evaluation.NAME]`.

Each is prepared once into a store in the workspace: text becomes tokens, each image the placeholders that the recipe's model
takes. Images stay where they are and are read, decoded and cut as batches need them.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt

from forge_core.component import DATA
from forge_core.protocols.data import SourceComponent
from forge_data.components.sources import Fraction, Split
from forge_vlm.images.tiling import Tiling

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from forge_core.protocols.data import Source, SourceContext, Texts
    from forge_vlm.data.documents import Examples, Fields

_SMALL: dict[str, Any] = {"placeholder": 300, "per_image": 2, "size": 8}
"""What examples give images without a model."""


@dataclass(frozen=True, kw_only=True)
class ImageSource(SourceComponent):
    """Base of sources whose records have images: a subclass says where from, in `read`.

    A record is text with `<image>` where an image stands (all before the text when it has none), or a conversation: a list of
    `{ role, content }`, or LLaVA's `{ from, value }`. Of a conversation only the assistant's words are learned.
    """

    key_class: ClassVar = DATA
    keeps_documents: ClassVar[bool] = True
    """Documents are never cut: `data.packing` is not `concatenate`."""
    format: ClassVar[str] = "images"

    text: str = "text"
    """Field that holds the text."""
    messages: str = "messages"
    """Field that holds a conversation, read where a record has it; LLaVA's is `conversations`."""
    images: str = "image"
    """Field that names an image, or a list of them. A record without it is text."""
    template: str = "plain"
    """How turns are written: `plain`, `chatml`, `llama3`, a template in Jinja or its file, a `tokenizer_config.json`, or the
    folder of a tokenizer of transformers; `FOLDER:NAME` is one of several templates."""
    tiling: Tiling = field(default_factory=Tiling)
    """How an image is cut into tiles, each of which is an image to the model."""
    split: Split = "all"
    """Records are assigned to `train` or `held_out` by a hash of their place."""
    held_out: Fraction = 0.05
    """Fraction of records in the split `held_out`."""
    skip: Annotated[int, Ge(0)] = 0
    """Number of broken records, such as those whose image cannot be decoded, that may be left out; one more is an error."""
    too_long: Literal["error", "skip", "truncate"] = "error"
    """What becomes of a document with more than `data.sequence_length` tokens: it is broken (`error`), left out (`skip`), or ends
    where the row does (`truncate`), without an image that does not fit as a whole. Neither of the last two counts for `skip`."""
    placeholder: Annotated[int, Ge(0)] | None = None
    """Id of the token that stands for an image; by default the model's."""
    per_image: Annotated[int, Gt(0)] | None = None
    """Placeholders of one tile; by default the model's."""
    size: Annotated[int, Gt(0)] | None = None
    """Height and width of a tile in pixels; by default the model's."""

    def read(self) -> "Examples":
        """The records, and where their images are."""
        raise NotImplementedError

    @property
    def fields(self) -> "Fields":
        """Which fields of a record are read."""
        from forge_vlm.data.documents import Fields

        return Fields(self.text, self.messages, self.images)

    def texts(self) -> "Texts":
        from forge_vlm.data.chat import chat_of
        from forge_vlm.data.documents import RecordTexts

        return RecordTexts(self.read(), self.fields, chat_of(self.template), self.split, self.held_out)

    def build(self, context: "SourceContext") -> "Source":
        from forge_vlm.data.chat import chat_of
        from forge_vlm.data.inputs import inputs_of
        from forge_vlm.data.prepare import Preparation, prepare

        given = {"placeholder": self.placeholder, "per_image": self.per_image, "size": self.size}
        inputs = inputs_of(context.model, self.label or self.format, self.tiling, **given)
        chat = chat_of(self.template).knowing(context.tokenizer.special_tokens if context.tokenizer else {})
        length = context.sequence_length
        wanted = Preparation(self.fields, chat, inputs, self.split, self.held_out, self.skip, length, self.too_long)
        return prepare(self.read(), wanted, context, self.format)


@dataclass(frozen=True, kw_only=True)
class ImageJsonl(ImageSource):
    """JSON lines, or a JSON list as LLaVA's, whose records name image files."""

    key_class: ClassVar = DATA
    format: ClassVar[str] = "image_jsonl"

    path: str
    """A file, a directory, a pattern or a URL of `.jsonl`, `.jsonl.gz`, `.jsonl.zst` or `.json`."""
    folder: str | None = None
    """Directory of the images; by default that of the file."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[ImageJsonl]":
        """Captions, text, and conversations."""
        from forge_vlm.data import example_images

        return (cls(path=example_images.jsonl(folder), **_SMALL),)

    def read(self) -> "Examples":
        from forge_vlm.data.image_readers import JsonlExamples

        return JsonlExamples(self.path, self.folder, self.images)


@dataclass(frozen=True, kw_only=True)
class ImageWebdataset(ImageSource):
    """Shards of WebDataset: uncompressed tar files whose members with one name up to the first dot are a record (`7.jpg` with
    `7.txt` or `7.json`). A member of another kind, or one that is there twice, makes its record a broken one."""

    key_class: ClassVar = DATA
    format: ClassVar[str] = "image_webdataset"

    path: str
    """A tar file, a directory of them, a pattern or a URL."""
    ignore: tuple[str, ...] = ()
    """Kinds of members that are left out, such as `cls`."""
    text_records: bool = False
    """Whether a record without an image is text. By default it is broken, because an image that is missing looks the same."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[ImageWebdataset]":
        """Two shards."""
        from forge_vlm.data import example_images

        return (cls(path=example_images.shards(folder), **_SMALL),)

    def read(self) -> "Examples":
        from forge_vlm.data.image_readers import TarExamples

        return TarExamples(self.path, self.text, self.images, self.ignore, self.text_records)


@dataclass(frozen=True, kw_only=True)
class ImageDataset(ImageSource):
    """A dataset of the `datasets` library with a column of images."""

    key_class: ClassVar = DATA
    format: ClassVar[str] = "image_dataset"

    path: str
    """A directory that `save_to_disk` wrote, a directory of data files, or a name on the hub."""
    subset: str | None = None
    """Configuration of a hub dataset that has several."""
    dataset_split: str = "train"
    """The dataset's own split."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[ImageDataset]":
        """Rows with one image each."""
        from forge_vlm.data import example_images

        return (cls(path=example_images.dataset(folder), **_SMALL),)

    def read(self) -> "Examples":
        from forge_vlm.data.image_readers import DatasetExamples

        return DatasetExamples(self.path, self.subset, self.dataset_split, self.images)


@dataclass(frozen=True, kw_only=True)
class VideoSource(ImageSource):
    """Base of sources of clips: some frames of each, in the order of their times, each an image to the model."""

    key_class: ClassVar = DATA
    format: ClassVar[str] = "video"

    frames: Annotated[int, Gt(0)] = 8
    """Frames of a clip, at equal distances of time from the first to the last; fewer where it has fewer."""
    timestamps: bool = True
    """Before each frame stands its time, such as `1.5s`."""


@dataclass(frozen=True, kw_only=True)
class VideoCsv(VideoSource):
    """Clips listed in a CSV file such as WebVid's (Bain et al., 2021), decoded by PyAV."""

    key_class: ClassVar = DATA
    format: ClassVar[str] = "video_csv"

    path: str
    """The CSV file, with a head."""
    folder: str | None = None
    """Directory of the clips; by default that of the file."""
    file: str = "{page_dir}/{videoid}.mp4"
    """Name of a clip in the folder, made of columns in braces."""
    text: str = "name"
    """Column that holds the text."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[VideoCsv]":
        """Clips of a few frames."""
        from forge_vlm.data import example_images

        return (cls(path=example_images.videos(folder), frames=2, timestamps=False, **_SMALL),)

    def read(self) -> "Examples":
        from forge_vlm.data.video_readers import VideoExamples

        return VideoExamples(self.path, self.folder, self.file, self.text, self.images, self.frames, self.timestamps)


@dataclass(frozen=True, kw_only=True)
class VideoFrames(VideoSource):
    """Clips whose frames are image files: JSON lines that name a directory of them, in the order of their names."""

    key_class: ClassVar = DATA
    format: ClassVar[str] = "video_frames"

    path: str
    """A file, a directory, a pattern or a URL of JSON lines: `{ "video": DIRECTORY, "text": ..., "fps": 2 }`, or the `times` of
    the frames in seconds."""
    folder: str | None = None
    """Directory of the clips' directories; by default that of the file."""
    video: str = "video"
    """Field that names the directory."""
    fps: Annotated[float, Gt(0)] = 1.0
    """Frames of a second, where a record says neither `fps` nor `times`."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[VideoFrames]":
        """Clips of a few frames."""
        from forge_vlm.data import example_images

        return (cls(path=example_images.frames(folder), frames=2, timestamps=False, **_SMALL),)

    def read(self) -> "Examples":
        from forge_vlm.data.video_readers import FrameExamples

        return FrameExamples(self.path, self.folder, self.video, self.images, self.fps, self.frames, self.timestamps)


@dataclass(frozen=True, kw_only=True)
class Digits(ImageSource):
    """The 1,797 handwritten digits that come with scikit-learn, captioned with their names."""

    key_class: ClassVar = DATA
    format: ClassVar[str] = "digits"

    each: Annotated[int, Gt(0)] = 1
    """Images of one document."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Digits]":
        """A part of them."""
        return (cls(**_SMALL, split="held_out"),)

    def read(self) -> "Examples":
        from forge_vlm.data.image_readers import DigitExamples

        return DigitExamples(self.text, self.images, self.each)
