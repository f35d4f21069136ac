"""Components for sources and tokenizers: their keys, ranges and defaults. Importing them loads neither torch nor numpy.

The file is long because it has the keys of all of them: one place to look for a key of the data.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt, MinLen

from forge_core.component import DATA, IDENTITY, Component
from forge_core.protocols.data import SourceComponent

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from forge_core.protocols.data import Source, SourceContext, StreamedSource, Texts, Tokenizer
    from forge_data.preparation.streaming import DatasetTexts
    from forge_data.sources.records import Records


Split = Literal["all", "train", "held_out"]
Fraction = Annotated[float, Gt(0), Lt(1)]
MOST_LABELS = 255
"""Maximum number of labels of a source: a store has a byte for each token."""


@dataclass(frozen=True, kw_only=True)
class TokenStore(SourceComponent):
    """A token store written by `data prepare`: a directory with `manifest.json` and memory-mapped shards."""

    default_label: ClassVar = "store"
    key_class: ClassVar = DATA

    path: str
    """Directory of the store."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[TokenStore]":
        """A store of several shards."""
        from forge_data import example_corpus

        return (cls(path=example_corpus.store(folder)),)

    def build(self, context: "SourceContext") -> "Source":
        from forge_data.sources.store import open_store

        return open_store(self.path, context.tokenizer)


@dataclass(frozen=True, kw_only=True)
class TextFiles(SourceComponent):
    """UTF-8 text files, one document per file; tokenized once into a store in the workspace."""

    default_label: ClassVar = "text"
    key_class: ClassVar = DATA

    path: str
    """A file, a directory (all `.txt` and `.md` below it), a pattern such as `corpus/**/*.txt`, or a URL of these."""
    split: Split = "all"
    """Files are assigned to `train` or `held_out` by a hash of their relative path."""
    held_out: Fraction = 0.05
    """Fraction of files in the split `held_out`."""
    skip: Annotated[int, Ge(0)] = 0
    """Maximum number of files that are skipped because they are not UTF-8; the next one is an error."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[TextFiles]":
        """One file per document."""
        from forge_data import example_corpus

        return (cls(path=example_corpus.text_files(folder)),)

    def texts(self) -> "Texts":
        from forge_data.sources.text import text_files

        return text_files(self.path, self.split, self.held_out, self.skip)

    def build(self, context: "SourceContext") -> "Source":
        from forge_data.preparation.tokenization import prepared

        return prepared(self.texts(), context, "text")


@dataclass(frozen=True, kw_only=True)
class RecordComponent(SourceComponent):
    """Base class of sources whose documents are records with a field of text or of token ids.

    `format` names the reader of the files; subclasses inherit it, whatever their class name. A subclass with its own reader
    overrides `records`.
    """

    key_class: ClassVar = DATA
    format: ClassVar[str]

    path: str
    """Location of the records."""
    text: str = "text"
    """Field that holds the text."""
    ids: str | None = None
    """Field that holds a list of token ids. If set, ids are read instead of text and copied into a store in the workspace."""
    eos: Annotated[int, Ge(0)] | None = None
    """For records of ids: the token id appended to every document that does not end with it."""
    split: Split = "all"
    """Records are assigned to `train` or `held_out` by a hash of their position in the corpus."""
    held_out: Fraction = 0.05
    """Fraction of records in the split `held_out`."""
    skip: Annotated[int, Ge(0)] = 0
    """Maximum number of broken records that are skipped; the next one is an error. Skipped records are listed in the log of the
    run, or in a file next to the prepared store."""
    stream: bool = False
    """Reads and tokenizes records in order during the run, instead of preparing a store first."""

    def texts(self) -> "Texts | None":
        return None if self.ids is not None else self.records()

    def build(self, context: "SourceContext") -> "Source | StreamedSource":
        if self.stream:
            return self.streamed(context)
        from forge_data.preparation.tokenization import prepared

        return prepared(self.records(), context, self.format, eos=self.eos)

    def records(self) -> "Records":
        """Returns the documents as a corpus in parts."""
        from forge_data.sources.formats import open_records

        return open_records(
            self.path, self.format, text=self.text, ids=self.ids, split=self.split, held_out=self.held_out, skip=self.skip
        )

    def streamed(self, context: "SourceContext") -> "StreamedSource":
        """Returns a source that streams the documents in order, file by file."""
        from forge_data.preparation.streaming import StreamedRecords

        return StreamedRecords(self.records(), context.tokenizer, self.eos, context.report)


@dataclass(frozen=True, kw_only=True)
class JsonLines(RecordComponent):
    """JSON lines, plain or compressed (`.jsonl`, `.jsonl.gz`, `.jsonl.zst`, `.json.gz`, `.json.zst`)."""

    default_label: ClassVar = "jsonl"
    key_class: ClassVar = DATA
    format: ClassVar[str] = "jsonl"

    path: str
    """A file, a directory, a pattern such as `corpus/**/*.jsonl.gz`, or a URL of these."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[JsonLines]":
        """A prepared source and a streamed one."""
        from forge_data import example_corpus

        return (cls(path=example_corpus.jsonl(folder)), cls(path=example_corpus.jsonl(folder), stream=True))


