"""Frozen tensors are stored once: a checkpoint gets the file of the one before, under a further name. Needs no torch.

The name of such a file is made of the checksums of its pieces, and its bytes are read and compared with them before it gets a
further name. So nothing has to be remembered or believed, and damage does not reach the next checkpoint. Both names are of one
file on the disk, which goes when the last of them is removed; each checkpoint stays whole by itself. Another layout of the ranks,
or a stage that trains the tensors, gives other names, and they are written.
"""

from forge_ckpt.format.elements import CHUNK_BYTES
from forge_ckpt.format.names import committed, frozen_file
from forge_ckpt.format.rank_file import RankFile, checksum
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import LinkingStore, Store


def find_frozen(store: Store, file: RankFile | None, rank: int) -> str | None:
    """Reads the bytes of frozen pieces for their checksums. Returns the path of a file that has them already, or None."""
    if file is None:
        return None
    file.read()
    if not isinstance(store, LinkingStore):
        return None
    for entry in committed(store.list())[:1]:
        path = f"{entry.name}/{_frozen_name(file, rank)}"
        try:
            return path if _holds(store, path, file) else None
        except (OSError, CheckpointError):  # another layout wrote it, the tensors have moved, or the disk cannot read it
            return None
    return None


def _holds(store: Store, path: str, file: RankFile) -> bool:
    """Whether a stored file has the bytes that its name says."""
    if store.size(path) != sum(file.lengths):
        return False
    buffer, start = memoryview(bytearray(min(CHUNK_BYTES, max(file.lengths)))), 0
    for length, wanted in zip(file.lengths, file.checksums, strict=True):
        if checksum(store, path, start, length, buffer) != wanted:
            return False
        start += length
    return True


def put_frozen(store: Store, file: RankFile, before: str | None, folder: str, rank: int) -> None:
    """Frozen pieces into the folder of a checkpoint: the file `before` under a further name, else written."""
    path = f"{folder}/{_frozen_name(file, rank)}"
    if before is not None and isinstance(store, LinkingStore) and store.link(before, path):
        return
    store.write(path, file)


def _frozen_name(file: RankFile, rank: int) -> str:
    return frozen_file(rank, b"".join(file.checksums))
