"""The data position (cursor): a few integers, and the identity of the data that they refer to."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from json import dumps
from typing import Any

from forge_core.errors import DataError
from forge_core.protocols.data import Cursor

VERSION = 1
EQUAL = 2
"""Version of the document order of streams, key `streams` of an identity; version 1 is not recorded."""
EXACT = 2
"""Version of the arithmetic of mixtures, key `mixture` of an identity; version 1 is not recorded."""
ROUNDED_PERIOD = 65_536
"""Period to which version 1 rounded the weights of a mixture."""


def fingerprint_of(identity: Mapping[str, Any]) -> str:
    """Returns the fingerprint of an identity: all settings that determine the order of samples."""
    return sha256(dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def cursor_at(
    sample: int,
    labels: Sequence[str],
    draws: Sequence[int],
    identity: Mapping[str, Any],
    streams: Mapping[str, Any] | None = None,
    fingerprint: str | None = None,
) -> Cursor:
    """Returns the cursor before sample number `sample`.

    Args:
        sample: number of samples that all ranks have consumed.
        labels, draws: number of these samples from each source, where a changed mixture would continue.
        identity: see `fingerprint_of`.
        streams: position of each streamed source.
        fingerprint: fingerprint of `identity`, if already computed.
    """
    cursor: dict[str, Any] = {
        "version": VERSION,
        "sample": sample,
        "draws": dict(zip(labels, draws, strict=True)),
        "identity": dict(identity),
        "fingerprint": fingerprint_of(identity) if fingerprint is None else fingerprint,
    }
    return cursor if streams is None else cursor | {"streams": streams}


def sample_of(cursor: Cursor) -> int:
    """Returns the number of the next sample of a cursor of any data.

    Raises:
        DataError: `cursor` is not a data cursor of this version.
    """
    if cursor.get("version") != VERSION or not isinstance(cursor.get("sample"), int) or cursor["sample"] < 0:
        raise DataError(f"expected a data cursor of version {VERSION}, got {dict(cursor)!r}")
    return int(cursor["sample"])


def refuse_other(cursor: Cursor, identity: Mapping[str, Any], allowed: Sequence[str] = (), advice: str = "") -> list[str]:
    """Refuses a cursor of other data.

    Args:
        cursor: the cursor to check.
        identity: identity of the current data.
        allowed: settings that may differ, including all settings below them.
        advice: a sentence that is added if the fingerprint of a source differs.

    Returns:
        One line for each allowed difference.

    Raises:
        DataError: a setting differs that is not allowed; the message lists these differences.
    """
    if cursor.get("fingerprint") == fingerprint_of(identity):
        return []
    recorded = cursor["identity"] if isinstance(cursor.get("identity"), Mapping) else {}
    differences = differences_of(recorded, identity)
    lines = {name: f"{name} was {was}, is {now}" for name, (was, now) in differences.items()}
    if differences.get("mixture") == ("nothing", EXACT):
        lines["mixture"] = _ROUNDED
    if differences.get("streams") == ("nothing", EQUAL) and "readers" in recorded:
        # These keys had another meaning in version 1.
        lines = {name: line for name, line in lines.items() if name not in ("readers", "shuffle_buffer")}
        lines["streams"] = _DEALT
    refused = [line for name, line in lines.items() if not any(f"{name}.".startswith(f"{other}.") for other in allowed)]
    if refused or not lines:
        raise DataError(
            "the data position in the checkpoint belongs to other data, so a resume would repeat or skip samples: "
            + "; ".join(refused or ["fingerprints differ"])
            + ". Restore these settings, start a new run, or list in data.changed the settings that may differ"
            + (f". {advice}" if advice and any(name.endswith(".fingerprint") for name in differences) else "")
        )
    return list(lines.values())


_ROUNDED = (
    f"mixture was version 1, which rounds these weights to a period of {ROUNDED_PERIOD:,} samples (4,096 in a ramp), is version "
    f"{EXACT}, which is exact and orders samples differently; continue a run of an older Forge with that version of Forge"
)
_DEALT = (
    f"streams was version 1, which read documents of small shards more often than others, is version {EQUAL}, which reads all "
    "documents equally often in a different order; continue a run of an older Forge with that version of Forge, or list "
    "streams in data.changed to read the streams again from their first documents"
)


def merge_cursors(cursors: Sequence[Cursor]) -> Cursor:
    """Merges the cursors of all ranks after the same step into the cursor for a checkpoint.

    Cursors differ only with a foreign loader, where each cursor has the position of its own rank.

    Raises:
        DataError: the cursors belong to different steps or runs.
    """
    first, *others = cursors
    common = {key: value for key, value in first.items() if key != _OWN}
    for other in others:
        if {key: value for key, value in other.items() if key != _OWN} != common:
            raise DataError("data cursors of several ranks belong to different steps or data; gather them after the same step")
    cursor = dict(common)
    if _OWN in first:
        cursor[_OWN] = _united([part.get(_OWN, {}) for part in cursors])
    return cursor


_OWN = "foreign"
"""The key whose value differs between ranks."""


def _united(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the union of mappings that are two levels deep: source, then reader or rank."""
    names = sorted({name for part in parts for name in part})
    return {name: {key: value for part in parts for key, value in part.get(name, {}).items()} for name in names}


def differences_of(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the settings in which two identities differ, with both values; "nothing" if a setting is missing."""
    differences: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            differences |= {f"{key}.{name}": values for name, values in differences_of(old, new).items()}
        elif old != new:
            differences[key] = ("nothing" if old is None else old, "nothing" if new is None else new)
    return differences