@dataclass(frozen=True, kw_only=True)
class Parquet(RecordComponent):
    """Parquet files with a column of text or of lists of token ids."""

    key_class: ClassVar = DATA
    format: ClassVar[str] = "parquet"

    path: str
    """A file, a directory (all `.parquet` below it), a pattern, or a URL of these."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Parquet]":
        """A file with a column of text."""
        from forge_data import example_corpus

        return (cls(path=example_corpus.parquet(folder)),)


@dataclass(frozen=True, kw_only=True)
class Arrow(RecordComponent):
    """Arrow files, of the file or the stream format, with a column of text or of lists of token ids."""

    key_class: ClassVar = DATA
    format: ClassVar[str] = "arrow"

    path: str
    """A file, a directory (all `.arrow` and `.feather` below it), a pattern, or a URL of these."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Arrow]":
        """A file with a column of text."""
        from forge_data import example_corpus

        return (cls(path=example_corpus.arrow(folder)),)


@dataclass(frozen=True, kw_only=True)
class HuggingFace(RecordComponent):
    """A dataset of the `datasets` library, with a column of text or of lists of token ids."""

    key_class: ClassVar = DATA
    format: ClassVar[str] = "huggingface"

    path: str
    """A directory that `save_to_disk` wrote, a directory of data files, or a name on the hub."""
    subset: str | None = None
    """Configuration of a hub dataset that has several."""
    dataset_split: str = "train"
    """The dataset's own split."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[HuggingFace]":
        """A directory of data files."""
        from forge_data import example_corpus

        path = example_corpus.jsonl(folder).removesuffix("/corpus.jsonl")
        return (cls(path=path),)

    def texts(self) -> "Texts | None":
        if self.ids is not None or not self.stream:
            return super().texts()
        return self._streamed_texts()

    def records(self) -> "Records":
        """Returns the documents as a corpus in parts."""
        from forge_data.sources.huggingface import open_dataset

        return open_dataset(
            self.path,
            subset=self.subset,
            dataset_split=self.dataset_split,
            text=self.text,
            ids=self.ids,
            split=self.split,
            held_out=self.held_out,
            skip=self.skip,
        )

    def streamed(self, context: "SourceContext") -> "StreamedSource":
        """Returns a source that streams the documents in order, shard by shard, without downloading the whole dataset."""
        from forge_data.preparation.streaming import StreamedDataset

        return StreamedDataset(self._streamed_texts(), context.tokenizer, self.eos, context.report)

    def _streamed_texts(self) -> "DatasetTexts":
        from forge_data.preparation.streaming import DatasetTexts

        return DatasetTexts(
            self.path,
            subset=self.subset,
            dataset_split=self.dataset_split,
            text=self.text,
            ids=self.ids,
            split=self.split,
            held_out=self.held_out,
            skip=self.skip,
        )


@dataclass(frozen=True, kw_only=True)
class Conversations(SourceComponent):
    """Conversations, of which only the assistant's words are trained: `.jsonl`, `.json`, Parquet or Arrow files of messages.

    The chat template of the tokenizer turns them into tokens. The stop token of each trained turn is trained too. A record that
    the template refuses, or that has nothing to train on, is broken. Requires jinja2: the extra `chat`.
    """

    default_label: ClassVar = "chat"
    key_class: ClassVar = DATA
    keeps_documents: ClassVar[bool] = True
    """True: `data.packing = "concatenate"`, which cuts documents, is not allowed."""

    too_long: Literal["error", "skip", "truncate"] = "error"
    """Treatment of documents longer than a row: refuse them, leave them out, or keep only their first row. A document that has
    nothing to train on in its first row is refused. The log of a run has the numbers."""
    path: str
    """A file, a directory, a pattern such as `talks/**/*.jsonl`, or a URL of these."""
    format: Literal["messages", "sharegpt", "alpaca", "prompt_completion", "preference"] = "messages"
    """What a record has: `messages` of role and content; `conversations` of ShareGPT; `instruction` and `output` of Alpaca;
    `prompt` and `completion`; or a preference pair: `prompt`, `chosen` and `rejected`, which becomes two documents."""
    messages: str | None = None
    """Key of the conversation in `messages` and `sharegpt` records; by default `messages` and `conversations`."""
    template: str | None = None
    """Chat template: the folder of a transformers tokenizer, its `tokenizer_config.json`, a Jinja template or its file, or
    `plain`, `chatml`, `llama3`; by default that of the folder of `data.tokenizer.path`."""
    train: Literal["all", "last", "each"] = "all"
    """Which turns of the assistant are trained: all of them; the last one; or each in a row of its own, which ends with it. A
    template that drops the reasoning of earlier answers needs `each` or `last`. Turns with `"weight": 0` never are."""
    stop: tuple[str, ...] = ()
    """Spellings of the tokens at which generation stops; by default those of `generation_config.json` in the folder of the
    template or the tokenizer, and the tokenizer's end of document."""
    split: Split = "all"
    """Records are assigned to `train` or `held_out` by a hash of their position in the corpus."""
    held_out: Fraction = 0.05
    """Fraction of records in the split `held_out`."""
    skip: Annotated[int, Ge(0)] = 0
    """Maximum number of broken records that are skipped; the next one is an error."""

    def __post_init__(self) -> None:
        if self.messages is not None and self.format not in ("messages", "sharegpt"):
            raise ValueError(f"`messages` names the conversation of messages and sharegpt records, and {self.format} has none")
        if self.train == "each" and self.format == "preference":
            raise ValueError("`train` = 'each' would separate the two answers of a preference pair; set 'all' or 'last'")

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Conversations]":
        """Completions of text, which need no template."""
        from forge_data import example_corpus

        return (cls(path=example_corpus.completions(folder), format="prompt_completion", too_long="truncate"),)

    def records(self, tokenizer: "Tokenizer | None") -> "Records":
        """Returns the conversations as a corpus in parts."""
        from forge_data.chat.records import open_conversations, settings_for

        settings = settings_for(tokenizer, self.format, self.train, self.messages, self.template, self.stop)
        return open_conversations(self.path, settings, self.split, self.held_out, self.skip)

    def build(self, context: "SourceContext") -> "Source":
        from forge_data.preparation.tokenization import prepared

        return prepared(self.records(context.tokenizer), context, "chat")


