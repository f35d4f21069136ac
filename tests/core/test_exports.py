"""Fronts: names are imported at their first use."""

import subprocess
import sys
from pathlib import Path

import pytest

from forge_core.exports import type_checking_imports

FRONT = '''"""A front."""
from typing import TYPE_CHECKING
from forge_core.exports import lazy_exports
if TYPE_CHECKING:
    from shop.shelf import Apple, pick as pick_fruit
__all__ = ["Apple", "pick_fruit"]
__getattr__, __dir__ = lazy_exports(__name__)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/__init__.py").write_text(FRONT)
    (tmp_path / "shop/shelf.py").write_text("class Apple: ...\ndef pick(): return Apple()\nhidden = 1\n")
    return tmp_path


def run(folder: Path, code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


def test_a_name_is_imported_at_its_first_use(folder: Path) -> None:
    code = "import sys, shop; assert 'shop.shelf' not in sys.modules; shop.Apple; assert 'shop.shelf' in sys.modules"
    assert run(folder, code).returncode == 0


def test_a_name_may_differ_from_its_name_in_the_module(folder: Path) -> None:
    code = "from shop import pick_fruit, shelf; assert pick_fruit is shelf.pick"
    assert run(folder, code).returncode == 0


def test_a_name_is_resolved_once(folder: Path) -> None:
    assert run(folder, "import shop; shop.Apple; assert 'Apple' in vars(shop)").returncode == 0


def test_only_the_names_of_the_front_are_there(folder: Path) -> None:
    done = run(folder, "import shop; assert dir(shop) == ['Apple', 'pick_fruit']; shop.hidden")
    assert "AttributeError: module 'shop' has no attribute 'hidden'" in done.stderr


def test_a_submodule_is_imported_as_ever(folder: Path) -> None:
    assert run(folder, "from shop import shelf; assert shelf.hidden == 1").returncode == 0


def test_a_star_gives_the_names(folder: Path) -> None:
    assert run(folder, "from shop import *; assert pick_fruit and Apple").returncode == 0


def test_without_its_source_a_front_says_so(folder: Path) -> None:
    import compileall

    compileall.compile_dir(folder / "shop", legacy=True, quiet=2)
    for file in (folder / "shop").glob("*.py"):
        file.unlink()
    assert "shop is installed without its source" in run(folder, "import shop; shop.Apple").stderr


def test_other_imports_are_no_names_of_the_front() -> None:
    source = "import os\nif TYPE_CHECKING:\n    from a.b import C, d as e\nif True:\n    from f import g"
    assert type_checking_imports(source) == {"C": ("a.b", "C"), "e": ("a.b", "d")}
