"""Implements `data inspect` and `data verify`: describes tokens on disk, and checks them for damage."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from forge_core.protocols.data import Source
from forge_core.terminal import ProgressMeter
from forge_data.sources.scan import place_of, portions, token_counts, unigram_entropy
from forge_data.sources.store import StoreSource
from forge_data.sources.token_files import TokenFiles
from forge_data.tokenizers.dump import tokenizer_of

_SHOWN_TOKENS = 120
_BARS = "▏▎▍▌▋▊▉█"
_HASHES_KEPT = 1 << 20
"""Approximate maximum number of hashes; in a larger corpus, only documents with small hashes are compared."""


def inspect_tokens(path: str, source: Source) -> dict[str, Any]:
    """Returns format, dtype, counts, document lengths, unigram entropy and a decoded sample, as JSON.

    Reads all document ends, and also all tokens if their counts are not recorded.
    """
    lengths = np.diff(source.ends().astype(np.int64), prepend=0)
    tokenizer = tokenizer_of(source) if isinstance(source, StoreSource) else None
    head = source.read(0, min(_SHOWN_TOKENS, source.tokens)).tolist()
    counts = token_counts(source)
    found: dict[str, Any] = {
        "path": path,
        "format": source.described.format if isinstance(source, TokenFiles) else "token store",
        "dtype": source.read(0, 0).dtype.name,
        "tokens": source.tokens,
        "documents": len(lengths),
        "max_id": len(counts) - 1,
        "fingerprint": source.fingerprint,
        "unigram_entropy": unigram_entropy([counts]),
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
    if isinstance(source, TokenFiles):
        found |= {"files": len(source.shards.shards), **source.described.more}
        if source.described.documents is not None:
            found["empty_documents"] = source.described.documents - len(lengths)
    return found


def histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """Returns documents by length, in powers of two: `{from, to, documents}` with from <= length < to."""
    powers = np.floor(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    counts = np.bincount(powers)
    low = int(np.flatnonzero(counts)[0])
    return [{"from": 2**power, "to": 2 ** (power + 1), "documents": int(counts[power])} for power in range(low, len(counts))]


def inspection_text(found: dict[str, Any]) -> str:
    """The same for a terminal, with the histogram drawn."""
    lines = [f"{found['path']}: {found['format']}, {found['dtype']}"]
    lines.append(f"  {found['tokens']:,} tokens in {found['documents']:,} documents, largest id {found['max_id']}")
    if "shards" in found:
        lines.append(f"  {found['shards']} shards, written by {found['creator']}")
    if "files" in found:
        sequences = f", {found['sequences']:,} sequences" if "sequences" in found else ""
        empty = f", {found['empty_documents']:,} documents without a token" if found.get("empty_documents") else ""
        lines.append(f"  {found['files']:,} files{sequences}{empty}")
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


def verify_tokens(source: Source, vocab_size: int | None, report: Callable[[str], None]) -> dict[str, Any]:
    """Returns faults with file and offset, and the number of duplicate documents, as JSON.

    Checks checksums (of a store), the document index, and every id against the vocabulary. Duplicates are found by the XXH3
    of whole documents, in a large corpus among a sample by hash, which contains either all copies of a document or none.
    """
    faults = source.verify() if isinstance(source, StoreSource) else []
    if isinstance(source, TokenFiles) and source.check is not None:
        faults += source.check()
    found: dict[str, Any] = {"path": source.name, "tokens": source.tokens, "faults": faults}
    if faults:
        return found  # wrong borders would only cause further faults
    limit = vocab_size or source.vocab_size
    faults += _check_ids(source, limit, found, report)
    return found


def _check_ids(source: Source, limit: int | None, found: dict[str, Any], report: Callable[[str], None]) -> list[str]:
    progress = ProgressMeter(f"verifying {source.name}", source.tokens, "tokens", report)
    faults: list[str] = []
    hashes: list[np.ndarray] = []
    threshold, documents, high, outside = np.uint64(2**64 - 1), 0, 0, 0
    for start, ids, ends in portions(source):
        high = max(high, int(ids.max()))
        wrong = np.flatnonzero((ids < 0) | (ids >= limit) if limit is not None else ids < 0)
        if len(wrong) and not outside:
            token = start + int(wrong[0])
            place = f"{place_of(source, token)} (token {token})"
            faults.append(f"{place}: id {int(ids[wrong[0]])} is not in a vocabulary of {limit} ids")
        outside += len(wrong)
        documents += len(ends)
        hashed = _document_hashes(ids, ends)
        hashes.append(hashed[hashed <= threshold])
        while sum(len(part) for part in hashes) > _HASHES_KEPT:
            threshold >>= np.uint64(1)
            hashes = [part[part <= threshold] for part in hashes]
        progress.advance(len(ids))
    kept = np.sort(np.concatenate(hashes))
    copies = int(np.count_nonzero(kept[1:] == kept[:-1]))
    found |= {"documents": documents, "max_id": high, "ids_outside": outside}
    stated = source.described.documents if isinstance(source, TokenFiles) else None
    found["empty_documents"] = 0 if stated is None else stated - documents
    found["duplicates"] = {"documents_compared": len(kept), "copies": copies}
    return faults


def _document_hashes(ids: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns the (documents,) uint64 hash of each document."""
    starts = np.concatenate([[0], ends[:-1]]).tolist()
    content = np.ascontiguousarray(ids)
    pieces = (content[start:end] for start, end in zip(starts, ends.tolist(), strict=True))
    return np.fromiter((xxhash.xxh3_64_intdigest(piece.data) for piece in pieces), dtype=np.uint64, count=len(ends))


def verification_text(found: dict[str, Any]) -> str:
    """The same for a terminal."""
    compared = found["duplicates"]["documents_compared"]
    lines = [f"{Path(found['path'])}: {found['tokens']:,} tokens in {found['documents']:,} documents are intact"]
    lines.append(f"  largest id {found['max_id']}")
    if empty := found["empty_documents"]:
        lines.append(f"  {empty:,} documents have no tokens: training skips them, `data convert` needs --skip-empty")
    lines.append(f"  {found['duplicates']['copies']:,} of {compared:,} compared documents are copies of earlier ones")
    return "\n".join(lines)
