"""What a package offers by its own name can be had, and costs nothing until it is."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

PACKAGES = (
    "forge_core",
    "forge_parallel",
    "forge_models",
    "forge_data",
    "forge_ckpt",
    "forge_vlm",
    "forge_interp",
    "forge_interp.methods",
    "forge_interp.neuro",
    "forge_lab",
    "forge_testing",
)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_resolves(package: str) -> None:
    module = import_module(package)
    assert dir(module)
    files = {path.stem for path in Path(str(module.__file__)).parent.iterdir()}
    for name in dir(module):
        assert getattr(module, name) is not None
        assert name not in files, f"{package}.{name} would be the module, once somebody imported it"
    with pytest.raises(AttributeError, match="nonsense"):
        module.nonsense  # noqa: B018


def test_importing_the_packages_imports_no_torch() -> None:
    code = f"import sys, {', '.join(PACKAGES)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