@dataclass(frozen=True, kw_only=True)
class Labeled(SourceComponent):
    """Texts with a label each, for a classifier: `.jsonl`, `.json`, Parquet or Arrow files, plain or compressed.

    A text is tokenized as `tokenizer(text)` of transformers does, without an end-of-document token, so that its last token is
    that of an exported classifier. A record without text, or with no label or an unknown one, is broken.
    """

    default_label: ClassVar = "labeled"
    key_class: ClassVar = DATA
    keeps_documents: ClassVar[bool] = True
    """True: `data.packing = "concatenate"`, which cuts documents, is not allowed."""

    too_long: Literal["error", "skip", "truncate"] = "error"
    """Treatment of texts longer than a row: refuse them, leave them out, or keep their first row, whose last token then has the
    label. The log of a run has the numbers."""
    path: str
    """A file, a directory, a pattern such as `reviews/**/*.jsonl`, or a URL of these."""
    labels: Annotated[tuple[str, ...], MinLen(2)]
    """Names of the labels; the first is number 0. The same as `model.labels`."""
    text: str = "text"
    """Field that holds the text."""
    pair: str | None = None
    """Field that holds a second text, such as the hypothesis of a premise; it follows the first after `separator`."""
    separator: str = "\n"
    """Text between the two texts of a pair."""
    answer: str = "label"
    """Field that holds the label: its name, or its number. Integers are names where names are integers, such as "1" to "5"."""
    split: Split = "all"
    """Records are assigned to `train` or `held_out` by a hash of their position in the corpus."""
    held_out: Fraction = 0.05
    """Fraction of records in the split `held_out`."""
    skip: Annotated[int, Ge(0)] = 0
    """Maximum number of broken records that are skipped; the next one is an error."""

    def __post_init__(self) -> None:
        if fault := _of_labels(self.labels):
            raise ValueError(f"labels {fault}")

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Labeled]":
        """Texts with two labels."""
        from forge_data import example_corpus

        labels = example_corpus.LABELS
        return (cls(path=example_corpus.labeled(folder), labels=labels, too_long="truncate"),)

    def texts(self) -> "Texts":
        from forge_data.chat.labeled import open_labeled

        return open_labeled(
            self.path,
            self.labels,
            text=self.text,
            pair=self.pair,
            separator=self.separator,
            label=self.answer,
            split=self.split,
            held_out=self.held_out,
            skip=self.skip,
        )

    def build(self, context: "SourceContext") -> "Source":
        from forge_data.preparation.tokenization import prepared

        return prepared(self.texts(), context, "labeled")


