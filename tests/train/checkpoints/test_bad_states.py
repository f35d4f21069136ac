"""A state that is not finite is never saved, a loss that leaves its band is warned of, and the advice names a good checkpoint."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_ckpt.checkpoint.read import newest
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import CheckpointError, ForgeError
from forge_core.protocols.run import Hook
from forge_parallel.model.parallel_model import full
from forge_train.process.stop import TrainingError
from forge_train.run.health import LOOK, SPAN, WINDOW, Health, LossBand, TooManySkipped
from forge_train.run.loop import fit
from harness.pool import World
from train.runs import TINY, digest, prepared


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def result(skipped: bool = False, loss: float = 2.0, norm: float = 1.0) -> Any:
    numbers = {"stop": 0.0, "skipped": float(skipped), "loss": loss, "grad_norm": norm}
    return SimpleNamespace(numbers=lambda: numbers)


def saved_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


# --- W6: skipped steps


def test_w6_ten_skipped_steps_of_a_hundred_end_the_run_though_never_two_in_a_row() -> None:
    health = Health(10)
    with pytest.raises(TooManySkipped, match=r"10 of the last 28 steps .* step 28, loss 2, gradient norm nan.*the data\.$"):
        for step in range(1, 200):
            health.after(step, result(skipped=step % 3 == 1, norm=math.nan if step % 3 == 1 else 1.0))
    assert health.total == 10


def test_w6_skips_that_are_far_apart_do_not_end_a_run() -> None:
    health = Health(10)
    for step in range(1, 2000):
        health.after(step, result(skipped=step % 12 == 0))  # eight or nine in a span
    assert health.total == 1999 // 12
    health = Health(2)
    health.after(1, result(skipped=True))
    health.after(1 + SPAN, result(skipped=True))
    with pytest.raises(TrainingError, match="2 of the last 100"):
        health.after(SPAN + 100, result(skipped=True))


def test_w6_each_skipped_step_is_said_and_a_flood_is_not(caplog: pytest.LogCaptureFixture) -> None:
    health = Health(50)
    for step in range(1, 21):
        health.after(step, result(skipped=step % 2 == 0, loss=math.nan))
    said = [re.match(r"step (\d+) was skipped and did not change the weights: loss nan", line) for line in caplog.messages]
    assert [match[1] for match in said if match] == ["2", "4", "6"]
    health._when -= 60
    health.after(22, result(skipped=True))
    assert caplog.messages[-1].startswith("step 22 was skipped") and "7 more since" in caplog.messages[-1]
    assert health.summary()[:1] == [
        "11 steps had a non-finite loss or gradient norm; they were skipped and did not change the weights"
    ]
    caplog.clear()
    quiet = Health(50, warns=False)
    quiet.after(1, result(skipped=True))
    assert quiet.total == 1 and not caplog.messages, "one rank of all speaks"


class Poison(Hook):
    """NaN into one row of the embedding, which few steps touch, or into a moment of the optimizer."""

    def __init__(self, step: int, where: str) -> None:
        self.step, self.where = step, where

    def after_step(self, run: Any, result: Any) -> None:
        if run.state.step != self.step:
            return
        name = next(name for name, _ in run.model.tensors() if "embed" in name)
        held = dict(run.model.tensors()) if self.where == "weight" else run.optimizer.state()[self.where]
        from forge_parallel.placement.boxes import local_box

        box = local_box(held[name])
        if 60 in range(box.offset[0], box.offset[0] + box.local.shape[0]):
            box.local.detach()[60 - box.offset[0]] = math.nan


RARE = "--data.sources.0.vocab_size=60"
"""Token 60 never occurs, so no step is skipped."""


def test_w6_a_weight_that_is_not_finite_is_not_saved_and_the_run_ends_with_code_3(recipe: Path, tmp_path: Path) -> None:
    run, recorder = prepared(recipe, [f"--job.dir={tmp_path}", RARE])
    run.hooks[:] = [Poison(4, "weight"), *run.hooks]
    with pytest.raises(TrainingError, match=r"after step 6 model/\S*embed\S* has non-finite values") as caught:
        fit(run)
    assert "to resume from step 3, its newest checkpoint" in str(caught.value)
    assert caught.value.exit_code == 3
    assert all(math.isfinite(loss) for loss in recorder.losses) and len(recorder.losses) == 5, "no number of a step showed it"
    assert saved_steps(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize("hooks", ["[]", "[{name='save'}]"])
def test_w6_a_run_whose_last_state_is_not_finite_does_not_finish(recipe: Path, tmp_path: Path, hooks: str) -> None:
    run, _ = prepared(recipe, [f"--job.dir={tmp_path}", RARE, f"--hooks={hooks}", "--checkpoint.every=0"])
    moment = next(s for s, held in run.optimizer.state().items() if any(tensor.dim() > 1 for tensor in held.values()))
    run.hooks[:] = [Poison(8, moment), *run.hooks]
    with pytest.raises(TrainingError, match=f"after step 8 optimizer/{moment}/.*No usable checkpoint"):
        fit(run)
    assert saved_steps(tmp_path) == []


def _poisoned(recipe: Path, folder: Path) -> str:
    run, _ = prepared(recipe, [f"--job.dir={folder}", RARE])
    run.hooks[:] = [Poison(4, "weight"), *run.hooks]
    try:
        return fit(run)
    except ForgeError as refusal:
        return str(refusal)


def test_w6_all_ranks_refuse_alike_though_one_alone_holds_the_value(world: World, recipe: Path, tmp_path: Path) -> None:
    first, second = world.run(_poisoned, 2, recipe, tmp_path)
    assert first == second
    assert "embed" in first and "first seen on rank 1" in first and "resume from step 3" in first
    assert saved_steps(tmp_path) == ["step-00000003"]


def test_w6_a_gradient_that_is_not_finite_beside_a_finite_loss_counts(recipe: Path, tmp_path: Path) -> None:
    run, _ = prepared(recipe, [f"--job.dir={tmp_path}", "--train.max_skipped=3"])
    weights = digest(run)
    parameter = run.model.trainable()[0].tensor
    parameter.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(TrainingError, match=r"3 of the last 3 steps .* loss 4\.\d+, gradient norm nan"):
        fit(run)
    for name, tensor in run.model.tensors():
        assert torch.isfinite(full(tensor)).all(), name
    fresh, _ = prepared(recipe, [f"--job.dir={tmp_path / 'other'}"])
    assert digest(fresh) == weights


# --- W5: divergence


class Ruin(Hook):
    """After a step the model is sure of the wrong tokens: finite weights, a loss far above what it was."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, run: Any, result: Any) -> None:
        if run.state.step == self.step:
            with torch.no_grad():
                next(tensor for name, tensor in run.model.tensors() if name == "head.weight").mul_(300)


