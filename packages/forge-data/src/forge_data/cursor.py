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


def cursor_at(
    sample: int,
    labels: Sequence[str],
    draws: Sequence[int],
    identity: Mapping[str, Any],
    readers: Mapping[str, Any] | None = None,
) -> Cursor:
    """The position before sample number `sample`.

    Args:
        sample: samples consumed by all ranks together.
        labels, draws: how many of them came from each source: where a changed mixture would go on.
        identity: see `fingerprint_of`.
        readers: positions of the virtual readers of each streamed source, as far as this rank knows them.
    """
    found: dict[str, Any] = {
        "version": VERSION,
        "sample": sample,
        "draws": dict(zip(labels, draws, strict=True)),
        "identity": dict(identity),
        "fingerprint": fingerprint_of(identity),
    }
    return found if readers is None else found | {"readers": readers}


def sample_of(cursor: Cursor) -> int:
    """The number of the next sample, of whatever data.

    Raises:
        DataError: it is no cursor.
    """
    if cursor.get("version") != VERSION or not isinstance(cursor.get("sample"), int) or cursor["sample"] < 0:
        raise DataError(f"this is no data cursor of version {VERSION}: {dict(cursor)!r}")
    return int(cursor["sample"])


def refuse_other(cursor: Cursor, identity: Mapping[str, Any]) -> None:
    """Refuses a cursor of other data.

    Raises:
        DataError: names each difference.
    """
    if cursor.get("fingerprint") != fingerprint_of(identity):
        found = cursor.get("identity")
        differences = _differences(found if isinstance(found, Mapping) else {}, identity)
        raise DataError(
            "the checkpoint's data position is of other data, so going on would repeat or skip samples: "
            + "; ".join(differences or ["fingerprints differ"])
            + ". Restore these settings, or start a new run"
        )


def merged(cursors: Sequence[Cursor]) -> Cursor:
    """One cursor of those that all ranks had after the same step: what a checkpoint keeps.

    They differ only where streams are read, or a foreign loader: there each rank knows its own position.

    Raises:
        DataError: they are not of one step of one run.
    """
    first, *others = cursors
    common = {key: value for key, value in first.items() if key not in _OWN}
    for other in others:
        if {key: value for key, value in other.items() if key not in _OWN} != common:
            raise DataError("data cursors of several ranks belong to different steps or data; gather them after the same step")
    found = dict(common)
    for key in _OWN:
        if key in first:
            found[key] = _united([cursor.get(key, {}) for cursor in cursors])
    return found


_OWN = ("readers", "foreign")
"""Keys under which ranks say different things."""


def _united(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mappings put together, two levels deep: source, then reader or rank."""
    names = sorted({name for part in parts for name in part})
    return {name: {key: value for part in parts for key, value in part.get(name, {}).items()} for name in names}


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