def _of_labels(labels: tuple[str, ...]) -> str:
    """Returns what is wrong with names of labels; empty if nothing is."""
    if len(labels) > MOST_LABELS:
        return f"has {len(labels)} names; the maximum is {MOST_LABELS}"
    if twice := [name for name in labels if labels.count(name) > 1]:
        return f"has {twice[0]!r} twice; give each label a name of its own"
    return "has an empty name; give each label a name" if "" in labels else ""


@dataclass(frozen=True, kw_only=True)
class Exercises(SourceComponent):
    """Generated exercises with words of random letters, such as "Reverse plum: " with the solution "mulp"; no two are equal.

    Only the solution is trained. With `pairs`, an exercise is a preference pair of its solution and a wrong one. With `labeled`,
    it is a text without the name of the task, such as "plum: mulp", whose label is the task.
    """

    key_class: ClassVar = DATA
    keeps_documents: ClassVar[bool] = True
    """True: `data.packing = "concatenate"`, which cuts documents, is not allowed."""

    pairs: bool = False
    """Makes preference pairs, for an objective that compares answers."""
    labeled: bool = False
    """Makes texts whose label is the task, for a classifier with `model.labels` = `tasks`."""
    count: Annotated[int, Ge(2)] = 20_000
    """Number of exercises in all splits."""
    tasks: Annotated[tuple[str, ...], MinLen(1)] = ("Reverse", "Capitalize", "Double")
    """Tasks of the exercises: `Reverse`, `Capitalize`, `Double` and `Rotate`."""
    letters: Annotated[int, Ge(3)] = 4
    """Maximum number of letters of a word; more make exercises harder."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the exercises."""
    split: Split = "train"
    """Exercises are assigned to `train` or `held_out` by a hash of their number."""
    held_out: Fraction = 0.02
    """Fraction of exercises in the split `held_out`."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Exercises]":
        """A few exercises."""
        return (cls(count=400, letters=3, too_long="skip"),)

    def __post_init__(self) -> None:
        if self.pairs and self.labeled:
            raise ValueError("pairs and labeled make different documents; remove one")

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels; empty if exercises have none."""
        return self.tasks if self.labeled else ()

    def build(self, context: "SourceContext") -> "Source":
        from forge_data.sources.exercises import write_exercises, write_labeled

        if self.labeled:
            path = write_labeled(context.workspace / "exercises", self.count, self.letters, self.seed, self.tasks)
            return Labeled(path=path, labels=self.tasks, split=self.split, held_out=self.held_out).build(context)
        path = write_exercises(context.workspace / "exercises", self.pairs, self.count, self.letters, self.seed, self.tasks)
        form: Literal["preference", "prompt_completion"] = "preference" if self.pairs else "prompt_completion"
        return Conversations(path=path, format=form, split=self.split, held_out=self.held_out).build(context)


