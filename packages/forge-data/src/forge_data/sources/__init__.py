"""Readers of token files and of records, one module per format; some modules also write their format.

    from pathlib import Path
    import numpy as np
    from forge_data.sources import StoreWriter, open_store

    with StoreWriter(Path("store"), dtype="uint16") as writer:
        writer.add(np.array([5, 6, 7, 0, 8, 9, 0]), np.array([4, 7]))  # two documents, and where they end
        writer.commit()
    source = open_store("store")
    assert source.tokens == 7
    assert source.read(0, 4).tolist() == [5, 6, 7, 0]

`open_any` opens token files of any format by their content.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_data.sources.arrays import ArrayWriter, open_tokens
    from forge_data.sources.formats import open_any, open_records
    from forge_data.sources.megatron import MegatronWriter, open_megatron
    from forge_data.sources.random import RandomSource
    from forge_data.sources.records import Document, RecordReader, Records
    from forge_data.sources.store import MaskEntry, StoreManifest, StoreSource, open_store, read_manifest
    from forge_data.sources.store_writer import StoreWriter
    from forge_data.sources.token_files import TokenFiles, open_datatrove, open_llmc

__all__ = [
    "ArrayWriter",
    "Document",
    "MaskEntry",
    "MegatronWriter",
    "RandomSource",
    "RecordReader",
    "Records",
    "StoreManifest",
    "StoreSource",
    "StoreWriter",
    "TokenFiles",
    "open_any",
    "open_datatrove",
    "open_llmc",
    "open_megatron",
    "open_records",
    "open_store",
    "open_tokens",
    "read_manifest",
]
__getattr__, __dir__ = lazy_exports(__name__)
