"""Token stores, global sample order and loaders whose position is a few integers.

from pathlib import Path

from forge_data import Data, open_stream
from forge_data.components import RandomTokens

data = Data(sequence_length=16, sources=[RandomTokens(vocab_size=100, tokens=4096, document=23)])
stream = open_stream(data, workspace=Path("workspace"), seed=3, global_batch=8, micro_batch=4)
for batches, cursor in stream.from_cursor(stream.start()):
    ...  # one optimizer step: 2 batches of 4 rows; `from_cursor(cursor)` continues after this step
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_data.loading.evaluation import evaluation as evaluation
    from forge_data.loading.interop import StatefulLoader as StatefulLoader
    from forge_data.loading.interop import for_transformers as for_transformers
    from forge_data.loading.stream import open_stream as open_stream
    from forge_data.order.cursor import merge_cursors as merge_cursors
    from forge_data.order.permutation import permute as permute
    from forge_data.section import Data as Data
    from forge_data.section import Phase as Phase
    from forge_data.sources.store import StoreSource as StoreSource
    from forge_data.sources.store_writer import StoreWriter as StoreWriter

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Data": "section",
        "Phase": "section",
        "StatefulLoader": "loading.interop",
        "StoreSource": "sources.store",
        "StoreWriter": "sources.store_writer",
        "evaluation": "loading.evaluation",
        "for_transformers": "loading.interop",
        "merge_cursors": "order.cursor",
        "open_stream": "loading.stream",
        "permute": "order.permutation",
    },
)
