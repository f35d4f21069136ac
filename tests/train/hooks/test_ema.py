"""The average of the weights: against its closed form over a recorded trajectory, in layouts, over resumes, where it is used."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_core.errors import ForgeError
from forge_core.protocols.model import NamedTensor
from forge_core.protocols.run import Hook
from forge_core.registry import Registry
from forge_parallel.model.parallel_model import full
from forge_train.hooks.weights import Ema, EmaConfig
from forge_train.inference.evaluation import recipe_for, scores
from forge_train.inference.stored import open_weights
from forge_train.plan import dry_run
from forge_train.recipe.load import load_recipe
from forge_train.run.loop import fit
from harness.pool import World
from train.runs import CPU, TINY, prepared

DECAY, START, EVERY, STEPS = 0.8, 2, 3, 8
HOOKS = f"""
[[hooks]]
name = "ema"
decay = {DECAY}
start = {START}
every = {EVERY}

[[hooks]]
name = "evaluate"
every = 100
weights = "ema"

[[hooks]]
name = "save"

[data.evaluation.held_out]
name = "random"
vocab_size = 61
tokens = 600
seed = 1
"""
WIDE = ["--precision.compute=fp64", "--precision.state=fp64", "--schedule.name=constant"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.replace('[[hooks]]\nname = "save"\n', HOOKS))
    return path


class Trajectory(Hook):
    """The weights after each step, whole."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    def start(self, run: Any) -> None:
        self.after_step(run, None)  # type: ignore[arg-type]

    def after_step(self, run: Any, result: Any) -> None:
        self.weights.append({name: full(tensor).clone() for name, tensor, _ in run.model.trainable()})


def trained(recipe: Path, overrides: list[str]) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor], dict[str, Any]]:
    """The trajectory, the average at the end, and what was measured."""
    run, _ = prepared(recipe, overrides)
    path = Trajectory()
    run.hooks[:] = [path, *run.hooks]
    fit(run)
    kept = next(hook.tensors(run.model)["ema"] for hook in run.hooks if isinstance(hook, Ema))
    return path.weights, {name: full(tensor).clone() for name, tensor in kept.items()}, dict(run.results)


def closed_form(path: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    """decay^n w_start + sum over the n updates of (1 - decay) decay^(n - i) w_i."""
    due = [step for step in range(START + 1, len(path)) if (step - START) % EVERY == 0]
    terms = [DECAY ** len(due) * path[START][name].double()]
    terms += [(1 - DECAY) * DECAY ** (len(due) - i) * path[step][name].double() for i, step in enumerate(due, 1)]
    return torch.stack(terms).sum(0)


@pytest.mark.parametrize("layout", ["1", "dp2", "tp2"])
def test_it_is_the_average_of_the_trajectory(world: World, recipe: Path, tmp_path: Path, layout: str) -> None:
    overrides = [f"--job.dir={tmp_path / 'run'}", *WIDE, *(["--parallel.tp=2"] if layout == "tp2" else [])]
    found = [trained(recipe, overrides)] if layout == "1" else world.run(trained, 2, recipe, overrides)
    for path, average, _ in found:
        assert len(path) == STEPS + 1
        for name, value in average.items():
            assert value.dtype == torch.float64
            torch.testing.assert_close(value, closed_form(path, name), rtol=1e-12, atol=1e-14)
            assert not torch.equal(value, path[-1][name])


def test_fault_17_a_resume_goes_on_with_it_exactly(recipe: Path, tmp_path: Path) -> None:
    whole = trained(recipe, [f"--job.dir={tmp_path / 'whole'}", "--schedule.name=constant"])[1]
    for steps in (1, 4, 8):  # before it begins, between two updates, to the end
        parts = trained(recipe, [f"--job.dir={tmp_path / 'cut'}", "--schedule.name=constant", f"--train.max_steps={steps}"])[1]
    assert all(value.dtype == torch.float32 and torch.equal(value, parts[name]) for name, value in whole.items())


@pytest.mark.slow
def test_other_ranks_go_on_with_it(world: World, recipe: Path, tmp_path: Path) -> None:
    whole = trained(recipe, [f"--job.dir={tmp_path / 'whole'}", *WIDE])[1]
    world.run(trained, 2, recipe, [f"--job.dir={tmp_path / 'cut'}", *WIDE, "--train.max_steps=6"])
    parts = trained(recipe, [f"--job.dir={tmp_path / 'cut'}", *WIDE])[1]
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-9, atol=1e-11)


def test_it_is_evaluated_and_read_on_request(recipe: Path, tmp_path: Path) -> None:
    """The hook's number is that of the stored average, which is the closed form, read without the run."""
    path, average, measured = trained(recipe, [f"--job.dir={tmp_path / 'run'}", *WIDE])
    assert measured.keys() == {"evaluation/held_out@ema/loss", "evaluation/held_out@ema/perplexity"}
    registry = Registry()
    found = {}
    for section in ("model", "ema"):
        weights = open_weights(tmp_path / "run", registry, section)
        read = weights.read(list(average))
        for name, value in read.items():
            expected = path[-1][name] if section == "model" else average[name]
            assert torch.equal(value, expected), (section, name)
        resolved = recipe_for(weights, None, [], 1, registry)
        (score,) = scores(weights, resolved, CPU, registry, lambda _: None)
        found[section] = score.loss
    assert measured["evaluation/held_out@ema/loss"] == (STEPS, pytest.approx(found["ema"], rel=1e-12))
    assert abs(found["ema"] - found["model"]) > 1e-6


