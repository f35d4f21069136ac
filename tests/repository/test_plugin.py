"""A stranger's optimizer, as a wheel beside Forge's own and as one plain file: found by name, typed, right.

The formulas come from the paper and are computed here with numpy, in fp64.
"""

import importlib
import json
import runpy
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from forge_core.protocols.model import NamedTensor
from forge_core.registry import Entry, Registry, installed
from forge_core.trust import trust_file

ROOT = Path(__file__).parents[2]
WHEEL = ROOT / "examples" / "forge-lionize"
FILE = ROOT / "examples" / "plain_file" / "mine.py"
LR, BETAS, DECAY = 0.01, (0.8, 0.95), 0.5


@dataclass
class Weights:
    """A model as an optimizer sees it: one decayed matrix, one vector."""

    tensors: dict[str, torch.Tensor]

    def trainable(self) -> list[NamedTensor]:
        return [NamedTensor(name, tensor, "matrix" if tensor.ndim > 1 else "vector") for name, tensor in self.tensors.items()]


def component(kind: str):
    if kind == "file":
        trust_file(FILE)
        return Registry().load("forge.optimizers", f"{FILE}:Lion")
    sys.path.insert(0, str(WHEEL / "src"))
    try:
        importlib.import_module("forge_lionize.lion")
        entry = Entry("forge.optimizers", "lionize", "forge-lionize", "0.1.0", "forge_lionize.component:LionConfig")
        return Registry([entry]).load("forge.optimizers", "lionize")
    finally:
        sys.path.remove(str(WHEEL / "src"))


def test_its_own_test_passes_and_would_fail(monkeypatch):
    """`conforms` finds the installed wheel by its name; here the registry has it from the sources."""
    component("wheel")
    lion = Entry("forge.optimizers", "lionize", "forge-lionize", "0.1.0", "forge_lionize.component:LionConfig")
    monkeypatch.setattr("forge_core.conformance.Registry", lambda: Registry([*installed(), lion]))
    own = runpy.run_path(str(WHEEL / "tests" / "test_lionize.py"))["test_lionize_conforms"]
    own()
    monkeypatch.setattr("forge_lionize.lion.Lion.zero_grad", lambda self: None)
    with pytest.raises(AssertionError, match=r"forge\.optimizers forge-lionize:lionize: check_zero_grad: zero_grad leaves"):
        own()


def start() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    return {"w": draw.normal(size=(6, 3)), "b": draw.normal(size=5)}


