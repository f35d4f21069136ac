"""The data position: a few integers, and what they are a position in."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from json import dumps
from typing import Any

from forge_core.errors import DataError
from forge_core.protocols.data import Cursor

VERSION = 1


def fingerprint_of(identity: Mapping[str, Any]) -> str:
    """Of everything that fixes which sample has which number."""
    return sha256(dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def cursor_at(sample: int, labels: Sequence[str], draws: Sequence[int], identity: Mapping[str, Any]) -> Cursor:
    """The position before sample number `sample`.

    Args:
        sample: samples consumed by all ranks together.
        labels, draws: how many of them came from each source: where a changed mixture would go on.
        identity: see `fingerprint_of`.
    """
    return {
        "version": VERSION,
        "sample": sample,
        "draws": dict(zip(labels, draws, strict=True)),
        "identity": dict(identity),
        "fingerprint": fingerprint_of(identity),
    }


def sample_at(cursor: Cursor, identity: Mapping[str, Any]) -> int:
    """The number of the next sample.

    Raises:
        DataError: the cursor is of other data; names each difference.
    """
    if cursor.get("version") != VERSION or not isinstance(cursor.get("sample"), int):
        raise DataError(f"this is no data cursor of version {VERSION}: {dict(cursor)!r}")
    if cursor.get("fingerprint") != fingerprint_of(identity):
        found = cursor.get("identity")
        differences = _differences(found if isinstance(found, Mapping) else {}, identity)
        raise DataError(
            "the checkpoint's data position is of other data, so going on would repeat or skip samples: "
            + "; ".join(differences or ["fingerprints differ"])
            + ". Restore these settings, or start a new run"
        )
    return int(cursor["sample"])


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    lines: list[str] = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            was, is_now = ("nothing" if value is None else value for value in (old, new))
            lines.append(f"{prefix}{key} was {was}, is {is_now}")
    return lines
