"""What an element of a tensor is called in a manifest, and how many bytes it has. Needs no torch."""

CHUNK_BYTES = 4 << 20
"""Bytes that are copied, hashed and written or read at a time."""

ITEMSIZE: dict[str, int] = {
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float16", "bfloat16", "uint16", "int16"), 2),
    **dict.fromkeys(("float32", "uint32", "int32"), 4),
    **dict.fromkeys(("float64", "complex64", "uint64", "int64"), 8),
    "complex128": 16,
}
"""Every dtype that a checkpoint can hold, by its torch name, and its bytes."""
