"""Hooks around a scripted run: when they act, and what they write."""

import io
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from forge_core.layout import Layout
from forge_parallel.launch.watch import Watch
from forge_parallel.step.step import StepTimer
from forge_train.hooks import periodic
from forge_train.hooks.evaluation import Evaluate
from forge_train.hooks.metrics import Log, Utilization
from forge_train.hooks.periodic import pause
from forge_train.hooks.progress import Progress
from forge_train.hooks.samples import Sample
from forge_train.hooks.save import Save
from forge_train.hooks.weights import Replicas
from forge_train.process.stop import STOPPED, Stop
from forge_train.recipe.checks import evaluate_has_sets
from forge_train.run.health import Health
from forge_train.run.training import Clock, Requests

TOKENS = 512


class Result:
    """A step's result that counts how often the host waits for it."""

    def __init__(self, step: int, run: "ScriptedRun") -> None:
        self.step, self.run = step, run

    def numbers(self) -> dict[str, float]:
        self.run.waits.append(self.step)
        return {"loss": 10.0 / self.step, "grad_norm": 0.5, "tokens": TOKENS - 3, "skipped": 0.0, "stop": 0.0}


@dataclass
class Held:
    """Remembers how it was read; gives (nats, tokens) of this rank's share."""

    share: list[tuple[float, int]]
    asked: list[tuple[int, int, int]] = field(default_factory=list)

    def batches(self, rank: int, ranks: int, micro_batch: int) -> list[tuple[float, int]]:
        self.asked.append((rank, ranks, micro_batch))
        return self.share


@dataclass
class ScriptedRun:
    """The attributes of a run that hooks may use, without a model."""

    total: int
    every: int | None = None
    rank: int = 0
    step_seconds: float = 0.0
    console: Console | None = None
    evaluations: dict[str, Held] = field(default_factory=dict)
    logged: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    directory: Path = Path()
    lr: float | None = 1e-3

    def __post_init__(self) -> None:
        self.state = SimpleNamespace(step=0, tokens=0)
        self.topology = SimpleNamespace(rank=self.rank, size=1, data_rank=self.rank, data_size=2, device=torch.device("cpu"))
        self.watch = Watch()
        self.job = SimpleNamespace(
            train=SimpleNamespace(max_steps=self.total, micro_batch=4, global_batch=8),
            checkpoint=SimpleNamespace(every=self.every, first=False),
            job=SimpleNamespace(name="scripted"),
        )
        self.step = self
        self.stop = Stop(self.total)
        self.results: dict[str, tuple[int, float]] = {}
        self.requests, self.clock, self.times = Requests(), Clock(), StepTimer()
        self.saves = self
        self.batches = ()
        self.model = SimpleNamespace(parameters_held=list)
        self.optimizer = SimpleNamespace(state=dict)
        self.health = Health()
        self.data = None

    def log(self, values: dict[str, float]) -> None:
        self.logged.append((self.state.step, dict(values)))

    def judge(self) -> None:
        pass

    def save(self) -> None:
        self.saved.append(self.state.step)

    def may_begin(self) -> bool:
        return True

    def finish(self) -> None:
        pass

    def evaluate(self, batches: Iterable[tuple[float, int]]) -> Any:
        batches = list(batches)
        tokens = sum(count for _, count in batches)
        return SimpleNamespace(loss=sum(nats for nats, _ in batches) / tokens if tokens else 0.0, tokens=tokens)

    def go(self, *hooks: Any, stop: int | None = None) -> None:
        for hook in hooks:
            hook.start(self)
        while self.state.step < (stop or self.total):
            sleep(self.step_seconds)
            self.state.step += 1
            self.state.tokens += TOKENS
            for hook in hooks:
                hook.after_step(self, Result(self.state.step, self))
        for hook in hooks:
            hook.finish(self)


def test_log_writes_first_due_and_last_and_waits_only_then() -> None:
    run = ScriptedRun(total=25)
    run.go(Log(every=10).build())
    assert [step for step, _ in run.logged] == [1, 10, 20, 25]
    assert run.waits == [1, 10, 20, 25]
    values = run.logged[1][1]
    assert values["loss"] == 1.0 and values["lr"] == 1e-3 and values["grad_norm"] == 0.5
    assert values["tokens"] == 10 * TOKENS
    assert values["step_tokens"] == TOKENS - 3
    assert "stop" not in values
    assert 2**20 < values["peak_memory"] < 2**42


def test_log_leaves_out_a_rate_that_is_not_one_number() -> None:
    run = ScriptedRun(total=1, lr=None)
    run.go(Log().build())
    assert "lr" not in run.logged[0][1]


def test_log_is_silent_on_other_ranks() -> None:
    run = ScriptedRun(total=10, rank=1)
    run.go(Log(every=5).build())
    assert run.logged == [] and run.waits == []


