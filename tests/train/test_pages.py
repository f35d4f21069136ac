"""The documentation pages: their plugins work, their recipes load, their commands run as written."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_core.plugins import find_everywhere
from forge_core.protocols.model import NamedTensor
from forge_core.registry import GROUPS, Registry
from forge_core.trust import trust_file
from forge_models.hf.families import FAMILIES
from forge_parallel.model.plan import Order, Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.placement.topology import Topology
from forge_parallel.timing import Hardware
from forge_testing import conforms
from forge_train.launch.cluster import SECTIONS, load_cluster
from forge_train.recipe.load import load_recipe
from harness.fronts import DISTRIBUTIONS, FRONTS, example_of
from harness.pages import NAMED, ROOT, blocks, run_shell
from vlm.encoders.test_published import clip, stored

READMES = [ROOT / "README.md", *ROOT.glob("packages/*/README.md"), *ROOT.glob("apps/*/README.md")]
PAGES = sorted([*READMES, *(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)])


def files_of(page: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of every block that names its file in the first line."""
    for language in ("python", "toml"):
        for text in blocks(page, language):
            if named := NAMED.match(text):
                yield named[1], text


@pytest.fixture
def plugins(tmp_path, monkeypatch) -> Path:
    """A directory with every file of the plugin page and of the README."""
    for page in (ROOT / "README.md", ROOT / "docs/writing-a-plugin.md"):
        for name, text in files_of(page):
            (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def everything(tmp_path, monkeypatch) -> Path:
    """A directory with every file of every page; pages that name the same file agree on it."""
    for page in PAGES:
        for name, text in files_of(page):
            (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    for path in re.findall(r"`((?:packages|apps|docs|examples|tests)/[\w./-]+)`", page.read_text()):
        assert (ROOT / path).exists(), path


def mine(group: str, name: str) -> Any:
    """A component of a file that this test names itself."""
    trust_file(name.partition(":")[0])
    return Registry().load(group, name)


def test_the_readme_and_the_page_show_the_same_schedule() -> None:
    shown = [dict(files_of(ROOT / page))["rsqrt.py"] for page in ("README.md", "docs/writing-a-plugin.md")]
    assert shown[0] == shown[1]


def test_the_schedule_of_the_page(plugins) -> None:
    factor = mine("forge.schedules", "./rsqrt.py:InverseSquareRoot")(warmup=4).build(100)
    assert [factor(s) for s in (0, 1, 3, 15, 99)] == pytest.approx([0.25, 0.5, 1.0, 0.5, 0.2])


def test_the_optimizer_of_the_page(plugins) -> None:
    weight, unused = torch.tensor([1.0, -0.0, 2.0], requires_grad=True), torch.zeros(2, requires_grad=True)
    model = SimpleNamespace(trainable=lambda: [NamedTensor("w", weight, "vector"), NamedTensor("u", unused, "vector")])
    optimizer = mine("forge.optimizers", "./sign.py:Sign")(lr=0.5).build(model)
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


@pytest.mark.parametrize(
    ("part", "group"),
    [
        ("rsqrt.py:InverseSquareRoot", "forge.schedules"),
        ("sign.py:Sign", "forge.optimizers"),
        ("normalized.py:Normalized", "forge.optimizers"),
        ("largest.py:Largest", "forge.hooks"),
    ],
)
def test_trials_h_every_part_of_the_page_passes_the_line_that_the_page_gives(plugins: Path, part: str, group: str) -> None:
    conforms(f"./{part}", group)


def test_trials_h_the_page_has_every_group_with_its_arguments_and_every_order() -> None:
    page = (ROOT / "docs/writing-a-plugin.md").read_text()
    rows = dict(re.findall(r"^\| `(forge\.\w+)` \|[^|]*\| *([^|]*?) *\|", page, flags=re.MULTILINE))
    assert {name: tuple(re.findall(r"`(\w+)`", given)) for name, given in rows.items()} == {
        group.name: group.build for group in GROUPS.values() if group.build is not None
    }
    assert all(f"`{name}`" in page for name, group in GROUPS.items() if group.build is None)
    orders = dict(re.findall(r"^\| (\d) \|[^|]*\| `(\w+)` \|", page, flags=re.MULTILINE))
    registry = Registry()
    parts = {entry.name: registry.load_entry(entry) for entry in registry.of("forge.transforms") if entry.is_forge}
    assert {int(number): name for number, name in orders.items()} == {int(part.order): name for name, part in parts.items()}
    assert len(orders) == len(Order)
    for module, attribute in re.findall(r"`(forge_\w+(?:\.\w+)+)\.(\w+)", page):
        assert hasattr(import_module(module), attribute) or find_spec(f"{module}.{attribute}"), (module, attribute)


def test_trials_h_the_doctor_takes_the_name_of_a_distribution() -> None:
    found = find_everywhere(Registry(), "Forge_Ckpt")
    assert found and {entry.distribution for entry in found} == {"forge-ckpt"}
    assert {entry.group for entry in found} > {"forge.stores"}


def test_the_hook_of_the_page(plugins) -> None:
    logged: list[dict[str, float]] = []
    model = SimpleNamespace(trainable=lambda: [NamedTensor("w", torch.tensor([1.0, -7.0]), "vector")])
    run = SimpleNamespace(model=model, log=logged.append, state=SimpleNamespace(step=5))
    hook = mine("forge.hooks", "./largest.py:Largest")(every=5).build()
    hook.after_step(run, None)
    run.state.step = 6
    hook.after_step(run, None)
    assert logged == [{"largest_weight": 7.0}]


def test_recipes_of_the_pages_have_no_fault(everything) -> None:
    """Whole recipes as they stand, fragments on top of `debug`, files for clusters, and descriptions of hardware."""
    recipes = [name for page in PAGES for name, text in files_of(page) if name.endswith(".toml") and "[project]" not in text]
    assert set(recipes) >= {"rsqrt.toml", "largest.toml", "small.toml", "reglu.toml", "mine.toml"}
    stored(everything / "clip", clip())  # the encoder that a page makes
    llama = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
    for name in ("base", "exported", "models/SmolLM3-3B"):  # folders that commands of pages make, or that users have
        (everything / name).mkdir(parents=True)
        (everything / name / "config.json").write_text(json.dumps(llama | {"intermediate_size": 128, "rms_norm_eps": 1e-5}))
    seeing = everything / "models/SmolVLM-256M-Instruct"
    seeing.mkdir(parents=True)
    (seeing / "config.json").write_text(json.dumps({"model_type": "smolvlm"}))
    for name in recipes:
        load_recipe(everything / name, [], 1)
    fragments = [text for page in PAGES for text in blocks(page, "toml") if not text.startswith("# ")]
    assert len(fragments) > 5
    (everything / "site.toml").touch()  # the base that a cluster file names
    clusters = 0
    for number, text in enumerate(fragments):
        path = everything / f"fragment-{number}.toml"
        if re.match(rf"(base = .*\n)?\[({'|'.join(SECTIONS)})\]", text):
            path.write_text(text)
            load_cluster(str(path), [])
            clusters += 1
        elif "memory_gib" in text:
            assert Hardware.read(text, path.name).name == "mine"
        else:
            path.write_text(f'base = "debug"\n\n{text}')
            load_recipe(path)
    assert clusters >= 3


def test_the_feed_forward_part_of_the_page(everything) -> None:
    job = load_recipe(everything / "reglu.toml").job
    layout = Layout()
    model = realize(Blueprint.of(job.model.build), Plan.of([], layout), Topology.of(layout, torch.device("cpu")), 7)
    mlp = next(module for name, module in model.part.named_modules() if name.endswith("blocks.1.mlp"))
    x = torch.randn(2, 3, 64)
    expected = torch.relu(x @ mlp.gate.weight.T) * (x @ mlp.up.weight.T) @ mlp.down.weight.T
    torch.testing.assert_close(mlp(x), expected)
    assert float(mlp.gate.weight.detach().std()) == pytest.approx(0.02, rel=0.05)


def test_the_page_names_every_family() -> None:
    text = (ROOT / "docs/concepts/models.md").read_text()
    families = re.findall(r"`([\w-]+)`", text[text.index("Folders of the families") : text.index("(as `config.json`")])
    assert set(families) == set(FAMILIES)


ONE_RUN = {ROOT / "docs/howto", ROOT / "docs/tutorials"}
"""Folders of pages whose Python reads what their commands wrote; `test_howto.py` runs both in their order."""
RUNNABLE = [
    page for page in PAGES if page.parent not in ONE_RUN and any(not NAMED.match(text) for text in blocks(page, "python"))
]


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run_in_their_order(page: Path, tmp_path, monkeypatch) -> None:
    """In one namespace, as a reader would type them; blocks that name a file are that file."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    torch.manual_seed(0)
    for number, text in enumerate(blocks(page, "python"), 1):
        if not NAMED.match(text):
            try:
                exec(compile(text, f"<{page.name}, Python block {number}>", "exec"), namespace)  # noqa: S102 (our own pages)
            except PlanError as refusal:
                if torch.version.cuda is None or "after this process has computed gradients" not in str(refusal):
                    raise
                pytest.skip("this build of torch refuses forks after the gradients of other tests, as the page says")


def test_the_pages_of_concepts_have_python_that_runs() -> None:
    assert {page.stem for page in RUNNABLE} >= {"models", "interpretability", "training", "data", "checkpoints", "parallelism"}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_examples_of_fronts_run(distribution: str, tmp_path, monkeypatch) -> None:
    """In one directory, the package before its folders, so that an example may open what another has written."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    for front in FRONTS:
        if front.partition(".")[0] == distribution.replace("-", "_"):
            exec(compile(example_of(front), f"<example of {front}>", "exec"), {"__name__": "example"})  # noqa: S102


def test_plugin_files_import_nothing_heavy(plugins) -> None:
    code = "import sys; sys.path.insert(0, '.'); import rsqrt, sign, largest; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=plugins, timeout=60, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["models", "interpretability", "data", "data-formats", "checkpoints", "parallelism", "scale", "sweeps", "campaigns"]
)
def test_commands_of_a_page_run_as_written(name: str, tmp_path) -> None:
    """After its Python, where that writes what a command reads."""
    page = ROOT / f"docs/concepts/{name}.md"
    if name == "interpretability":
        (tmp_path / "page.py").write_text("".join(blocks(page, "python")))
        run_shell("python page.py", tmp_path)
    run_shell("\n".join(blocks(page, "bash")), tmp_path)


@pytest.mark.slow
def test_getting_started_runs_as_written(tmp_path) -> None:
    run_shell("\n".join(blocks(ROOT / "docs/getting-started.md", "bash")), tmp_path)
    left = {path.name for path in (tmp_path / "runs/debug").iterdir()}
    promised = re.findall(r"^\| `([\w.]+)/?` \|", (ROOT / "docs/getting-started.md").read_text(), flags=re.MULTILINE)
    assert set(promised) <= left, (promised, left)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"debug", "small", "small-2"}
