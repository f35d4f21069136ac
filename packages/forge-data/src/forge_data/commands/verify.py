"""What `data verify` does: reads every byte and says what is not as it claims to be."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from forge_core.protocols.data import Source
from forge_data.packing.portions import place_of, portions
from forge_data.preparation.progress import Progress
from forge_data.sources.tokens.token_files import Corpus
from forge_data.store.reader import StoreSource

_SAMPLED = 1 << 20
"""Of a larger corpus only documents whose hash is small enough are compared, so that about so many hashes are kept."""


def verify_tokens(source: Source, vocab_size: int | None, report: Callable[[str], None]) -> dict[str, Any]:
    """Faults with file and offset, and how many documents occur more than once; JSON as it stands.

    Checksums (a store), the index of documents, every id against the vocabulary. Duplicates are found by the XXH3 of
    whole documents among all of them, or among a sample by hash, which keeps all copies of a document or none.
    """
    faults = source.verify() if isinstance(source, StoreSource) else []
    if isinstance(source, Corpus) and source.check is not None:
        faults += source.check()
    found: dict[str, Any] = {"path": source.name, "tokens": source.tokens, "faults": faults}
    if faults:
        return found  # borders that are wrong would only make more of them
    limit = vocab_size or source.vocab_size
    faults += _ids(source, limit, found, report)
    return found


def _ids(source: Source, limit: int | None, found: dict[str, Any], report: Callable[[str], None]) -> list[str]:
    progress = Progress(f"verifying {source.name}", source.tokens, "tokens", report)
    faults: list[str] = []
    hashes: list[np.ndarray] = []
    threshold, documents, high, outside = np.uint64(2**64 - 1), 0, 0, 0
    for start, ids, ends in portions(source):
        high = max(high, int(ids.max()))
        wrong = np.flatnonzero((ids < 0) | (ids >= limit) if limit is not None else ids < 0)
        if len(wrong) and not outside:
            token = start + int(wrong[0])
            faults.append(f"{place_of(source, token)} (token {token}): id {int(ids[wrong[0]])} is not in a vocabulary of {limit}")
        outside += len(wrong)
        documents += len(ends)
        hashed = _hashes(ids, ends)
        hashes.append(hashed[hashed <= threshold])
        while sum(len(part) for part in hashes) > _SAMPLED:
            threshold >>= np.uint64(1)
            hashes = [part[part <= threshold] for part in hashes]
        progress.advance(len(ids))
    kept = np.sort(np.concatenate(hashes))
    copies = int(np.count_nonzero(kept[1:] == kept[:-1]))
    found |= {"documents": documents, "max_id": high, "ids_outside": outside}
    stated = source.described.documents if isinstance(source, Corpus) else None
    found["empty_documents"] = 0 if stated is None else stated - documents
    found["duplicates"] = {"documents_compared": len(kept), "copies": copies}
    return faults


def _hashes(ids: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """(documents,) uint64 hash of each document."""
    starts = np.concatenate([[0], ends[:-1]]).tolist()
    content = np.ascontiguousarray(ids)
    pieces = (content[start:end] for start, end in zip(starts, ends.tolist(), strict=True))
    return np.fromiter((xxhash.xxh3_64_intdigest(piece.data) for piece in pieces), dtype=np.uint64, count=len(ends))


def verification_text(found: dict[str, Any]) -> str:
    """The same for a terminal."""
    compared = found["duplicates"]["documents_compared"]
    lines = [f"{Path(found['path'])}: {found['tokens']:,} tokens in {found['documents']:,} documents are as they should be"]
    lines.append(f"  largest id {found['max_id']}")
    if empty := found["empty_documents"]:
        lines.append(f"  {empty:,} documents have no token: training passes over them, `data convert` needs --skip-empty")
    lines.append(f"  {found['duplicates']['copies']:,} of {compared:,} documents that were compared occur earlier too")
    return "\n".join(lines)
