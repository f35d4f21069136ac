"""Recognizes files that are not raw token ids by how they begin: any content is a list of integers to who reads it as one."""

import struct
import zlib
from collections.abc import Callable

from forge_data.storage.file import File
from forge_data.storage.files import read_bytes
from forge_data.store.manifest import FORMAT, MANIFEST

_UNPACK = "unpack it, for ids are mapped as they lie"
_CONTAINERS = (
    (b"\x28\xb5\x2f\xfd", f"is compressed with zstandard; {_UNPACK}"),
    (b"BZh91AY&SY", f"is compressed with bzip2; {_UNPACK}"),
    (b"\xfd7zXZ\x00", f"is compressed with xz; {_UNPACK}"),
    (b"PAR1", "is a Parquet file; use source 'parquet' with `ids`"),
    (b"ARROW1\x00\x00", "is an Arrow file; use source 'arrow' with `ids`"),
    (b"GGUF", "is a GGUF file of weights, not of token ids"),
    (b"\x89HDF\r\n\x1a\n", "is an HDF5 file; write its ids with np.save, and use source 'tokens'"),
    (b"MMIDIDX\x00\x00", "is an index of Megatron; use source 'megatron'"),
)
_LLMC = {20240520, 20240801, 20240522}
"""Magic numbers of llm.c: GPT-2 tokens, Llama 3 tokens, multiple-choice examples."""
_TEXT = frozenset(b"\t\n\r") | frozenset(range(32, 127))
_ENOUGH = 64
"""Bytes that all have to be printable before a file is taken for text."""


def foreign_content(file: File, head: bytes, width: int, sibling: Callable[[str], File | None]) -> str | None:
    """The format of a file that is not a list of raw integers, and the source for it; None where no other format is recognized.

    Args:
        file: in question.
        head: its first bytes, a few hundred.
        width: bytes of an integer; of one byte each, text is a list of integers like any other.
        sibling: finds other files by their path.
    """
    for magic, what in _CONTAINERS:
        if head.startswith(magic):
            return what
    if is_llmc(head):
        return "begins with the header of llm.c; use source 'llmc', which knows its dtype"
    if head.startswith(b"PK\x03\x04"):
        numpy = b".npy" in head[:128]
        return (
            "is a .npz archive of numpy; write its array with np.save, and use source 'tokens'"
            if numpy
            else "is a zip archive; unpack it"
        )
    if _is_gzip(head):
        return f"is compressed with gzip; {_UNPACK}"
    if _is_arrow_stream(head):
        return "is an Arrow stream; use source 'arrow' with `ids`"
    if _is_safetensors(head, file.size):
        return "is a safetensors file of weights, not of token ids"
    if width > 1 and len(head) >= _ENOUGH and _TEXT.issuperset(head):
        return "is text, not token ids; use source 'text' or 'jsonl'"
    return _by_neighbors(file, sibling)


def is_llmc(head: bytes) -> bool:
    """Whether a file begins with the header of llm.c, with any count: magic, version, count, zeros."""
    if len(head) < 12:
        return False
    magic, version = struct.unpack("<ii", head[:8])
    return magic in _LLMC and 0 < version < 16 and not any(head[12:1024])


def _is_gzip(head: bytes) -> bool:
    if not head.startswith(b"\x1f\x8b\x08"):
        return False
    try:
        zlib.decompressobj(31).decompress(head)
    except zlib.error:
        return False
    return True


def _is_arrow_stream(head: bytes) -> bool:
    """The mark of a message, the length of its metadata, and a flatbuffer in it."""
    if len(head) < 12 or head[:4] != b"\xff\xff\xff\xff":
        return False
    length, root = struct.unpack("<ii", head[4:12])
    return 0 < length < 1 << 24 and length % 8 == 0 and 8 <= root < min(length, 64)


def _is_safetensors(head: bytes, size: int) -> bool:
    """The length of a JSON object, and the object."""
    return head[8:10] == b'{"' and 2 < int.from_bytes(head[:8], "little") < size


def _by_neighbors(file: File, sibling: Callable[[str], File | None]) -> str | None:
    if file.where.endswith(".bin") and sibling(file.where.removesuffix(".bin") + ".idx"):
        return "has a Megatron index in its directory; use source 'megatron', which knows its dtype and documents"
    if sibling(f"{file.where}.index"):
        return "has an index of documents, as datatrove writes it; use source 'datatrove'"
    folder = file.where.rpartition("/")[0]
    manifest = sibling(f"{folder}/{MANIFEST}" if folder else MANIFEST)
    if manifest is not None and FORMAT.encode() in read_bytes(manifest, 0, 256):
        return f"is a shard of the token store {folder or '.'}; use source 'store', which knows its dtype and documents"
    return None
