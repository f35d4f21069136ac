"""Token stores, global sample order and loaders whose position is a few integers."""

from typing import TYPE_CHECKING

from forge_core.lazy import lazily

if TYPE_CHECKING:
    from forge_data.cursor import merged as merged
    from forge_data.loader import evaluation as evaluation
    from forge_data.loader import open_stream as open_stream
    from forge_data.model_inputs import for_transformers as for_transformers
    from forge_data.order import permute as permute
    from forge_data.sources.store import StoreSource as StoreSource
    from forge_data.sources.writer import StoreWriter as StoreWriter
    from forge_data.stateful import StatefulLoader as StatefulLoader

__getattr__, __dir__ = lazily(
    __name__,
    {
        "StatefulLoader": "stateful",
        "StoreSource": "sources.store",
        "StoreWriter": "sources.writer",
        "evaluation": "loader",
        "for_transformers": "model_inputs",
        "merged": "cursor",
        "open_stream": "loader",
        "permute": "order",
    },
)
