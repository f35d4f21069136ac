"""Sources of documents with images, selected by `[[data.sources]]` or `[data.evaluation.NAME]`.

Each source is prepared once into a store in the workspace: text becomes tokens, and each image becomes placeholders of the
recipe's model. Images stay where they are and are read, decoded and tiled when a batch needs them.
"""

from dataclasses import dataclass, field, replace
from string import Formatter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt

from forge_core.component import DATA
from forge_core.errors import DataError
from forge_core.protocols.data import SourceComponent
from forge_data.components import Fraction, Split
from forge_vlm.components.frame_scorers import FrameSelection
from forge_vlm.images.tiling import Tiling

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from forge_core.protocols.data import Source, SourceContext, Texts
    from forge_vlm.data.documents import Examples, Fields

_SMALL: dict[str, Any] = {"placeholder": 300, "per_image": 2, "size": 8}
"""Keys for examples, which have no model."""


@dataclass(frozen=True, kw_only=True)
class ImageSource(SourceComponent):
    """Base of sources whose records have images; a subclass opens them in `read`.

    A record is text with `<image>` in place of each image (without `<image>`, all images precede the text), or a conversation: a
    list of `{ role, content }`, or LLaVA's `{ from, value }`. In a conversation only the assistant's words are learned.
    """

    key_class: ClassVar = DATA
    keeps_documents: ClassVar[bool] = True
    """True: documents are never cut, so `data.packing = "concatenate"` is not allowed."""
    format: ClassVar[str] = "images"

    text: str = "text"
    """Field with the text."""
    messages: str = "messages"
    """Field with a conversation, which takes precedence over `text`; LLaVA uses `conversations`."""
    images: str = "image"
    """Field with the name of an image, or a list of names. A record without this field is text."""
    template: str = "plain"
    """Chat template: `plain`, `chatml`, `llama3`, a Jinja template or its file, a `tokenizer_config.json`, or the folder of a
    transformers tokenizer; `FOLDER:NAME` selects one of several templates."""
    tiling: Tiling = field(default_factory=Tiling)
    """How an image is split into tiles; the model processes each tile as an image."""
    split: Split = "all"
    """Records are assigned to `train` or `held_out` by a hash of their position."""
    held_out: Fraction = 0.05
    """Fraction of records in the split `held_out`."""
    skip: Annotated[int, Ge(0)] = 0
    """Maximum number of broken records to skip, such as those whose image cannot be decoded; one more is an error."""
    too_long: Literal["error", "skip", "truncate"] = "error"
    """What happens to a document with more than `data.sequence_length` tokens: it is broken (`error`), skipped (`skip`), or
    truncated at the end of the row, without an image that does not fit completely (`truncate`). Only `error` counts
    towards the key `skip`."""
    placeholder: Annotated[int, Ge(0)] | None = None
    """Id of the token that represents an image; by default the model's."""
    per_image: Annotated[int, Gt(0)] | None = None
    """Placeholders of one tile; by default the model's."""
    size: Annotated[int, Gt(0)] | None = None
    """Height and width of a tile in pixels; by default the model's."""

    def read(self) -> "Examples":
        """Opens the records and locates their images."""
        raise NotImplementedError

    @property
    def fields(self) -> "Fields":
        """The fields of a record that are read."""
        from forge_vlm.data.documents import Fields

        return Fields(self.text, self.messages, self.images)

    def texts(self) -> "Texts":
        from forge_data.chat.conversation import chat_of
        from forge_vlm.data.documents import RecordTexts

        return RecordTexts(self.read(), self.fields, chat_of(self.template), self.split, self.held_out)

    def build(self, context: "SourceContext") -> "Source":
        from forge_data.chat.conversation import chat_of
        from forge_vlm.data.inputs import inputs_of
        from forge_vlm.data.prepare import Preparation, prepare
        from forge_vlm.data.processor_inputs import ProcessorInputs, processor_inputs

        given = {"placeholder": self.placeholder, "per_image": self.per_image, "size": self.size}
        name = self.label or self.format
        if hasattr(context.model, "image_arguments"):
            inputs = processor_inputs(context.model, name, self.tiling, given)
        else:
            inputs = inputs_of(context.model, name, self.tiling, **given)
        chat = chat_of(self.template).knowing(context.tokenizer.special_tokens if context.tokenizer else {})
        length, fields = context.sequence_length, self.fields
        if isinstance(inputs, ProcessorInputs):
            fields = replace(fields, pieces=True)
            if self.too_long == "truncate":
                raise DataError(
                    f"source {name!r} cuts documents, but what a processor writes for an image cannot be "
                    "cut; set too_long = 'error' or 'skip'"
                )
        wanted = Preparation(fields, chat, inputs, self.split, self.held_out, self.skip, length, self.too_long)
        return prepare(self.read(), wanted, context, self.format)