def test_weights_that_are_not_there_are_refused(tmp_path: Path) -> None:
    plain = tmp_path / "plain.toml"
    plain.write_text(TINY)
    run, _ = prepared(plain, [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=3"])
    fit(run)
    with pytest.raises(ForgeError, match="has no weights 'ema'"):
        open_weights(tmp_path / "run", Registry(), "ema")
    with pytest.raises(ForgeError, match="no hook of this run keeps weights 'ema'"):
        run.weights("ema")


@pytest.mark.slow
def test_a_run_may_begin_and_cease_to_average(recipe: Path, tmp_path: Path) -> None:
    """A checkpoint without the average lets it begin with the weights; one with it does not hold up a run without the hook."""
    plain = tmp_path / "plain.toml"
    plain.write_text(TINY)
    directory = f"--job.dir={tmp_path / 'run'}"
    for which, steps in ((plain, 3), (recipe, 4), (plain, 5)):
        run, _ = prepared(which, [directory, f"--train.max_steps={steps}"])
        begun_with = {name: full(tensor).clone() for name, tensor, _ in run.model.trainable()}
        fit(run)
        if which is recipe:  # 4 - START is no multiple of EVERY
            kept = run.hooks[0].tensors(run.model)["ema"]
            assert all(torch.equal(full(value), begun_with[name]) for name, value in kept.items())
    assert run.state.step == 5


def alone(hook: Ema, weights: torch.Tensor) -> Any:
    """A run of one parameter."""
    model = SimpleNamespace(trained_sometime=lambda: [NamedTensor("w", weights, "matrix")])
    run = SimpleNamespace(model=model, state=SimpleNamespace(step=0))
    hook.start(run)  # type: ignore[arg-type]
    return run


def test_a_skipped_step_moves_nothing() -> None:
    weights = torch.nn.Parameter(torch.randn(50))
    hook = EmaConfig(decay=0.5).build()
    assert isinstance(hook, Ema)
    run = alone(hook, weights)
    before = hook.average["w"].clone()
    with torch.no_grad():
        weights.add_(1.0)
    run.state.step = 1
    hook.after_step(run, SimpleNamespace(skip=torch.tensor(1.0)))  # type: ignore[arg-type]
    assert torch.equal(hook.average["w"], before)
    hook.after_step(run, SimpleNamespace(skip=torch.tensor(0.0)))  # type: ignore[arg-type]
    torch.testing.assert_close(hook.average["w"], before + 0.5)


def test_weights_in_bf16_are_averaged_in_fp32_unless_asked() -> None:
    """A share of 1/1000 of a small change is below what bf16 can add."""
    weights = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    found = {}
    for dtype in ("fp32", "weights"):
        hook = Ema(decay=0.999, dtype=dtype)  # type: ignore[arg-type]
        with torch.no_grad():
            weights.fill_(1.0)
        run = alone(hook, weights)
        with torch.no_grad():
            weights.fill_(2.0)
        run.state.step = 1
        hook.after_step(run, SimpleNamespace(skip=torch.zeros(())))  # type: ignore[arg-type]
        found[dtype] = hook.average["w"]
    assert found["fp32"].dtype == torch.float32 and found["fp32"].tolist() == pytest.approx([1.001] * 4, rel=1e-6)
    assert found["weights"].dtype == torch.bfloat16 and found["weights"].tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("hooks", "key", "says"),
    [
        ('[[hooks]]\nname = "evaluate"\nweights = "ema"', "hooks.0.weights", "no such hook comes before"),
        ('[[hooks]]\nname = "save"\n[[hooks]]\nname = "ema"', "hooks.1.name", "'ema' comes after 'save'"),
        ('[[hooks]]\nname = "ema"\n[[hooks]]\nname = "ema"', "hooks.1.name", "listed twice"),
        ('[[hooks]]\nname = "ema"\n[[hooks]]\nname = "save"', "hooks.0.name", "averages already"),
    ],
)
def test_hooks_in_an_order_that_cannot_work_are_refused(tmp_path: Path, hooks: str, key: str, says: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(TINY.replace('[[hooks]]\nname = "save"\n', hooks + HOOKS[HOOKS.index("\n[data.evaluation") :]))
    averaging = ["--optimizer.name=schedule_free_adamw", "--schedule.name=constant"] if says == "averages already" else []
    with pytest.raises(ForgeError, match=says) as refused:
        load_recipe(path, averaging, 1, Registry())
    assert key in str(refused.value)


def test_an_optimizer_that_evaluates_averages_is_refused() -> None:
    """A plugin's, which no check knows: an average of what it trains would be taken for what it evaluates."""
    run: Any = SimpleNamespace(model=SimpleNamespace(averages=[lambda: None]))
    with pytest.raises(ForgeError, match="hook 'ema' averages weights, but the optimizer evaluates averages already"):
        Ema().check(run)
    Ema().check(SimpleNamespace(model=SimpleNamespace(averages=[])))  # type: ignore[arg-type]


def test_a_plan_counts_it(recipe: Path, tmp_path: Path) -> None:
    """Four bytes a parameter of the rank, and it says so."""
    plain = tmp_path / "plain.toml"
    plain.write_text(TINY)
    registry, found = Registry(), []
    for which in (plain, recipe):
        resolved = load_recipe(which, [], 2, registry)
        assert resolved.layout is not None
        found.append(dry_run(resolved.job, resolved.layout, registry, 2))
    without, with_it = (plan.ranks[0] for plan in found)
    assert with_it.parameters == without.parameters and without.optimizer > 2 * with_it.parameters
    assert with_it.optimizer - without.optimizer == with_it.parameters, "the average of fp32 weights is as large as they are"
    assert sum(with_it.peak.values()) >= sum(without.peak.values()) + with_it.parameters
    assert ("such as its average" in found[1].method, "such as its average" in found[0].method) == (True, False)
