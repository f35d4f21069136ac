"""Token stores, global sample order and loaders whose position is a few integers."""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_data.loading.evaluation import evaluation as evaluation
    from forge_data.loading.interop import StatefulLoader as StatefulLoader
    from forge_data.loading.interop import for_transformers as for_transformers
    from forge_data.loading.stream import open_stream as open_stream
    from forge_data.order.cursor import merged as merged
    from forge_data.order.permutation import permute as permute
    from forge_data.sources.store import StoreSource as StoreSource
    from forge_data.sources.store_writer import StoreWriter as StoreWriter

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "StatefulLoader": "loading.interop",
        "StoreSource": "sources.store",
        "StoreWriter": "sources.store_writer",
        "evaluation": "loading.evaluation",
        "for_transformers": "loading.interop",
        "merged": "order.cursor",
        "open_stream": "loading.stream",
        "permute": "order.permutation",
    },
)