@pytest.mark.parametrize("order", ["log first", "log last"])
def test_throughput_leaves_out_evaluation_and_saving(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 0.0  # a clock of its own: on a busy machine a sleep lasts as long as the machine likes

    def advance(seconds: float) -> None:
        nonlocal moment
        moment += seconds

    monkeypatch.setattr(periodic, "perf_counter", lambda: moment)
    monkeypatch.setitem(globals(), "sleep", advance)

    @dataclass
    class Slow(ScriptedRun):
        def evaluate(self, batches):
            advance(0.15)
            return super().evaluate(batches)

        def save(self):
            advance(0.15)
            super().save()

    run = Slow(total=8, every=2, step_seconds=0.005, evaluations={"held_out": Held([(3.0, 1)])})
    hooks = [Log(every=4).build(), Evaluate(every=2).build(), Save().build()]
    run.go(*(hooks if order == "log first" else hooks[::-1]))
    seconds = [values["step_seconds"] for _, values in run.logged if "step_seconds" in values]
    assert seconds == pytest.approx([0.005] * 3), "without the pauses of 0.15 s"
    rates = [(v["tokens_per_second"], v["step_seconds"]) for _, v in run.logged if "step_seconds" in v]
    assert all(rate == pytest.approx(TOKENS / second) for rate, second in rates)


def test_pause_counts_through_an_exception() -> None:
    run = SimpleNamespace(clock=Clock())
    with pytest.raises(KeyError), pause(run):
        sleep(0.01)
        raise KeyError
    assert run.clock.paused >= 0.01


@pytest.mark.parametrize("last", [5, 7], ids=["before the end", "at the last step"])
def test_a_run_that_is_asked_to_stop_saves_and_does_not_evaluate(last: int) -> None:
    """It may have seconds, an evaluation may take minutes, and the run that resumes evaluates what is due."""
    run = ScriptedRun(total=7, every=0, evaluations={"a": Held([(2.0, 1)])})
    run.stop.agreed = True
    run.go(Evaluate(every=3).build(), Save().build(), stop=last)
    assert run.logged == []
    assert run.saved == [last]
    assert run.stop.reason(run.state) == STOPPED, "also after the last step, so that the evaluation is not forgotten"


def test_h7_an_evaluation_is_left_when_asked_and_done_first_by_the_run_that_resumes() -> None:
    run = ScriptedRun(total=4, evaluations={"a": Held([(2.0, 1)] * 3)})
    hook = Evaluate(every=2).build()
    read: list[int] = []

    class Slow(Held):
        def batches(self, rank: int, ranks: int, micro_batch: int) -> Any:
            for place, batch in enumerate(super().batches(rank, ranks, micro_batch)):
                read.append(place)
                if place == 3:
                    run.stop.signals.asked = "SIGTERM"
                yield batch

    run.evaluations["b"] = Slow([(2.0, 1)] * 100)
    run.state.step = 2
    hook.after_step(run, None)
    assert len(read) == 9, "eight batches are evaluated, then it looks"
    assert run.logged == [], "part of a set is not its loss"
    assert run.stop.agreed and run.stop.reason(run.state) == STOPPED
    hook.finish(run)
    assert run.logged == []

    again = ScriptedRun(total=4, evaluations={"a": Held([(2.0, 1)])})
    again.state.step = 2
    resumed = Evaluate(every=2).build()
    resumed.load_state(hook.state())
    resumed.start(again)
    assert [step for step, _ in again.logged] == [2]
    assert resumed.state() == {}
    fresh = Evaluate(every=2).build()
    fresh.load_state({})
    fresh.start(again)
    assert len(again.logged) == 1


def test_samples_wait_for_the_run_that_resumes_too() -> None:
    assert Evaluate.leisurely and Sample.leisurely
    assert not (Save.leisurely or Replicas.leisurely), "what has drifted must not be saved"


def test_evaluate_every_and_at_the_end_once() -> None:
    run = ScriptedRun(total=7, evaluations={"a": Held([(2.0, 1)])})
    run.go(Evaluate(every=3).build())
    assert [step for step, _ in run.logged] == [3, 6, 7]
    run = ScriptedRun(total=6, evaluations={"a": Held([(2.0, 1)])})
    run.go(Evaluate(every=3, at_start=True).build())
    assert [step for step, _ in run.logged] == [0, 3, 6]


def test_evaluate_weighs_by_tokens_and_reads_its_share() -> None:
    held = Held([(10.0, 10), (90.0, 30)])
    out = io.StringIO()
    run = ScriptedRun(total=1, rank=1, evaluations={"held_out": held}, console=Console(file=out, width=120))
    run.go(Evaluate(every=5).build())
    ((_, values),) = run.logged
    assert values["evaluation/held_out/loss"] == 2.5  # the mean of the two batch means would be 2.0
    assert values["evaluation/held_out/perplexity"] == pytest.approx(math.exp(2.5))
    assert values["tokens"] == TOKENS
    assert held.asked == [(1, 2, 4)]
    assert "held_out loss 2.5000  perplexity 12.18" in out.getvalue()


def test_perplexity_is_never_clipped() -> None:
    run = ScriptedRun(total=1, evaluations={"a": Held([(50.0, 1)]), "b": Held([(1000.0, 1)])})
    run.go(Evaluate(every=1).build())
    values = run.logged[0][1]
    assert values["evaluation/a/perplexity"] == pytest.approx(5.184705528587072e21)
    assert values["evaluation/b/perplexity"] == math.inf


def test_a_set_without_tokens_is_left_out_with_a_warning(caplog) -> None:
    run = ScriptedRun(total=1, evaluations={"empty": Held([]), "full": Held([(3.0, 3)])})
    run.go(Evaluate(every=1).build())
    assert set(run.logged[0][1]) == {"evaluation/full/loss", "evaluation/full/perplexity", "tokens"}
    assert "'empty'" in caplog.text


def test_evaluate_without_any_set_is_a_fault() -> None:
    job = SimpleNamespace(hooks=[Log(), Evaluate()], data=SimpleNamespace(evaluation={}))
    (fault,) = evaluate_has_sets(job, Layout())
    assert fault.key == "hooks.1.name"
    job.data.evaluation = {"held_out": object()}
    assert evaluate_has_sets(job, Layout()) == []


def test_save_once_per_step() -> None:
    run = ScriptedRun(total=10, every=4)
    run.go(Save().build())
    assert run.saved == [4, 8, 10]
    run = ScriptedRun(total=8, every=4)
    run.go(Save().build())
    assert run.saved == [4, 8]
    run = ScriptedRun(total=3, every=None)
    run.go(Save().build())
    assert run.saved == [3]


def test_save_not_again_what_was_restored() -> None:
    run = ScriptedRun(total=8, every=4)
    run.state.step = 8
    run.go(Save().build())
    assert run.saved == []
    run = ScriptedRun(total=8, every=4)
    run.state.step = 4
    run.go(Save().build(), stop=6)
    assert run.saved == [6]


LINE = r"\d\d:\d\d:\d\d  step {}/40 \({}%\)  loss {}  [\d.]+[kMG]? tokens/s  \d+:\d\d left"


def test_progress_lines_off_a_terminal() -> None:
    out = io.StringIO()
    run = ScriptedRun(total=40, step_seconds=0.001, console=Console(file=out, width=60))
    run.go(Progress(every=10, seconds=0.0).build())
    lines = out.getvalue().splitlines()
    expected = [LINE.format(1, 2, r"10\.0000"), *(LINE.format(s, s * 5 // 2, rf"{10 / s:.4f}") for s in (10, 20, 30, 40))]
    assert len(lines) == 5
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(expected, lines, strict=True)), lines
    assert lines[-1].endswith("0:00 left")
    assert run.waits == [1, 10, 20, 30, 40]


def test_progress_lines_keep_their_distance() -> None:
    out = io.StringIO()
    run = ScriptedRun(total=40, console=Console(file=out))
    run.go(Progress(every=10, seconds=60.0).build())
    assert [line.split("step ")[1].split("/")[0] for line in out.getvalue().splitlines()] == ["1", "40"]


def test_progress_on_a_terminal_redraws_a_panel() -> None:
    out = io.StringIO()
    run = ScriptedRun(total=5, console=Console(file=out, force_terminal=True, width=100, _environ={"TERM": "xterm"}))
    run.go(Progress(every=1).build())
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "step 5/5" in text and "loss 2.0000" in text and "lr 0.001" in text
    assert "scripted" in text and re.search(r"memory [\d.]+ [MG]iB", text) and "left 0:00" in text
    assert "MFU" not in text, "nothing is known of the model"


def test_the_panel_shows_the_newest_warning_of_the_run_and_the_share_of_the_peak() -> None:
    out = io.StringIO()
    run = ScriptedRun(
        total=3, step_seconds=0.01, console=Console(file=out, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    )
    run.health.remarks = ["the loss left its band", "one [step] was skipped"]
    run.job.data = SimpleNamespace(sequence_length=16, phases=())
    hook = Progress(every=1).build()
    hook.start(run)
    hook.view.speed = Utilization(SimpleNamespace(training=lambda length: 1e6), 16, 1, 1e11, "fp32", "cpu")
    hook.begun, run.start = (0.0, 0), lambda _: None
    hook.start = lambda _: None
    run.go(hook)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "one [step] was skipped" in text and "left its band" not in text
    assert re.search(r"MFU \d+\.\d%", text)


def test_a_crash_does_not_leave_the_cursor_hidden() -> None:
    out = io.StringIO()
    run = ScriptedRun(total=5, console=Console(file=out, force_terminal=True, width=100, _environ={"TERM": "xterm"}))
    hook = Progress(every=1).build()
    hook.start(run)  # and nobody calls finish
    assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")
    hook.finish(run)


def test_progress_is_silent_on_other_ranks() -> None:
    run = ScriptedRun(total=5)
    run.go(Progress(every=1).build())
    assert run.waits == []


def test_time_left_counts_from_the_start_of_this_process() -> None:
    out = io.StringIO()
    run = ScriptedRun(total=40, step_seconds=0.02, console=Console(file=out))
    run.state.step = 38
    run.go(Progress(every=1, seconds=0.0).build())
    assert "step 39/40" in out.getvalue()
    assert out.getvalue().splitlines()[0].endswith("0:00 left")
