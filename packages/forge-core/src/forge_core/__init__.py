"""Registry, typed configuration, layout arithmetic and the protocols that Forge's packages share. Imports no torch.

A component is a frozen dataclass whose fields are the keys of a recipe:

    from dataclasses import dataclass
    from forge_core import Component, Layout

    @dataclass(frozen=True, kw_only=True)
    class Constant(Component):
        factor: float = 1.0

        def build(self, steps):
            return lambda step: self.factor

    assert Constant(factor=0.5).build(100)(7) == 0.5
    layout = Layout.parse("dp4tp2")
    assert layout.world == 8 and layout.coordinates(5)["tp"] == 1

`forge_core.protocols` has the interfaces between packages, `forge_core.config` the configuration engine.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_core.batch import IGNORE, Batch
    from forge_core.component import DATA, FREE, IDENTITY, LAYOUT, Component, Slot
    from forge_core.errors import CheckpointError, ConfigError, DataError, Fault, ForgeError, LayoutError, PlanError
    from forge_core.features import Feature, Neutral
    from forge_core.layout import Layout
    from forge_core.redaction import redacted
    from forge_core.registry import Registry
    from forge_core.specs import Init, ModuleSpec, Specs, TensorSpec
    from forge_core.trust import trust_file

__all__ = [
    "DATA",
    "FREE",
    "IDENTITY",
    "IGNORE",
    "LAYOUT",
    "Batch",
    "CheckpointError",
    "Component",
    "ConfigError",
    "DataError",
    "Fault",
    "Feature",
    "ForgeError",
    "Init",
    "Layout",
    "LayoutError",
    "ModuleSpec",
    "Neutral",
    "PlanError",
    "Registry",
    "Slot",
    "Specs",
    "TensorSpec",
    "redacted",
    "trust_file",
]
__getattr__, __dir__ = lazy_exports(__name__)
