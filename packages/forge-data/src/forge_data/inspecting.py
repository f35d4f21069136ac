"""What `data inspect` says about tokens on disk."""

from pathlib import Path
from typing import Any

import numpy as np

from forge_core.errors import DataError
from forge_core.protocols.data import Source
from forge_data.components.sources import Tokens
from forge_data.entropy import token_counts, unigram_entropy
from forge_data.sources.store import StoreSource
from forge_data.sources.tokens import open_tokens
from forge_data.tokenizers.stored import tokenizer_of

_SAMPLE = 120
_BARS = "▏▎▍▌▋▊▉█"


def open_any(path: Path, dtype: str | None, eos: int | None) -> Source:
    """A store when `path` is a directory, else a file of tokens.

    Raises:
        DataError: it is neither, or its dtype is unknown.
    """
    if path.is_dir() or not path.exists():
        return StoreSource(path)
    return open_tokens(Tokens(path=str(path), dtype=dtype, eos=eos))  # type: ignore[arg-type]


def inspect(path: Path, dtype: str | None = None, eos: int | None = None) -> dict[str, Any]:
    """Format, dtype, counts, lengths of documents, unigram entropy and a decoded sample, JSON as it stands.

    Reads document ends, and the tokens too where no counts were recorded.
    """
    if dtype is not None and dtype not in ("uint8", "uint16", "uint32", "int32", "int64"):
        raise DataError(f"unknown dtype {dtype!r}; known: uint8, uint16, uint32, int32, int64")
    source = open_any(path, dtype, eos)
    lengths = np.diff(source.ends().astype(np.int64), prepend=0)
    tokenizer = tokenizer_of(source) if isinstance(source, StoreSource) else None
    head = source.read(0, min(_SAMPLE, source.tokens)).tolist()
    found: dict[str, Any] = {
        "path": str(path),
        "format": "token store" if isinstance(source, StoreSource) else "tokens",
        "dtype": source.read(0, 0).dtype.name,
        "tokens": source.tokens,
        "documents": len(lengths),
        "max_id": source.max_id,
        "fingerprint": source.fingerprint,
        "unigram_entropy": unigram_entropy([token_counts(source)]),
        "lengths": {
            "shortest": int(lengths.min()),
            "median": float(np.median(lengths)),
            "mean": float(lengths.mean()),
            "longest": int(lengths.max()),
        },
        "histogram": histogram(lengths),
        "sample": {"ids": head, "text": tokenizer.decode(head) if tokenizer else None},
    }
    if isinstance(source, StoreSource):
        manifest = source.manifest
        found |= {
            "shards": len(manifest.shards),
            "text_bytes": manifest.text_bytes,
            "creator": manifest.creator,
            "tokenizer": None if manifest.tokenizer is None else vars(manifest.tokenizer),
        }
    return found


def histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """Documents by length, in powers of two: `{from, to, documents}` with from <= length < to."""
    powers = np.floor(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    counts = np.bincount(powers)
    low = int(np.flatnonzero(counts)[0])
    return [{"from": 2**power, "to": 2 ** (power + 1), "documents": int(counts[power])} for power in range(low, len(counts))]


def as_text(found: dict[str, Any]) -> str:
    """The same for a terminal, with the histogram drawn."""
    lines = [f"{found['path']}: {found['format']}, {found['dtype']}"]
    lines.append(f"  {found['tokens']:,} tokens in {found['documents']:,} documents, largest id {found['max_id']}")
    if "shards" in found:
        lines.append(f"  {found['shards']} shards, written by {found['creator']}")
    if found.get("text_bytes"):
        lines.append(f"  {found['text_bytes']:,} bytes of text, {found['text_bytes'] / found['tokens']:.2f} a token")
    if entry := found.get("tokenizer"):
        lines.append(f"  tokenizer {entry['name']}, vocabulary {entry['vocab_size']}, sha256 {entry['sha256'][:12]}")
    lengths = found["lengths"]
    lines.append(f"  unigram entropy {found['unigram_entropy']:.4f} nats per token")
    lines.append(f"  length of documents: {lengths['shortest']:,} to {lengths['longest']:,} tokens,")
    lines.append(f"  median {lengths['median']:,g}, mean {lengths['mean']:,.1f}")
    most = max(bin_["documents"] for bin_ in found["histogram"])
    lines += [f"  {b['from']:>10,} {_bar(b['documents'] / most, 40)} {b['documents']:,}" for b in found["histogram"]]
    sample = found["sample"]
    lines.append(f"  begins: {sample['text']!r}" if sample["text"] is not None else f"  begins: {sample['ids'][:20]}")
    return "\n".join(lines)


def _bar(fraction: float, width: int) -> str:
    eighths = round(fraction * width * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (_BARS[rest - 1] if rest else "")).ljust(width)
