"""What to train on, as a newcomer says it: finds the source for `stdlib`, a path, or SOURCE:PATH. No torch.

from forge_train.recipe.data_path import DataPath

assert DataPath.of("s3://bucket/corpus.jsonl.gz").source == "jsonl"
assert DataPath.of("huggingface:owner/name").path == "owner/name"
"""

import glob
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from forge_core.errors import ForgeError

STDLIB = "stdlib"
SUFFIXES = MappingProxyType(
    {
        "text": (".txt", ".md"),
        "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".ndjson"),
        "parquet": (".parquet",),
        "arrow": (".arrow", ".feather"),
    }
)
"""Sources of text, by the suffixes of their files."""
TEXTS = (STDLIB, *SUFFIXES, "huggingface")
TOKENS = ("store", "megatron", "llmc", "datatrove", "tokens")
SAVED_DATASET = ("state.json", "dataset_dict.json")
"""Files that `save_to_disk` of the `datasets` library writes."""
HELD_OUT = 0.05
LEAST_HELD_OUT = 1 << 16
"""Bytes of held-out text from which on it is evaluated."""


@dataclass(frozen=True)
class DataPath:
    """What to train on.

    Attributes:
        source: name of the source, such as `jsonl`.
        path: its path; empty for `stdlib`.
        held_out: whether a part of the text can be held out for evaluation.
    """

    source: str
    path: str = ""
    held_out: bool = False

    @classmethod
    def of(cls, given: str) -> "DataPath":
        """Finds the source for `stdlib`, a path, or SOURCE:PATH.

        Raises:
            ForgeError: the path does not exist, or its format is not known.
        """
        name, separator, rest = given.partition(":")
        if given == STDLIB:
            return cls(STDLIB, held_out=True)
        if separator and name in (*TEXTS[1:], *TOKENS):
            if not rest.strip():
                raise ForgeError(f"--data {given}: the path after {name}: is missing")
            if name != "huggingface":
                _require(rest)
            return cls(name, rest, name == "text" and _can_hold_out(rest))
        source = _source_of(given)
        return cls(source, given, source == "text" and _can_hold_out(given))

    @property
    def is_text(self) -> bool:
        """Whether the source has text, and so needs a tokenizer."""
        return self.source in TEXTS

    @cached_property
    def vocab_size(self) -> int | None:
        """Number of token ids that a token store records; None if it records none."""
        if self.source != "store":
            return None
        from forge_data.sources.store import read_manifest

        tokenizer = read_manifest(Path(self.path)).tokenizer
        return None if tokenizer is None else tokenizer.vocab_size


def _source_of(path: str) -> str:
    """Returns the name of the source that reads a path.

    Raises:
        ForgeError: the path does not exist, or its format is not known.
    """
    _require(path)
    hint = f"name the format, as in --data jsonl:{path}; formats: {', '.join((*TEXTS[1:], *TOKENS))}"
    folder = Path(path).expanduser()
    if folder.is_dir():
        if (folder / "manifest.json").is_file():
            return "store"
        if any((folder / file).is_file() for file in SAVED_DATASET):
            return "huggingface"
        kinds = {kind for file in folder.rglob("*") if (kind := _kind(file.name)) is not None}
        if len(kinds) > 1:
            raise ForgeError(f"--data {path}: the directory has files of several formats ({', '.join(sorted(kinds))}); {hint}")
        if kinds:
            return kinds.pop()
    elif (kind := _kind(path)) is not None:
        return kind
    if "://" in path:
        raise ForgeError(f"--data {path}: the format does not follow from the name; {hint}")
    return _token_format(path, hint)


def _kind(name: str) -> str | None:
    """Returns the source of text that reads a file, by the end of its name; None if there is none."""
    return next((source for source, suffixes in SUFFIXES.items() if name.endswith(suffixes)), None)


def _require(path: str) -> None:
    """Refuses a path that names nothing on this machine; URLs are checked when they are opened.

    Raises:
        ForgeError: it names nothing, or an empty folder.
    """
    place = Path(path).expanduser()
    if not path.strip():
        raise ForgeError(f"--data is empty; give a path, or {STDLIB}")
    if place.is_dir() and next(place.iterdir(), None) is None:
        raise ForgeError(f"--data {path} is a folder without files; put texts into it, or give {STDLIB}")
    if "://" in path or place.exists() or any(Path(f"{place}{end}").is_file() for end in (".idx", ".bin")):
        return
    if glob.has_magic(path) and next(glob.iglob(str(place), recursive=True), None) is not None:  # noqa: PTH207
        return
    raise ForgeError(
        f"--data {path} does not exist; for a dataset of the Hugging Face hub write --data huggingface:OWNER/NAME, and for "
        f"text that every machine has --data {STDLIB}"
    )


def _token_format(path: str, hint: str) -> str:
    from forge_data.sources.formats import detect

    try:
        return detect(path)
    except ForgeError as cause:
        raise ForgeError(f"--data {path}: its format is not known; {hint}") from cause


def _can_hold_out(path: str) -> bool:
    """Whether some of the files that a path names are held out, and enough of them."""
    from forge_data.sources.text import text_files

    if "://" in path:
        return False
    try:
        text_files(path, "train", HELD_OUT)
        return sum(file.size for file in text_files(path, "held_out", HELD_OUT).files) >= LEAST_HELD_OUT
    except ForgeError:
        return False
