"""What the mixture reads of a source that has none of its keys."""

from dataclasses import dataclass

from forge_core.component import Component
from forge_core.protocols.data import SourceComponent
from forge_core.registry import Registry
from forge_data.components import RandomTokens
from forge_data.order.phases import base_weights, label_of, labels_of, max_epochs_of, weight_of
from forge_data.section import Data


@dataclass(frozen=True, kw_only=True)
class Bare(Component):
    """A plugin's source that does not derive from `SourceComponent`."""


def test_a_source_without_the_keys_has_the_defaults_of_those_with_them() -> None:
    default = SourceComponent()
    assert (weight_of(Bare()), max_epochs_of(Bare())) == (default.weight, default.max_epochs)
    assert label_of(Bare()) == "bare", "as a source without a label, it is named after its component"


def test_keys_that_are_set_are_read() -> None:
    given = RandomTokens(vocab_size=9, weight=0.25, max_epochs=2.0, label="web")
    assert (weight_of(given), max_epochs_of(given), label_of(given)) == (0.25, 2.0, "web")
    data = Data(sources=[given, Bare(), Bare()])
    assert base_weights(data) == (0.25, 1.0, 1.0)
    assert labels_of(data) == ["web", "bare", "bare-3"]


def test_the_label_of_a_source_of_forge_is_the_name_that_selects_it() -> None:
    """Labels decide the order of rows: another one would change what every run without labels reads."""
    registry = Registry()
    classes = {name: registry.load("forge.sources", name) for name in registry.names("forge.sources")}
    own = {name: kind for name, kind in classes.items() if kind.__module__ == "forge_data.components"}
    assert len(own) == 12 and {name: label_of(object.__new__(kind)) for name, kind in own.items()} == {name: name for name in own}
