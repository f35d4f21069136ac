"""Chooses the reader of a path: record formats by name, token formats by the files at the path."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from forge_core.errors import DataError
from forge_core.protocols.data import Source
from forge_data.sources import columns, jsonl
from forge_data.sources.arrays import is_llmc, open_tokens
from forge_data.sources.megatron import open_megatron
from forge_data.sources.records import CorpusPart, Records, Wanted
from forge_data.sources.store import open_store
from forge_data.sources.token_files import open_datatrove, open_llmc
from forge_data.storage.files import File, find, find_one, is_url, read_bytes

TOKEN_FORMATS = ("store", "megatron", "llmc", "datatrove", "tokens")
RAW_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
_RECORDS = (".jsonl", ".json", ".parquet", ".arrow", ".txt", ".md", ".gz", ".zst")


def open_any(
    path: str,
    *,
    kind: str | None = None,
    dtype: str | None = None,
    eos: int | None = None,
    bos: int | None = None,
    vocab_size: int | None = None,
) -> Source:
    """Opens the tokens at a path: a store, files of Megatron, llm.c or datatrove, `.npy`, or raw ids of a stated dtype.

    Raises:
        DataError: the format is unknown, the files are damaged, or their dtype is unknown.
    """
    if dtype is not None and dtype not in RAW_DTYPES:
        raise DataError(f"unknown dtype {dtype!r}; known: {', '.join(RAW_DTYPES)}")
    chosen = kind or detect(path)
    match chosen:
        case "store":
            return open_store(path)
        case "megatron":
            return open_megatron(path, vocab_size=vocab_size)
        case "llmc":
            return open_llmc(path, bos=bos, vocab_size=vocab_size)
        case "datatrove":
            return open_datatrove(path, vocab_size=vocab_size)
        case "tokens":
            if eos is not None and bos is not None:
                raise DataError("use --eos or --bos, not both: one token is enough to separate documents")
            return open_tokens(path, dtype=dtype, eos=eos, bos=bos, vocab_size=vocab_size)
    raise DataError(f"unknown format {chosen!r}; known: {', '.join(TOKEN_FORMATS)}")


def detect(path: str) -> str:
    """Returns the token format at a path, by file names and first bytes. It never guesses a dtype.

    Raises:
        DataError: the path does not exist, or holds only text.
    """
    directory = Path(path)
    if not is_url(path):
        if directory.is_dir() and (directory / "manifest.json").exists():
            return "store"
        if find_one(f"{path.removesuffix('.bin').removesuffix('.idx')}.idx"):
            return "megatron"
        if not directory.exists() and not any(letter in path for letter in "*?["):
            raise DataError(f"{path} does not exist")
    for format_, suffix in (("megatron", ".idx"), ("datatrove", ".ds")):
        if path.endswith(suffix) or (_is_directory(path) and next(directory.rglob(f"*{suffix}"), None)):
            return format_
    if _is_directory(path) and not any(next(directory.rglob(f"*{suffix}"), None) for suffix in (".npy", ".bin")):
        raise DataError(
            f"{path} is not a token store: it has no manifest.json and no token file; write a store with `data prepare`"
        )
    first = find(path, (".npy", ".bin"), "token")[0]
    if first.name.endswith(_RECORDS):
        raise DataError(f"{path} is text, not tokens; tokenize it with `data prepare`")
    return "llmc" if is_llmc(read_bytes(first, 0, 256)) else "tokens"


def _is_directory(path: str) -> bool:
    return not is_url(path) and Path(path).is_dir()


class RecordFormat(NamedTuple):
    """Suffixes of a format's files, the module that reads them, and the function that cuts them into parts."""

    suffixes: tuple[str, ...]
    reader: str
    cut: Callable[[Sequence[File], int], list[CorpusPart]]


RECORD_FORMATS = {
    "jsonl": RecordFormat(jsonl.SUFFIXES, "jsonl", jsonl.cut),
    "parquet": RecordFormat(columns.PARQUET, "columns", columns.cut),
    "arrow": RecordFormat(columns.ARROW, "columns", columns.cut),
}


def open_records(
    path: str,
    format: str,  # noqa: A002 (the field's term)
    *,
    text: str = "text",
    ids: str | None = None,
    split: str = "all",
    held_out: float = 0.05,
    skip: int = 0,
) -> Records:
    """Opens the documents in files of records.

    Args:
        path: a file, directory, pattern or URL.
        format: a key of `RECORD_FORMATS`.
        text: field that holds the text.
        ids: field that holds a list of token ids; if set, it is read instead of the text.
        split, held_out: see `in_split`.
        skip: maximum number of broken records that are skipped.

    Raises:
        DataError: the format is unknown, the file does not exist, or all files are empty.
    """
    if format not in RECORD_FORMATS:
        raise DataError(f"record format {format!r} is unknown; known: {', '.join(RECORD_FORMATS)}")
    form = RECORD_FORMATS[format]
    files = find(path, form.suffixes, format)
    if not any(file.size for file in files):
        raise DataError(f"{path} has no records: all {len(files)} files are empty; check the path")
    wanted = Wanted(form.reader, ids or text, ids is not None, split, held_out)
    return Records(files, wanted, f"{path} ({split})", form.cut, skip)
