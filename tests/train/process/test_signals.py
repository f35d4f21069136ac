"""Signals stop a run after a step, or at once where nothing is lost, on all ranks alike."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge_core.protocols.run import Hook
from forge_train.directory import SAMPLES
from forge_train.hooks.evaluation import Evaluate
from forge_train.process import stop
from forge_train.process.stop import STOPPED, Interrupted, Signals
from forge_train.run.loop import fit
from harness.pool import World
from train.runs import TINY, prepared

ALL = ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"]


@pytest.fixture(autouse=True)
def not_under_nohup() -> Iterator[None]:
    """A test session that was started by nohup ignores SIGHUP, and so would a run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def send(name: str) -> None:
    os.kill(os.getpid(), getattr(signal, name))


class Sends(Hook):
    def __init__(self, name: str) -> None:
        self.name = name

    def before_step(self, run: Any) -> None:
        if run.state.step == 3:
            send(self.name)


@pytest.mark.parametrize("name", ALL)
def test_h4_every_signal_saves_and_stops(recipe: Path, tmp_path: Path, name: str) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    run, _ = prepared(recipe, [f"--job.dir={tmp_path}", "--checkpoint.every=0"])
    run.hooks[:] = [*run.hooks, Sends(name)]
    with run.stop.signals.listening():
        assert fit(run) == STOPPED
    assert run.stop.signals.asked == name
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000004"]
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Signals that would have ended this process."""
    sent: list[int] = []
    monkeypatch.setattr(stop.os, "kill", lambda process, number: sent.append(number))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield sent
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_the_second_sigterm_ends_the_process_unless_it_is_the_first_one_passed_on(killed: list[int]) -> None:
    signals = Signals()
    with signals.listening():
        signals._note(signal.SIGTERM, None)
        signals._note(signal.SIGTERM, None)
        signals._note(signal.SIGUSR1, None)
        assert killed == [], "torchrun passes on what its workers have been sent as well"
        signals._when -= 3
        signals._note(signal.SIGUSR1, None)
        assert killed == [], "a scheduler's warning may come again"
        signals._note(signal.SIGTERM, None)
        assert killed == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_run_under_nohup_goes_on_without_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signals = Signals()
        with signals.listening():
            send("SIGHUP")
            assert not signals.asked
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("name", ALL)
def test_fault_28_h8_before_the_first_step_a_signal_ends_what_is_done(name: str) -> None:
    signals = Signals()
    with signals.listening():
        said = f"interrupted by {name} before the first step; nothing was saved"
        with pytest.raises(Interrupted, match=said), signals.at_once():
            send(name)
        with pytest.raises(Interrupted, match=name), signals.at_once():
            raise AssertionError("a signal that came earlier counts too")
    assert Interrupted.exit_code == 75
    assert not issubclass(Interrupted, Exception), "what catches failures must not catch it"


def test_outside_of_it_a_signal_is_only_noted() -> None:
    signals = Signals()
    with signals.listening():
        with signals.at_once():
            pass
        send("SIGTERM")
    assert signals.asked == "SIGTERM"


def test_fault_28_h7_samples_are_left_between_two_tokens(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(TINY.replace("vocab_size = 61", "vocab_size = 257") + '\n[data.tokenizer]\nname = "bytes"\n')
    run, _ = prepared(recipe, [f"--job.dir={tmp_path}", "--hooks=[{name='sample', max_tokens=24}]"])
    sampling, count = run.hooks[0], 0
    from_first = type(run.topology).from_first

    def counted(topology: Any, tokens: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            run.stop.signals.asked = "SIGTERM"
        return from_first(topology, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(run.topology), "from_first", counted)
        sampling.once(run)  # type: ignore[attr-defined]
    assert count == 8
    assert not (tmp_path / SAMPLES).exists()
    assert dict(sampling.state()) == {"left": True} and run.stop.agreed
    assert all(part.training for part in run.model.parts)


EVALUATED = "--data.evaluation.held_out={name='random', vocab_size=61, tokens=4000, document=23}"


def _left(recipe: Path, folder: Path, layout: list[str]) -> tuple[int, bool, str, int]:
    """An evaluation that the last rank alone is asked to leave, between two steps."""
    run, _ = prepared(recipe, [f"--job.dir={folder}", EVALUATED, *layout])
    last = run.topology.rank == run.topology.size - 1
    held_out = run.evaluations["held_out"]
    batches, read = held_out.batches, []

    def noted(*share: int) -> Iterator[Any]:
        for batch in batches(*share):
            read.append(batch)
            if last and len(read) == 3:
                run.stop.signals.asked = "SIGTERM"
            yield batch

    held_out.batches = noted
    hook = Evaluate(every=2).build()
    run.hooks[:] = [*run.hooks, hook]
    reason = fit(run)
    return len(read), dict(hook.state()) == {"left": True}, reason, run.state.step


@pytest.mark.parametrize("layout", [["--parallel.dp_shard=2"], ["--parallel.pp=2"]], ids=["dp2", "pp2"])
def test_fault_28_h7_all_ranks_leave_an_evaluation_before_the_same_batch(
    world: World, recipe: Path, tmp_path: Path, layout: list[str]
) -> None:
    assert world.run(_left, 2, recipe, tmp_path, layout) == [(9, True, STOPPED, 2)] * 2
