"""Writes token files as other programs do, from the description of their formats and not with our code."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def megatron(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "uint16") -> Path:
    """`documents` are lists of sequences, as Megatron's builder gets them: add_item for each, end_document after each."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    first_sequences = [0]
    for document in documents:
        first_sequences.append(first_sequences[-1] + len(document))
    pointers, address = [], 0
    for length in lengths:
        pointers.append(address)
        address += length * np.dtype(dtype).itemsize
    with prefix.with_name(prefix.name + ".idx").open("wb") as index:
        index.write(b"MMIDIDX\x00\x00")
        index.write(struct.pack("<Q", 1))
        index.write(struct.pack("<B", MEGATRON_CODES[dtype]))
        index.write(struct.pack("<Q", len(lengths)))
        index.write(struct.pack("<Q", len(first_sequences)))
        index.write(np.array(lengths, dtype=np.int32).tobytes())
        index.write(np.array(pointers, dtype=np.int64).tobytes())
        index.write(np.array(first_sequences, dtype=np.int64).tobytes())
    with prefix.with_name(prefix.name + ".bin").open("wb") as ids:
        for sequence in sequences:
            ids.write(np.array(sequence, dtype=dtype).tobytes())
    return prefix


def llmc(path: Path, ids: Sequence[int], magic: int = 20240520, version: int = 1) -> Path:
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, len(ids)
    path.write_bytes(header.tobytes() + np.array(ids, dtype=np.uint16 if version == 1 else np.uint32).tobytes())
    return path


def datatrove(path: Path, documents: Sequence[Sequence[int]], width: str = "H") -> Path:
    ids = [token for document in documents for token in document]
    ends = np.cumsum([len(document) for document in documents]).tolist()
    path.write_bytes(struct.pack(f"<{len(ids)}{width}", *ids))
    path.with_name(path.name + ".index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    path.with_name(path.name + ".metadata").write_text(f"gpt2|2\n{len(ids)}\n{len(ids)} T")
    return path
