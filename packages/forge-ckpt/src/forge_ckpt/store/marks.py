"""Marks: files of a store whose one line names a checkpoint, such as `latest` and `best`. For people and tools."""

from forge_ckpt.format.names import LATEST, OWNER, SAVING, committed, is_safe
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Store

_LONGEST = 300


def point(store: Store, mark: str, checkpoint: str) -> None:
    """Lets `mark` name `checkpoint`, by one rename: a reader sees the old name or the new one."""
    pending = f"{SAVING}{mark}"
    store.remove(pending)
    store.write(pending, [checkpoint.encode() + b"\n"])
    store.rename(pending, mark)


def pointed(store: Store, mark: str) -> str | None:
    """The name that `mark` has, whether or not there is such a checkpoint; None without the mark.

    Raises:
        CheckpointError: it does not hold a name.
    """
    try:
        name = store.read(mark).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    if not is_safe(name):
        raise CheckpointError(f"{mark} does not name a checkpoint")
    return name


def marked(store: Store) -> dict[str, str]:
    """The names that the marks of a store have, `latest` included, by mark. Other files of the store are left out."""
    found = {}
    for name in store.list():
        if is_safe(name) and name != OWNER and not name.startswith((SAVING, ".")) and not committed([name]):
            try:
                target = pointed(store, name) if store.size(name) <= _LONGEST else None
            except (CheckpointError, OSError):  # a directory, a file of something else
                continue
            if target is not None and committed([target]):
                found[name] = target
    return found


def check_mark(mark: str) -> None:
    """Raises a CheckpointError for a name that means something else in a store."""
    if not is_safe(mark) or mark in (LATEST, OWNER) or mark.startswith((SAVING, ".")) or committed([mark]):
        raise CheckpointError(f"{mark!r} cannot be the name of a mark; take a word such as 'best'")