@dataclass(frozen=True, kw_only=True)
class Stdlib(SourceComponent):
    """Text that every machine has: the source code of the installed Python standard library."""

    key_class: ClassVar = DATA

    split: Split = "train"
    """Files are assigned to `train` or `held_out` by a hash of their relative path."""
    held_out: Fraction = 0.05
    """Fraction of files in the split `held_out`."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Stdlib]":
        """A few files."""
        return (cls(split="held_out", held_out=0.005),)

    def texts(self) -> "Texts":
        from forge_data.sources.text import stdlib_files

        return stdlib_files(self.split, self.held_out)

    def build(self, context: "SourceContext") -> "Source":
        from forge_data.preparation.tokenization import prepared

        return prepared(self.texts(), context, "stdlib")


@dataclass(frozen=True, kw_only=True)
class Tokens(SourceComponent):
    """Files of token ids: `.npy` with its header, or raw little-endian integers with a stated dtype."""

    key_class: ClassVar = DATA
    implementation: ClassVar[str] = "forge_data.sources.arrays:open_tokens"

    path: str
    """A file, a directory (all `.npy` and `.bin` below it), a pattern such as `corpus/**/*.npy`, or a URL of these."""
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    """Dtype of raw files, required for them; a `.npy` file states its dtype in the header."""
    eos: Annotated[int, Ge(0)] | None = None
    """Id of the token that ends a document; if neither `eos` nor `bos` is set, each file is one document."""
    bos: Annotated[int, Ge(0)] | None = None
    """Id of the token that begins a document; excludes `eos`. A document may continue in the next file."""
    vocab_size: Annotated[int, Gt(0)] | None = None
    """Vocabulary size of the tokenizer that wrote the files, if known."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Tokens]":
        """A file whose documents end with a token."""
        from forge_data import example_corpus

        return (cls(path=example_corpus.npy(folder), eos=example_corpus.EOS),)

    def __post_init__(self) -> None:
        if self.eos is not None and self.bos is not None:
            raise ValueError("set `eos` or `bos`, not both: one token is enough to separate documents")


@dataclass(frozen=True, kw_only=True)
class Megatron(SourceComponent):
    """Megatron's indexed datasets (`NAME.bin` with `NAME.idx`), read in place with their dtype and documents."""

    key_class: ClassVar = DATA
    implementation: ClassVar[str] = "forge_data.sources.megatron:open_megatron"

    path: str
    """Prefix without suffix, one of the two files, a directory or pattern of `.idx` files, or a URL of these."""
    vocab_size: Annotated[int, Gt(0)] | None = None
    """Vocabulary size of the tokenizer that wrote the files, if known."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Megatron]":
        """A corpus of one file and its index."""
        from forge_data import example_corpus

        return (cls(path=example_corpus.megatron(folder)),)


@dataclass(frozen=True, kw_only=True)
class Llmc(SourceComponent):
    """Token files of llm.c (`.bin` with a header of 256 integers), read in place."""

    key_class: ClassVar = DATA
    implementation: ClassVar[str] = "forge_data.sources.token_files:open_llmc"

    path: str
    """A file, a directory (all `.bin` below it), a pattern, or a URL of these."""
    bos: Annotated[int, Ge(0)] | None = None
    """Id of the token that begins a document; by default chosen by the header: 50256 (GPT-2) or 128000 (Llama 3)."""
    vocab_size: Annotated[int, Gt(0)] | None = None
    """Vocabulary size of the tokenizer that wrote the files, if known."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Llmc]":
        """A file whose documents begin with a token."""
        from forge_data import example_corpus

        return (cls(path=example_corpus.llmc(folder), bos=example_corpus.EOS),)


@dataclass(frozen=True, kw_only=True)
class Datatrove(SourceComponent):
    """Token files of datatrove (`.ds` with `.ds.index`), read in place with their documents."""

    key_class: ClassVar = DATA
    implementation: ClassVar[str] = "forge_data.sources.token_files:open_datatrove"

    path: str
    """A file, a directory (all `.ds` below it), a pattern, or a URL of these."""
    dtype: Literal["uint16", "uint32"] | None = None
    """Expected dtype; the actual dtype follows from the sizes of file and index. By default not checked."""
    ignore_loss_mask: bool = False
    """Reads files that have a loss mask, and trains on all of their tokens."""
    vocab_size: Annotated[int, Gt(0)] | None = None
    """Vocabulary size of the tokenizer that wrote the files, if known."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Datatrove]":
        """A file and its index."""
        from forge_data import example_corpus

        return (cls(path=example_corpus.datatrove(folder)),)


@dataclass(frozen=True, kw_only=True)
class RandomTokens(SourceComponent):
    """Uniform random tokens, a function of (seed, position). No model can reach a loss below ln(vocab_size)."""

    default_label: ClassVar = "random"
    key_class: ClassVar = DATA
    implementation: ClassVar[str] = "forge_data.sources.random:RandomSource"

    vocab_size: Annotated[int, Gt(1)]
    """Ids are drawn from 0 to vocab_size - 1."""
    tokens: Annotated[int, Gt(0)] = 1_000_000
    """Length of the stream."""
    document: Annotated[int, Gt(0)] | None = None
    """Tokens per document; by default the whole stream is one document."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the tokens."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[RandomTokens]":
        """A short stream of many documents, and one of a single document."""
        return (cls(vocab_size=257, tokens=4000, document=23), cls(vocab_size=257, tokens=4000))