@dataclass(frozen=True, kw_only=True)
class ImageJsonl(ImageSource):
    """JSON lines, or a JSON list such as LLaVA's, whose records name image files."""

    key_class: ClassVar = DATA
    format: ClassVar[str] = "image_jsonl"

    path: str
    """A file, a directory, a pattern or a URL of `.jsonl`, `.jsonl.gz`, `.jsonl.zst` or `.json`."""
    folder: str | None = None
    """Directory of the images; by default that of the file."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[ImageJsonl]":
        """Returns captions, text, and conversations."""
        from forge_vlm.data import example_images

        return (cls(path=example_images.jsonl(folder), **_SMALL),)

    def read(self) -> "Examples":
        from forge_vlm.data.image_readers import JsonlExamples

        return JsonlExamples(self.path, self.folder, self.images)


@dataclass(frozen=True, kw_only=True)
class ImageWebdataset(ImageSource):
    """WebDataset shards: uncompressed tar files in which members with the same name up to the first dot form a record (`7.jpg`
    with `7.txt` or `7.json`). A record with a member of another kind, or with a duplicate, is broken."""

    key_class: ClassVar = DATA
    format: ClassVar[str] = "image_webdataset"

    path: str
    """A tar file, a directory of them, a pattern or a URL."""
    ignore: tuple[str, ...] = ()
    """Kinds of members to skip, such as `cls`."""
    text_records: bool = False
    """Accepts records without an image as text. By default they are broken, because a missing image looks the same."""

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
    """A dataset of the `datasets` library with an image column."""

    key_class: ClassVar = DATA
    format: ClassVar[str] = "image_dataset"

    path: str
    """A directory written by `save_to_disk`, a directory of data files, or a name on the hub."""
    subset: str | None = None
    """Configuration name, for hub datasets with several."""
    dataset_split: str = "train"
    """Split of the dataset."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[ImageDataset]":
        """Returns rows with one image each."""
        from forge_vlm.data import example_images

        return (cls(path=example_images.dataset(folder), **_SMALL),)

    def read(self) -> "Examples":
        from forge_vlm.data.image_readers import DatasetExamples

        return DatasetExamples(self.path, self.subset, self.dataset_split, self.images)


@dataclass(frozen=True, kw_only=True)
class VideoSource(ImageSource):
    """Base of sources of clips: selected frames of each clip in the order of time; the model processes each frame as an image."""

    key_class: ClassVar = DATA
    format: ClassVar[str] = "video"

    frames: Annotated[int, Gt(0)] = 8
    """Maximum number of frames of a clip, equally spaced in time from the first to the last."""
    timestamps: bool = True
    """Writes the time of each frame before the frame, such as `1.5s`."""


