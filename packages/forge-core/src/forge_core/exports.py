"""Fronts: packages whose public names are imported at their first use (PEP 562).

A front states each name where type checkers import it, and in `__all__`. So `from forge_parallel import Step` works and type
checkers see the name, but `import forge_parallel` imports no torch:

    if TYPE_CHECKING:
        from forge_parallel.step.step import Step, StepResult

    __all__ = ["Step", "StepResult"]
    __getattr__, __dir__ = lazy_exports(__name__)
"""

import ast
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a front, which do the imports below its `if TYPE_CHECKING:` at first use."""

    @cache
    def origins() -> Mapping[str, tuple[str, str]]:
        return type_checking_imports(_source(package))

    def get(name: str) -> Any:
        if name not in sys.modules[package].__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, original = origins()[name]
        value = getattr(import_module(module), original)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(sys.modules[package].__all__)


def type_checking_imports(source: str) -> dict[str, tuple[str, str]]:
    """Returns {name: (module, its name there)} of the imports below `if TYPE_CHECKING:`."""
    guarded = [node for node in ast.parse(source).body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [line for node in guarded for line in node.body if isinstance(line, ast.ImportFrom)]
    return {alias.asname or alias.name: (str(line.module), alias.name) for line in imports for alias in line.names}


def _source(package: str) -> str:
    spec = sys.modules[package].__spec__
    source = getattr(spec and spec.loader, "get_source", lambda _: None)(package)
    if source is None:
        raise ImportError(f"{package} is installed without its source, which says where its names are defined; install the wheel")
    return source