def gradient(step: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(100 + step)
    return {"w": draw.normal(size=(6, 3)), "b": draw.normal(size=5)}


def lion(steps: int, factor) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Weights and momentum after `steps` by the formulas of Chen et al., 2023, algorithm 2."""
    weights = start()
    momentum = {name: np.zeros_like(value) for name, value in weights.items()}
    for step in range(steps):
        for name, g in gradient(step).items():
            decay = DECAY if name == "w" else 0.0
            direction = np.sign(BETAS[0] * momentum[name] + (1 - BETAS[0]) * g)
            weights[name] -= LR * factor(step) * (direction + decay * weights[name])
            momentum[name] = BETAS[1] * momentum[name] + (1 - BETAS[1]) * g
    return weights, momentum


def warm(step: int) -> float:
    return (step + 1) / 5


@pytest.mark.parametrize("kind", ["wheel", "file"])
def test_the_update_is_the_papers(kind):
    model = Weights({name: torch.nn.Parameter(torch.from_numpy(value)) for name, value in start().items()})
    optimizer = component(kind)(lr=LR, betas=BETAS, weight_decay=DECAY).build(model)
    assert {key: set(tensors) for key, tensors in optimizer.state().items()} == {"momentum": {"w", "b"}}
    for step in range(5):
        optimizer.set_factor(warm(step))
        for name, value in gradient(step).items():
            model.tensors[name].grad = torch.from_numpy(value)
        optimizer.step(torch.tensor(0.0) if step % 2 else None)
        optimizer.zero_grad()
        assert all(tensor.grad is None for tensor in model.tensors.values())
    weights, momentum = lion(5, warm)
    for name, tensor in model.tensors.items():
        np.testing.assert_allclose(tensor.detach().numpy(), weights[name], rtol=0, atol=1e-14)
        np.testing.assert_allclose(optimizer.state()["momentum"][name].numpy(), momentum[name], rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", ["wheel", "file"])
def test_a_skipped_step_keeps_every_bit(kind):
    values = torch.tensor([[1.5, -0.0, 0.0, float("inf"), 1e-45]])
    model = Weights({"w": torch.nn.Parameter(values.clone())})
    optimizer = component(kind)(lr=LR).build(model)
    optimizer.state()["momentum"]["w"].copy_(-values)
    model.tensors["w"].grad = torch.tensor([[float("nan"), 1.0, -1.0, float("inf"), 2.0]])
    optimizer.step(torch.tensor(1.0))
    assert torch.equal(model.tensors["w"].detach().view(torch.int32), values.view(torch.int32))
    assert torch.equal(optimizer.state()["momentum"]["w"].view(torch.int32), (-values).view(torch.int32))
    model.tensors["w"].grad = torch.ones(1, 5)
    optimizer.step(torch.tensor(0.0))
    assert not torch.equal(model.tensors["w"].detach(), values)


def sharded(kind: str) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))

    def spread(value: np.ndarray) -> torch.Tensor:
        return distribute_tensor(torch.from_numpy(value), mesh, [Shard(0)])

    model = Weights({name: torch.nn.Parameter(spread(value)) for name, value in start().items()})
    optimizer = component(kind)(lr=LR, betas=BETAS, weight_decay=DECAY).build(model)
    for step in range(3):
        for name, value in gradient(step).items():
            model.tensors[name].grad = spread(value)
        optimizer.step(torch.tensor(0.0))
    return {name: tensor.detach().full_tensor() for name, tensor in model.tensors.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["wheel", "file"])
def test_two_processes_make_the_same_update(world, kind):
    expected, _ = lion(3, lambda step: 1.0)
    for weights in world.run(sharded, 2, kind):
        for name, tensor in weights.items():
            np.testing.assert_allclose(tensor.numpy(), expected[name], rtol=0, atol=1e-14)


@pytest.fixture(scope="module")
def forge(tmp_path_factory):
    """Calls `forge-train` of an environment with the built wheels of Forge and of the plugin.

    Third-party distributions are borrowed from the environment that runs the tests; `nox -s isolation` repeats this
    with an environment of its own.
    """
    place = tmp_path_factory.mktemp("plugin")
    wheels, environment = place / "wheels", place / "environment"
    projects = [path.parent for folder in ("packages", "apps") for path in ROOT.glob(f"{folder}/*/pyproject.toml")]
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = ["wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", str(wheels), *map(str, [*projects, WHEEL])]
    subprocess.run([*pip, *build], check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    install = ["--python", str(python), "install", "--no-index", "--no-deps", *map(str, wheels.glob("*.whl"))]
    subprocess.run([*pip, *install], check=True, capture_output=True)
    site = next((environment / "lib").glob("python*/site-packages"))
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    asked = "import forge_train, forge_lionize; print(forge_train.__file__, forge_lionize.__file__)"
    answer = subprocess.run([python, "-I", "-c", asked], check=True, capture_output=True, text=True, cwd=place)
    assert all(Path(file).is_relative_to(environment) for file in answer.stdout.split())

    def call(*arguments: str, cwd: Path, code: int = 0) -> str:
        command = [str(environment / "bin" / "forge-train"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=120)
        assert done.returncode == code, f"{arguments} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    return call


def test_the_wheel_is_listed_and_its_command_answers(forge, tmp_path):
    listed = forge("plugins", "list", "--json", cwd=tmp_path)
    assert '"lionize"' in listed
    assert '"forge-lionize"' in listed
    assert json.loads(forge("lionize", "--lr", "0.003", "--factor", "3", "--json", cwd=tmp_path))["lr"] == pytest.approx(1e-3)
    assert "lionize" in forge("--help", cwd=tmp_path)


def test_its_fields_are_typed_like_ours(forge, tmp_path):
    text = forge("check", "debug", "--optimizer.name=lionize", "--optimizer.lr=fast", "--optimizer.beta=1", cwd=tmp_path, code=2)
    assert "optimizer.lr" in text
    assert "optimizer.beta" in text
    assert "betas" in text


RECIPE = """
base = "debug"

[job]
name = "lion"

[train]
max_steps = 4

[optimizer]
name = {name}
lr = 0.001
betas = [0.9, 0.99]
weight_decay = 0.3

[schedule]
name = "constant"

[checkpoint]
every = 1
keep = 0

[[hooks]]
name = "save"
"""


@pytest.mark.parametrize("name", ["lionize", "./mine.py:Lion"])
def test_a_recipe_trains_with_it_by_the_papers_formulas(forge, tmp_path, name):
    (tmp_path / "recipe.toml").write_text(RECIPE.format(name=json.dumps(name)))
    (tmp_path / "mine.py").write_text(FILE.read_text())
    forge("run", "recipe.toml", cwd=tmp_path)
    saved = [checkpoint(tmp_path / "runs" / "lion", step) for step in (1, 2, 3, 4)]
    moved = 0
    for old, new in pairwise(saved):
        for key in (key for key in old if key.startswith("model/") and f"optimizer/momentum/{key[6:]}" in old):
            moved += follows(key[6:], old, new, lr=0.001, betas=(0.9, 0.99), decay=0.3)
    assert moved > 100_000, "most weights move in every step"


def follows(name: str, old, new, lr: float, betas: tuple[float, float], decay: float) -> int:
    """Checks one tensor between two checkpoints: momenta give the gradient, and it the update. Returns how many moved."""
    w, m = old[f"model/{name}"], old[f"optimizer/momentum/{name}"]
    w_new, m_new = new[f"model/{name}"], new[f"optimizer/momentum/{name}"]
    g = (m_new - betas[1] * m) / (1 - betas[1])
    c = betas[0] * m + (1 - betas[0]) * g
    noise = 1e-5 * (np.abs(m) + np.abs(m_new))  # fp32 momenta give the gradient to about 1e-7 / (1 - beta2)
    clear = (np.abs(c) > noise) | ((m == 0) & (m_new == 0))
    assert clear.mean() > 0.99
    decayed = lr * decay if w.ndim == 2 and "embed" not in name else 0.0
    expected = w * (1 - decayed) - lr * np.sign(c)
    np.testing.assert_allclose(w_new[clear], expected[clear], rtol=2.5e-7, atol=1e-9)
    return int((np.sign(c) != 0).sum())


def checkpoint(run: Path, step: int) -> dict[str, np.ndarray]:
    """Every floating-point tensor of one checkpoint, whole, in fp64."""
    from forge_ckpt.checkpoint.locate import resolve
    from forge_ckpt.checkpoint.read import load
    from forge_ckpt.checkpoint.verification import open_manifest
    from forge_ckpt.store.local import LocalStore
    from forge_ckpt.world import SingleProcessWorld
    from forge_core.protocols.checkpoint import Piece

    store = LocalStore(run / "checkpoints")
    manifest, _ = open_manifest(store, resolve(store, step, SingleProcessWorld()))
    pieces = [
        Piece(info.name, info.shape, (0,) * len(info.shape), torch.empty(info.shape), True)
        for info in manifest.tensors
        if info.dtype in ("float32", "F32")
    ]
    names = {piece.name for piece in pieces}
    load(store, step, pieces, SingleProcessWorld(), select=names.__contains__)
    return {piece.name: piece.local.double().numpy() for piece in pieces}
