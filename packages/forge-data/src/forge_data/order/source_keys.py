"""The keys of a source that the mixture reads. A component that does not derive from `SourceComponent` has its defaults."""

from forge_core.component import Component
from forge_core.protocols.data import SourceComponent


def weight_of(source: Component) -> float:
    """Share of the mixture relative to the other sources, before the first phase."""
    return float(getattr(source, "weight", SourceComponent.weight))


def max_epochs_of(source: Component) -> float | None:
    """How often the source is read at most; None = without a limit."""
    return getattr(source, "max_epochs", SourceComponent.max_epochs)


def too_long_of(source: Component) -> str | None:
    """What becomes of a document that is longer than a row: error, skip, truncate; None: it goes on in further rows."""
    return getattr(source, "too_long", SourceComponent.too_long)


def label_of(source: Component) -> str:
    """Its `label`, else the name of its component."""
    return getattr(source, "label", SourceComponent.label) or type(source).__name__.lower()
