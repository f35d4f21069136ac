"""The documentation pages: their plugins work, their recipes load, their commands run as written."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forge_core.protocols.model import NamedTensor
from forge_core.registry import Registry

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def files_of(page: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of every block that names its file in the first line."""
    for language in ("python", "toml"):
        for text in blocks(page, language):
            if named := re.match(r"# ([\w.-]+\.(?:py|toml))\n", text):
                yield named[1], text


@pytest.fixture
def plugins(tmp_path, monkeypatch) -> Path:
    """A directory with every file of the plugin page and of the README."""
    for page in (ROOT / "README.md", ROOT / "docs/writing-a-plugin.md"):
        for name, text in files_of(page):
            (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    for path in re.findall(r"`((?:packages|apps|docs|examples|tests)/[\w./-]+)`", page.read_text()):
        assert (ROOT / path).exists(), path


def test_the_readme_and_the_page_show_the_same_schedule() -> None:
    shown = [dict(files_of(ROOT / page))["rsqrt.py"] for page in ("README.md", "docs/writing-a-plugin.md")]
    assert shown[0] == shown[1]


def test_the_schedule_of_the_page(plugins) -> None:
    factor = Registry().load("forge.schedules", "./rsqrt.py:InverseSquareRoot")(warmup=4).build(100)
    assert [factor(s) for s in (0, 1, 3, 15, 99)] == pytest.approx([0.25, 0.5, 1.0, 0.5, 0.2])


def test_the_optimizer_of_the_page(plugins) -> None:
    weight, unused = torch.tensor([1.0, -0.0, 2.0], requires_grad=True), torch.zeros(2, requires_grad=True)
    model = SimpleNamespace(trainable=lambda: [NamedTensor("w", weight, "vector"), NamedTensor("u", unused, "vector")])
    optimizer = Registry().load("forge.optimizers", "./sign.py:Sign")(lr=0.5).build(model)
    weight.grad = torch.tensor([3.0, 0.0, -1e-9])
    optimizer.set_factor(0.5)
    optimizer.step(torch.tensor(0.0))
    assert weight.tolist() == [0.75, 0.0, 2.25]
    weight.grad = torch.tensor([float("nan"), float("inf"), 1.0])
    before = weight.detach().clone()
    optimizer.step(torch.tensor(1.0))
    assert torch.equal(weight.view(torch.int32), before.view(torch.int32))
    optimizer.zero_grad()
    assert weight.grad is None and unused.tolist() == [0.0, 0.0]


def test_the_hook_of_the_page(plugins) -> None:
    logged: list[dict[str, float]] = []
    model = SimpleNamespace(trainable=lambda: [NamedTensor("w", torch.tensor([1.0, -7.0]), "vector")])
    run = SimpleNamespace(model=model, log=logged.append, state=SimpleNamespace(step=5))
    hook = Registry().load("forge.hooks", "./largest.py:Largest")(every=5).build(run)
    hook.after_step(run, None)
    run.state.step = 6
    hook.after_step(run, None)
    assert logged == [{"largest_weight": 7.0}]


def test_recipes_of_the_pages_have_no_fault(plugins) -> None:
    from forge_train.recipe import load

    for name in ("rsqrt.toml", "largest.toml", "small.toml"):
        load(plugins / name, [], 1)


def test_plugin_files_import_nothing_heavy(plugins) -> None:
    code = "import sys; sys.path.insert(0, '.'); import rsqrt, sign, largest; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=plugins, timeout=60, check=False).returncode == 0


@pytest.mark.slow
def test_getting_started_runs_as_written(tmp_path) -> None:
    """One shell for all blocks in their order, so that what a reader would set stays set."""
    commands = "\n".join(blocks(ROOT / "docs/getting-started.md", "bash"))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
    }
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", commands],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    left = {path.name for path in (tmp_path / "runs/debug").iterdir()}
    promised = re.findall(r"^\| `([\w.]+)/?` \|", (ROOT / "docs/getting-started.md").read_text(), flags=re.MULTILINE)
    assert set(promised) <= left, (promised, left)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"debug", "small", "small-2"}
