"""The data position: a few integers, and what they are a position in."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from json import dumps
from typing import Any

from forge_core.errors import DataError
from forge_core.protocols.data import Cursor

VERSION = 1
EQUAL = 2
"""Version of the order of a stream's documents, `streams` in an identity; the first version is not recorded."""
EXACT = 2
"""Version of the arithmetic of a mixture, `mixture` in an identity; the first version is not recorded."""
ROUNDED_PERIOD = 65_536
"""Version 1 rounded the weights of a mixture to this period."""


def fingerprint_of(identity: Mapping[str, Any]) -> str:
    """Of everything that fixes which sample has which number."""
    return sha256(dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def cursor_at(
    sample: int,
    labels: Sequence[str],
    draws: Sequence[int],
    identity: Mapping[str, Any],
    streams: Mapping[str, Any] | None = None,
    fingerprint: str | None = None,
) -> Cursor:
    """The position before sample number `sample`.

    Args:
        sample: samples consumed by all ranks together.
        labels, draws: how many of them came from each source: where a changed mixture would go on.
        identity: see `fingerprint_of`.
        streams: position of each streamed source.
        fingerprint: of `identity`, where it is known already.
    """
    found: dict[str, Any] = {
        "version": VERSION,
        "sample": sample,
        "draws": dict(zip(labels, draws, strict=True)),
        "identity": dict(identity),
        "fingerprint": fingerprint_of(identity) if fingerprint is None else fingerprint,
    }
    return found if streams is None else found | {"streams": streams}


def sample_of(cursor: Cursor) -> int:
    """The number of the next sample, of any data.

    Raises:
        DataError: it is not a cursor.
    """
    if cursor.get("version") != VERSION or not isinstance(cursor.get("sample"), int) or cursor["sample"] < 0:
        raise DataError(f"expected a data cursor of version {VERSION}, got {dict(cursor)!r}")
    return int(cursor["sample"])


def refuse_other(cursor: Cursor, identity: Mapping[str, Any], allowed: Sequence[str] = (), advice: str = "") -> list[str]:
    """Refuses a cursor of other data.

    Args:
        cursor: a position.
        identity: of the data that it is to be a position in.
        allowed: settings that may differ, with all that is below them.
        advice: a sentence for messages about sources with other content.

    Returns:
        A line for each difference that was allowed.

    Raises:
        DataError: names each other difference.
    """
    if cursor.get("fingerprint") == fingerprint_of(identity):
        return []
    found = cursor["identity"] if isinstance(cursor.get("identity"), Mapping) else {}
    differences = differences_of(found, identity)
    lines = {name: f"{name} was {was}, is {now}" for name, (was, now) in differences.items()}
    if differences.get("mixture") == ("nothing", EXACT):
        lines["mixture"] = _ROUNDED
    if differences.get("streams") == ("nothing", EQUAL) and "readers" in found:
        lines = {name: line for name, line in lines.items() if name not in ("readers", "shuffle_buffer")}  # meant something else
        lines["streams"] = _DEALT
    refused = [line for name, line in lines.items() if not any(f"{name}.".startswith(f"{other}.") for other in allowed)]
    if refused or not lines:
        raise DataError(
            "the checkpoint's data position is of other data, so going on would repeat or skip samples: "
            + "; ".join(refused or ["fingerprints differ"])
            + ". Restore these settings, start a new run, or name in data.changed what may differ"
            + (f". {advice}" if advice and any(name.endswith(".fingerprint") for name in differences) else "")
        )
    return list(lines.values())


_ROUNDED = (
    f"mixture was version 1, which rounds these weights to a period of {ROUNDED_PERIOD:,} samples (4,096 in a ramp), is version "
    f"{EXACT}, which is exact, so sample numbers mean other samples; a run that an older Forge began goes on with that Forge"
)
_DEALT = (
    f"streams was version 1, which read documents of small shards more often than others, is version {EQUAL}, which reads all "
    "equally often, in another order; a run that an older Forge began goes on with that Forge, or, where data.changed names "
    "streams, reads its streams from their first documents again"
)


def merged(cursors: Sequence[Cursor]) -> Cursor:
    """One cursor of those that all ranks had after the same step: what a checkpoint keeps.

    They differ only where a foreign loader is read: there each rank knows its own position.

    Raises:
        DataError: they are not of one step of one run.
    """
    first, *others = cursors
    common = {key: value for key, value in first.items() if key != _OWN}
    for other in others:
        if {key: value for key, value in other.items() if key != _OWN} != common:
            raise DataError("data cursors of several ranks belong to different steps or data; gather them after the same step")
    found = dict(common)
    if _OWN in first:
        found[_OWN] = _united([cursor.get(_OWN, {}) for cursor in cursors])
    return found


_OWN = "foreign"
"""The key under which ranks say different things."""


def _united(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mappings put together, two levels deep: source, then reader or rank."""
    names = sorted({name for part in parts for name in part})
    return {name: {key: value for part in parts for key, value in part.get(name, {}).items()} for name in names}


def differences_of(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings in which two identities differ, with both values; "nothing" where one lacks the setting."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found |= {f"{key}.{name}": values for name, values in differences_of(old, new).items()}
        elif old != new:
            found[key] = ("nothing" if old is None else old, "nothing" if new is None else new)
    return found
