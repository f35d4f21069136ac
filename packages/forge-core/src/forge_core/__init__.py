"""Registry, typed configuration, layout arithmetic and the protocols that Forge's packages share. Imports no torch."""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_core.batch import IGNORE as IGNORE
    from forge_core.batch import Batch as Batch
    from forge_core.component import Component as Component
    from forge_core.component import Slot as Slot
    from forge_core.errors import ConfigError as ConfigError
    from forge_core.errors import Fault as Fault
    from forge_core.errors import ForgeError as ForgeError
    from forge_core.layout import Layout as Layout
    from forge_core.registry import Registry as Registry
    from forge_core.specs import Init as Init
    from forge_core.specs import ModuleSpec as ModuleSpec
    from forge_core.specs import Specs as Specs
    from forge_core.specs import TensorSpec as TensorSpec

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Batch": "batch",
        "Component": "component",
        "ConfigError": "errors",
        "Fault": "errors",
        "ForgeError": "errors",
        "IGNORE": "batch",
        "Init": "specs",
        "Layout": "layout",
        "ModuleSpec": "specs",
        "Registry": "registry",
        "Slot": "component",
        "Specs": "specs",
        "TensorSpec": "specs",
    },
)