@dataclass(frozen=True, kw_only=True)
class Bytes(Component):
    """UTF-8 bytes as tokens 0 to 255, and end of document as token 256. Needs no training."""

    implementation: ClassVar[str] = "forge_data.tokenizers.bytes:ByteTokenizer"

    def tokens_of(self, text: str) -> int:
        """Returns the number of tokens of a text without building the tokenizer."""
        return len(text.encode("utf-8", "replace"))


@dataclass(frozen=True, kw_only=True)
class Bpe(Component):
    """Byte-level byte-pair encoding (Sennrich et al., 2016; bytes as in GPT-2), trained once or loaded from a file."""

    key_class: ClassVar = IDENTITY

    vocab_size: Annotated[int, Ge(257)] = 4096
    """Largest vocabulary of a trained tokenizer: 256 bytes, the end of document, and merges."""
    path: Annotated[str | None, DATA] = None
    """A `tokenizer.json` of the `tokenizers` library to load instead of training."""
    files: Annotated[tuple[str, ...], DATA] = ()
    """Text files or patterns to train on; by default the recipe's text sources."""
    eos: str = "<|endoftext|>"
    """The token that ends a document; a loaded tokenizer must contain it."""
    min_frequency: Annotated[int, Ge(1)] = 2
    """Minimum number of occurrences of a pair that is merged."""
    train_bytes: Annotated[int, Ge(1)] = 1_000_000_000
    """Bytes of text to train on; documents are read in order until this size is reached."""
    add_special_tokens: Annotated[bool, DATA] = True
    """Whether documents get the special tokens that the tokenizer's own rule adds, such as a BOS. Set false to resume a run
    that was started without them."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Bpe]":
        """A few merges."""
        return (cls(vocab_size=300),)

    def build(self, context: "SourceContext") -> "Tokenizer":
        from forge_data.tokenizers.bpe import BpeSettings, load, train

        if self.path is not None:
            return load(self.path, self.eos, self.add_special_tokens)
        settings = BpeSettings(
            vocab_size=self.vocab_size,
            files=self.files,
            eos=self.eos,
            min_frequency=self.min_frequency,
            train_bytes=self.train_bytes,
        )
        return train(settings, context)


@dataclass(frozen=True, kw_only=True)
class Tiktoken(Component):
    """A byte-pair encoding of the `tiktoken` library."""

    key_class: ClassVar = IDENTITY

    encoding: str = "gpt2"
    """Name of an encoding, such as `gpt2`, `cl100k_base` or `o200k_base`; the library downloads it once and caches it."""
    path: Annotated[str | None, DATA] = None
    """A rank file (a base64 token and its rank on each line) to load instead; requires `pattern`."""
    pattern: str | None = None
    """For a rank file: the regular expression that splits text before merging."""
    special_tokens: dict[str, int] = field(default_factory=dict)
    """For a rank file: special strings and their ids; by default only `eos`, with the id after the last rank."""
    eos: str = "<|endoftext|>"
    """The special string that ends a document."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Tiktoken]":
        """A rank file, because a named encoding would be downloaded."""
        from forge_data import example_corpus

        return (cls(path=example_corpus.ranks(folder), pattern=r"\s+|\S+"),)

    def build(self, context: "SourceContext") -> "Tokenizer":
        from forge_data.tokenizers.tiktoken import load_encoding, load_ranks

        if self.path is None:
            return load_encoding(self.encoding, self.eos)
        return load_ranks(self.path, pattern=self.pattern, special_tokens=self.special_tokens, eos=self.eos)


@dataclass(frozen=True, kw_only=True)
class SentencePiece(Component):
    """A model of the `sentencepiece` library."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_data.tokenizers.sentencepiece:load"

    path: Annotated[str, DATA]
    """The `.model` file."""
    eos: str | None = None
    """The piece that ends a document; by default the model's end-of-sentence piece."""
    add_special_tokens: Annotated[bool, DATA] = True
    """Whether documents get the BOS and EOS that the `tokenizer_config.json` next to the model requests."""

    lossless: ClassVar[bool] = False

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[SentencePiece]":
        """A small model, which normalizes text and lacks some characters."""
        from forge_data import example_corpus

        return (cls(path=example_corpus.pieces(folder)),)