@dataclass(frozen=True, kw_only=True)
class VideoCsv(VideoSource):
    """Clips listed in a CSV file such as WebVid's (Bain et al., 2021), decoded by PyAV."""

    key_class: ClassVar = DATA
    format: ClassVar[str] = "video_csv"

    path: str
    """The CSV file, with a header."""
    folder: str | None = None
    """Directory of the clips; by default that of the file."""
    file: str = "{page_dir}/{videoid}.mp4"
    """File name of a clip in the folder, with column names in braces."""
    text: str = "name"
    """Column with the text."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[VideoCsv]":
        """Returns clips with a few frames."""
        from forge_vlm.data import example_images

        return (cls(path=example_images.videos(folder), frames=2, timestamps=False, **_SMALL),)

    def read(self) -> "Examples":
        from forge_vlm.data.video_readers import VideoExamples

        return VideoExamples(self.path, self.folder, self.file, self.text, self.images, self.frames, self.timestamps)


@dataclass(frozen=True, kw_only=True)
class VideoFrames(VideoSource):
    """Clips whose frames are image files: JSON lines name a directory for each clip; frames are ordered by name."""

    key_class: ClassVar = DATA
    format: ClassVar[str] = "video_frames"

    path: str
    """A file, a directory, a pattern or a URL of JSON lines: `{ "video": DIRECTORY, "text": ..., "fps": 2 }`; `times`, one for
    each frame in ascending seconds from 0 on, can replace `fps`."""
    folder: str | None = None
    """Directory of the clips' directories; by default that of the file."""
    video: str = "video"
    """Field that names the directory."""
    fps: Annotated[float, Gt(0)] = 1.0
    """Frames per second of records with neither `fps` nor `times`."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[VideoFrames]":
        """Returns clips with a few frames."""
        from forge_vlm.data import example_images

        return (cls(path=example_images.frames(folder), frames=2, timestamps=False, **_SMALL),)

    def read(self) -> "Examples":
        from forge_vlm.data.video_readers import FrameExamples

        return FrameExamples(self.path, self.folder, self.video, self.images, self.fps, self.frames, self.timestamps)


@dataclass(frozen=True, kw_only=True)
class VideoQuestions(VideoSource):
    """Questions about clips with their answers, open or multiple choice: a conversation in which only the answers are learned.

    A clip is a video file, which PyAV decodes, or a directory of frames, ordered by name; `fps` and `times` of a row are as in
    `video_frames`. The keys below say which field of a row is what. All questions of a clip are in the same split. A row without
    an answer, with an answer that is not one of its choices, or with a missing clip is broken.
    """

    key_class: ClassVar = DATA
    format: ClassVar[str] = "video_questions"

    path: str
    """A file, a directory, a pattern or a URL of JSON lines, `.json` or `.csv` (with a header)."""
    folder: str | None = None
    """Directory of the clips; by default that of the file."""
    file: str = "{video}"
    """Path of a clip in the folder, with names of fields in braces: `{video}.mp4`."""
    fps: Annotated[float, Gt(0)] = 1.0
    """Frames per second of directories of frames whose row has neither `fps` nor `times`."""
    key_field: str | None = None
    """For a `.json` file that is an object by clip (Perception Test): field that receives the key of each record."""
    questions: str | None = None
    """Field with a list of questions of the clip, each with its own fields; by default a row is one question."""
    question: str = "question"
    """Field with the question."""
    ask: str | None = None
    """Question of every row, in place of a field: for captions, such as `Describe the video.`"""
    choices: tuple[str, ...] = ()
    """Field with the list of choices (in CSV as JSON), or one field for each choice: `["a0", "a1", "a2"]`, of which a row may
    leave the last ones empty. Without it questions are open."""
    answer: str = "answer"
    """Field with the answer."""
    answer_is: Literal["text", "index", "letter"] = "text"
    """What the field `answer` is: text; the number of a choice, from 0 on; or the letter of a choice, from A on."""
    reply: Literal["letter", "letter_text", "text"] | None = None
    """What the model answers to a question with choices: the `letter` (the default), both as in the question, or the `text`."""
    choice: str = "{letter}. {text}"
    """A choice in the question."""
    instruction: str | None = None
    """Last line of a question with choices; by default it asks for `reply`. An empty text is no line."""
    shuffle: bool = True
    """Shuffles the choices of each question, by its clip and its text: the same in every epoch and on every machine."""
    shuffle_seed: int = 0
    """Changes the order of shuffled choices."""
    together: Annotated[int, Gt(0)] = 1
    """Maximum number of neighboring questions of one clip in one conversation, which has the clip once."""
    select: FrameSelection = field(default_factory=FrameSelection)
    """How frames are chosen, by time or by the question."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[VideoQuestions]":
        """Returns open questions, and questions with choices, in a template that writes contents alone."""
        from forge_vlm.data import example_images

        template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        keys: dict[str, Any] = {"path": example_images.questions(folder), "timestamps": False, "template": template, **_SMALL}
        return (
            cls(**keys, ask="?", frames=2),
            cls(**keys, choices=("options",), choice="{letter}{text}", instruction="", frames=1),
        )

    def __post_init__(self) -> None:
        if self.select.name != "uniform" and self.together > 1:
            raise ValueError(f"select.name = {self.select.name!r} chooses frames by one question; set together = 1")
        if self.select.name != "uniform" and self.select.candidates < self.frames:
            raise ValueError(f"select.candidates {self.select.candidates} is below frames {self.frames}; set it higher")
        if not self.choices and self.answer_is != "text":
            raise ValueError(f"answer_is = {self.answer_is!r} needs choices; set `choices`, or answer_is = 'text'")
        if not self.choices and self.reply is not None:
            raise ValueError(f"reply = {self.reply!r} needs choices; set `choices`, or remove reply")
        for key in ("file", "choice"):
            try:
                names = _names_in(getattr(self, key))
            except ValueError as error:
                raise ValueError(f"{key} = {getattr(self, key)!r}: {error}") from error
            if key == "choice" and set(names) != {"letter", "text"}:
                raise ValueError(f"choice = {self.choice!r} must have {{letter}} and {{text}}, and no other name")

    def read(self) -> "Examples":
        from forge_vlm.data.questions import INSTRUCTIONS, AnswerStyle, QuestionExamples, QuestionFields

        fields = QuestionFields(
            self.file, self.question, self.ask, self.choices, self.answer, self.answer_is, self.questions, self.key_field
        )
        reply = self.reply or "letter"
        instruction = INSTRUCTIONS[reply] if self.instruction is None else self.instruction
        style = AnswerStyle(reply, self.choice, instruction, self.shuffle, self.shuffle_seed)
        return QuestionExamples(
            self.path,
            self.folder,
            fields,
            style,
            (self.messages, self.images),
            fps=self.fps,
            count=self.frames,
            told=self.timestamps,
            together=self.together,
            chooser=self.select.chooser(),
        )


def _names_in(template: str) -> list[str]:
    """Returns the names in braces in a text.

    Raises:
        ValueError: braces do not match, or contain something else than a name.
    """
    pieces = [piece for piece in Formatter().parse(template) if piece[1] is not None]
    if any(not name or form or conversion for _, name, form, conversion in pieces):
        raise ValueError("braces must contain a name; double braces that are text")
    return [str(name) for _, name, _, _ in pieces]


@dataclass(frozen=True, kw_only=True)
class Digits(ImageSource):
    """The 1,797 handwritten digits that come with scikit-learn, captioned with their names."""

    key_class: ClassVar = DATA
    format: ClassVar[str] = "digits"

    each: Annotated[int, Gt(0)] = 1
    """Number of images per document."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Digits]":
        """Returns a subset of the digits."""
        return (cls(**_SMALL, split="held_out"),)

    def read(self) -> "Examples":
        from forge_vlm.data.image_readers import DigitExamples

        return DigitExamples(self.text, self.images, self.each)
