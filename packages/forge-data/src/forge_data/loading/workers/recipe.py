"""What a loader worker opens: the spec of the run, with prepared stores in the place of their texts."""

import io
import pickle
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext
from forge_data.loading.open_sources import OpenedSources
from forge_data.loading.sample_order import SampleOrder
from forge_data.loading.spec import LoadSpec
from forge_data.order.cursor import fingerprint_of
from forge_data.order.source_keys import weight_of
from forge_data.store.reader import StoreSource, open_store


@dataclass(frozen=True)
class PreparedSource:
    """Takes the place of a source component whose store is on the disk, so that a worker opens the store alone."""

    path: Path
    label: str
    weight: float
    max_epochs: float | None
    too_long: str | None

    def build(self, context: SourceContext) -> StoreSource:
        """The store."""
        return open_store(self.path, context.tokenizer)


@dataclass(frozen=True)
class WorkerRecipe:
    """Small and picklable.

    Attributes:
        spec: of the run.
        fingerprint: of the order of samples; that of the worker must be equal.
    """

    spec: LoadSpec
    fingerprint: str

    @classmethod
    def of(cls, order: SampleOrder, opened: OpenedSources) -> "WorkerRecipe":
        """The recipe of an order whose sources are open.

        Raises:
            DataError: a source cannot be described to another process.
        """
        data = order.spec.data
        components: list[Any] = list(data.sources)
        keys = zip(opened.places, opened.sources.items(), opened.max_epochs, opened.too_long, strict=True)
        for place, (label, source), most, too_long in keys:
            if isinstance(source, StoreSource):
                components[place] = PreparedSource(source.path, label, weight_of(components[place]), most, too_long)
        only_stores = all(isinstance(source, StoreSource) for source in opened.sources.values())
        tokenizer = None if only_stores else data.tokenizer
        for component in (*components, tokenizer):
            if type(component).__module__ == "__main__":
                raise DataError(
                    f"{type(component).__name__} is defined in the script that runs, and a loader worker cannot import it; "
                    "move it to a module, or set data.loader_workers = 0"
                )
        own = replace(data, sources=components, tokenizer=tokenizer, evaluation={}, loader_workers=0)
        return cls(replace(order.spec, data=own), fingerprint_of(order.identity_at(None)))

    def dump(self) -> bytes:
        """As the first message to a worker: where modules lie, the files of components that are not modules with
        the content that ran here, and the recipe."""
        components = (*self.spec.data.sources, self.spec.data.tokenizer)
        modules = {type(component).__module__ for component in components if component is not None}
        loaders: Any = {name: sys.modules[name].__loader__ for name in modules if name.startswith("forge_file_")}
        files = {name: (Path(loader.path), loader.content) for name, loader in loaders.items()}
        content = io.BytesIO()
        pickle.dump((sys.path, files), content)
        try:
            pickle.dump(self, content)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise DataError(f"the data cannot be described to a loader worker ({error}); set data.loader_workers = 0") from error
        return content.getvalue()