def test_w5_divergence_is_warned_of_once_and_the_advice_is_a_checkpoint_from_before(
    recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = [f"--job.dir={tmp_path}", "--schedule.name=constant", "--optimizer.lr=1e-6", "--checkpoint.every=1"]
    settings += ["--checkpoint.keep=2"]
    run, recorder = prepared(recipe, [*settings, "--train.max_steps=14"])
    run.hooks[:] = [Ruin(6), *run.hooks]
    fit(run)
    assert recorder.losses[6] > 1.3 * recorder.losses[5], "step 7 is the first that shows it"
    (warning,) = [line for line in caplog.messages if "left its expected band" in line]
    assert "at step 7 " in warning and "at step 9;" not in warning and "--checkpoint.resume=5" in warning
    assert saved_steps(tmp_path) == ["step-00000005", "step-00000013", "step-00000014"], "the good one outlives `keep`"
    assert run.health.summary() == [warning]

    caplog.clear()
    again, _ = prepared(recipe, [*settings, "--train.max_steps=20"])
    assert "the checkpoint of step 14 was saved after the loss left its expected band at step 7" in caplog.text
    assert "--checkpoint.resume=5" in caplog.text
    caplog.clear()
    fit(again)
    assert "left its expected band" not in caplog.text, "one episode, one warning"

    back, _ = prepared(recipe, [*settings, "--train.max_steps=7", "--checkpoint.resume=5"])
    assert back.state.step == 5 and back.health.band.left is None and back.health.good == 5
    fit(back)
    assert saved_steps(tmp_path) == ["step-00000006", "step-00000007"]
    assert len(list((tmp_path / "checkpoints").glob("superseded-step-*"))) == 2, "the history that was left is kept aside"


def test_w5_the_loss_may_leave_before_and_be_noticed_after_a_restart(
    recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = [f"--job.dir={tmp_path}", "--schedule.name=constant", "--optimizer.lr=1e-6", "--checkpoint.every=2"]
    run, _ = prepared(recipe, [*settings, "--train.max_steps=8"])
    run.hooks[:] = [Ruin(6), *run.hooks]
    fit(run)
    assert "left its expected band" not in caplog.text
    fit(prepared(recipe, [*settings, "--train.max_steps=9"])[0])
    assert "left its expected band at step 7" in caplog.text and "--checkpoint.resume=4" in caplog.text


class Break(Hook):
    """From a step on no gradient is finite."""

    def __init__(self, step: int) -> None:
        self.step = step

    def before_step(self, run: Any) -> None:
        if run.state.step == self.step:
            run.model.trainable()[0].tensor.register_hook(lambda gradient: gradient * math.nan)


def test_w5_after_too_many_skips_the_advice_names_the_checkpoint_before_the_loss_left(recipe: Path, tmp_path: Path) -> None:
    settings = [f"--job.dir={tmp_path}", "--schedule.name=constant", "--optimizer.lr=1e-6", "--train.max_steps=40"]
    run, _ = prepared(recipe, [*settings, "--train.max_skipped=2"])
    run.hooks[:] = [Ruin(6), *run.hooks, Break(20)]
    with pytest.raises(TrainingError, match=r"Resume from step 3 with --checkpoint\.resume=3"):
        fit(run)


def test_w5_a_checkpoint_saved_among_skipped_steps_is_not_what_the_advice_names(recipe: Path, tmp_path: Path) -> None:
    run, _ = prepared(recipe, [f"--job.dir={tmp_path}", "--train.max_steps=40"])
    run.hooks[:] = [*run.hooks, Break(10)]
    with pytest.raises(TrainingError, match=r"Resume from step 9 with --checkpoint\.resume=9"):
        fit(run)
    assert saved_steps(tmp_path)[-1] == "step-00000018"


def test_w5_a_checkpoint_of_an_earlier_version_that_holds_nan_is_not_resumed(recipe: Path, tmp_path: Path) -> None:
    run, _ = prepared(recipe, [f"--job.dir={tmp_path}", RARE])
    run.hooks[:] = [Poison(4, "weight"), *run.hooks]
    run.saves.checkpoints.check = lambda content: None  # type: ignore[method-assign]
    fit(run)
    with pytest.raises(CheckpointError, match=r"step-00000008 cannot be resumed: model/\S*embed\S* has non-finite values"):
        prepared(recipe, [f"--job.dir={tmp_path}", RARE])


def test_a_step_that_was_never_saved_cannot_be_gone_back_to(recipe: Path, tmp_path: Path) -> None:
    fit(prepared(recipe, [f"--job.dir={tmp_path}"])[0])
    with pytest.raises(CheckpointError, match=r"checkpoint 5 not found in \S+; available steps: 8, 6, 3"):
        prepared(recipe, [f"--job.dir={tmp_path}", "--checkpoint.resume=5"])
    shard = next((tmp_path / "checkpoints" / "step-00000006").glob("rank-*.bin"))
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(CheckpointError, match=r"step-00000006 is damaged: .*Resume from another step"):
        prepared(recipe, [f"--job.dir={tmp_path}", "--checkpoint.resume=6"])
    assert saved_steps(tmp_path) == ["step-00000003", "step-00000006", "step-00000008"], "what was asked for by name is not moved"
    with pytest.raises(ForgeError, match=r"checkpoint\.resume"):
        prepared(recipe, [f"--job.dir={tmp_path}", "--checkpoint.resume=latest"])
    with pytest.raises(ForgeError, match=r"checkpoint\.resume"):
        prepared(recipe, [f"--job.dir={tmp_path}", "--checkpoint.resume=-1"])


# --- the band


def feed(band: LossBand, losses: list[float], start: int = 1) -> list[tuple[int, str]]:
    changes = [(step, band.take(step, loss)) for step, loss in enumerate(losses, start)]
    return [(step, change) for step, change in changes if change]


def noisy(level: float, count: int, seed: int = 0, spread: float = 0.05) -> list[float]:
    return (level + spread * torch.randn(count, generator=torch.Generator().manual_seed(seed))).tolist()


def test_a_band_is_silent_while_a_noisy_loss_falls() -> None:
    falling = [2.0 + 9.0 * math.exp(-step / 300) for step in range(3000)]
    losses = [level + noise for level, noise in zip(falling, noisy(0.0, 3000, spread=0.2), strict=True)]
    assert feed(LossBand(), losses) == []


def test_a_spike_of_two_steps_is_no_episode() -> None:
    assert feed(LossBand(), [*noisy(2.5, 50), 90.0, 70.0, *noisy(2.5, 50, 1), 90.0, *noisy(2.5, 50, 2)]) == []


def test_an_episode_is_said_once_and_its_end_too() -> None:
    band = LossBand()
    losses = [*noisy(2.5, 50), *noisy(4.0, 30, 1), *noisy(2.5, 50, 2)]
    assert feed(band, losses) == [(53, "left"), (83, "back")]
    assert band.left is None
    assert abs(band.level - 2.5) < 0.05, "what was outside has not moved it"


def test_the_first_step_outside_is_what_is_named() -> None:
    band = LossBand()
    feed(band, [*noisy(2.5, 50), 4.0, 2.5, 4.0, 4.0])
    assert band.left == 51


def test_a_new_level_is_accepted_after_a_window() -> None:
    band = LossBand()
    changes = feed(band, [*noisy(2.5, 300), *noisy(3.5, WINDOW + 50, 1), *noisy(6.0, LOOK, 2)])
    assert changes == [(303, "left"), (300 + WINDOW, "settled"), (300 + WINDOW + 53, "left")]


def test_the_second_of_all_losses_can_be_outside() -> None:
    assert feed(LossBand(), [5.77, 110_458.0, 9e4, 8e4]) == [(4, "left")]


def test_the_limit_is_that_of_the_definition() -> None:
    band = LossBand()
    assert band.limit == math.inf
    feed(band, [2.0, 2.4, 2.0, 1.6, 2.0, 2.1, 1.9])
    assert band.limit == pytest.approx(2.0 + 6 * 1.4826 * 0.1)  # deviations: 0 0 0 0.1 0.1 0.4 0.4
    assert LossBand(inside=type(band.inside)([3.0])).limit == pytest.approx(3.6)
    assert LossBand(inside=type(band.inside)([0.01])).limit == pytest.approx(0.11)


def test_a_band_survives_a_checkpoint() -> None:
    losses = [*noisy(2.5, 60), *noisy(4.0, 4, 1), *noisy(2.5, 60, 2)]
    for cut in (0, 10, 61, 63, 64, 100):
        one, other = LossBand(), LossBand()
        before = feed(one, losses[:cut])
        other.load(json.loads(json.dumps(one.state())))
        after = feed(other, losses[cut:], cut + 1)
        assert before + after == feed(LossBand(), losses)


def test_the_band_stands_in_every_checkpoint(recipe: Path, tmp_path: Path) -> None:
    run, recorder = prepared(recipe, [f"--job.dir={tmp_path}"])
    fit(run)
    found = newest(LocalStore(tmp_path / "checkpoints"), SingleProcessWorld())
    assert found is not None
    assert found.meta["health"]["band"]["inside"] == pytest.approx(recorder.losses, rel=1e-5)
    assert found.meta["health"]["skipped"] == 0
