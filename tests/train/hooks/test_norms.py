"""Norms by group and by tensor, against the same gradients and weights of one process, and in layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.protocols.run import Hook
from forge_parallel.model.parallel_model import full
from forge_train.hooks.weights import Norms
from forge_train.run.loop import fit
from forge_train.trackers import METRICS, read_metrics
from harness.pool import World
from train.runs import TINY, prepared
from train.whole_runs.test_moe_run import SPARSE

EXACT = ["--precision.compute=fp64", "--precision.state=fp64", "--train.max_steps=3", "--checkpoint.every=0"]


class Tensors(Hook):
    """Whole gradients, and weights before and after the last step."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}
        self.before: dict[str, torch.Tensor] = {}
        self.after: dict[str, torch.Tensor] = {}

    def before_update(self, run: Any, result: Any) -> None:
        self.gradients = {name: full(tensor.grad).clone() for name, tensor, _ in run.model.trainable()}
        self.before = {name: full(tensor).detach().clone() for name, tensor, _ in run.model.trainable()}

    def after_step(self, run: Any, result: Any) -> None:
        self.after = {name: full(tensor).detach().clone() for name, tensor, _ in run.model.trainable()}


def normed(recipe: str, directory: str, overrides: list[str], by: Any) -> dict[str, float]:
    run, _ = prepared(Path(recipe), [f"--job.dir={directory}", *EXACT, *overrides])
    tensors = Tensors()
    run.hooks[:] = [Norms(every=100, by=by), *([tensors] if run.topology.size == 1 else [])]
    fit(run)
    if run.topology.size > 1:
        return {}
    expected: dict[str, float] = {}
    for what, each in (
        ("gradient", tensors.gradients),
        ("update", {name: tensors.after[name] - tensors.before[name] for name in tensors.before}),
        ("parameter", tensors.after),
    ):
        squares: dict[str, float] = {}
        for name, tensor in each.items():
            group = name if by == "tensor" else run.model.specs.tensors[name].group
            squares[group] = squares.get(group, 0.0) + float(tensor.double().square().sum())
        expected |= {f"norm/{what}/{group}": square**0.5 for group, square in squares.items()}
    return expected


def logged(directory: Path) -> dict[str, float]:
    (entry,) = [entry for entry in read_metrics(directory / METRICS) if any(name.startswith("norm/") for name in entry)]
    assert entry["step"] == 3, "the last step is always measured"
    return {name: value for name, value in entry.items() if name.startswith("norm/")}


@pytest.mark.parametrize("by", ["group", "tensor"])
def test_they_are_those_of_all_gradients_updates_and_weights(tmp_path: Path, by: Any) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    frozen = ["--parameters.groups=[{match='blocks.0.*', frozen=true}]"]
    expected = normed(str(tmp_path / "tiny.toml"), str(tmp_path / "run"), frozen, by)
    assert logged(tmp_path / "run") == pytest.approx(expected, rel=1e-12)
    assert not any("blocks.0." in name for name in expected)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        (TINY, ["--parallel.dp_shard=2"]),
        (TINY, ["--parallel.pp=2"]),
        (TINY, ["--parallel.tp=2"]),
        (SPARSE, ["--parallel.dp_shard=2", "--parallel.ep=2"]),
    ],
    ids=["dp2", "pp2", "tp2", "dp2ep2"],
)
def test_they_are_the_same_in_every_layout(world: World, tmp_path: Path, text: str, layout: list[str]) -> None:
    (tmp_path / "tiny.toml").write_text(text)
    expected = normed(str(tmp_path / "tiny.toml"), str(tmp_path / "one"), [], "tensor")
    world.run(normed, 2, str(tmp_path / "tiny.toml"), str(tmp_path / "two"), layout, "tensor")
    assert logged(tmp_path / "two") == pytest.approx(expected, rel=1e-9)
    assert logged(tmp_path / "one") == pytest.approx(expected, rel=1e-12)


def test_all_gradients_together_are_the_norm_of_the_step(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    run, _ = prepared(tmp_path / "tiny.toml", [f"--job.dir={tmp_path / 'run'}", *EXACT, "--train.grad_clip=1e-3"])
    norms: list[float] = []

    class Seen(Hook):
        def after_step(self, run: Any, result: Any) -> None:
            norms.append(result.numbers()["grad_norm"])

    run.hooks[:] = [Norms(every=100), Seen()]
    fit(run)
    squares = [value**2 for name, value in logged(tmp_path / "run").items() if name.startswith("norm/gradient/")]
    assert sum(squares) ** 0.5 == pytest.approx(norms[-1], rel=1e-9), "before clipping"
