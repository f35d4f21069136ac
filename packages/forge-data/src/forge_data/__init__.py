"""Token stores, global sample order and loaders whose position is a few integers.

    from pathlib import Path
    from forge_data import Data, RandomTokens, open_stream

    data = Data(sequence_length=16, sources=[RandomTokens(vocab_size=100, tokens=4096, document=23)])
    stream = open_stream(data, workspace=Path("workspace"), seed=3, global_batch=8, micro_batch=4)
    batches, cursor = next(stream.from_cursor(stream.start()))
    assert [batch.tokens.shape for batch in batches] == [(4, 16), (4, 16)]  # one optimizer step
    next(stream.from_cursor(cursor))  # continues after this step

`StatefulLoader` yields micro-batches to a loop of your own. `forge_data.sources` reads and writes token files,
`forge_data.tokenizers` has the tokenizers.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_data.components import (
        Arrow,
        Bpe,
        Bytes,
        Conversations,
        Datatrove,
        HuggingFace,
        JsonLines,
        Labeled,
        Llmc,
        Megatron,
        Parquet,
        RandomTokens,
        SentencePiece,
        Stdlib,
        TextFiles,
        Tiktoken,
        Tokens,
        TokenStore,
    )
    from forge_data.loading.evaluation import evaluation
    from forge_data.loading.interop import StatefulLoader, for_transformers
    from forge_data.loading.stream import TrainingStream, open_stream
    from forge_data.order.cursor import merge_cursors
    from forge_data.order.permutation import permute
    from forge_data.preparation.tokenization import prepared
    from forge_data.section import Data, Phase
    from forge_data.sources.store import StoreSource
    from forge_data.sources.store_writer import StoreWriter

__all__ = [
    "Arrow",
    "Bpe",
    "Bytes",
    "Conversations",
    "Data",
    "Datatrove",
    "HuggingFace",
    "JsonLines",
    "Labeled",
    "Llmc",
    "Megatron",
    "Parquet",
    "Phase",
    "RandomTokens",
    "SentencePiece",
    "StatefulLoader",
    "Stdlib",
    "StoreSource",
    "StoreWriter",
    "TextFiles",
    "Tiktoken",
    "TokenStore",
    "Tokens",
    "TrainingStream",
    "evaluation",
    "for_transformers",
    "merge_cursors",
    "open_stream",
    "permute",
    "prepared",
]
__getattr__, __dir__ = lazy_exports(__name__)
