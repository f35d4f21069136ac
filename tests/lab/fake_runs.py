"""Runs that take no time: what `forge-train run` leaves in a directory, with a loss that a test chooses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_lab.sweep.execution import Executor, StopRequests, outcomes, slots, train
from forge_lab.sweep.files import Outcome, write_recipes
from forge_lab.sweep.grid import Sweep, read_sweep
from forge_train.directory import keep_recipe
from forge_train.plan import run_size
from forge_train.process.stop import REQUEUE
from forge_train.recipe.load import load_recipe
from forge_train.trackers import METRICS, JsonlTracker

METRIC = "evaluation/held_out/loss"


def write_run(
    recipe: Path | str, loss: Callable[[Any, int], float], step: int | None = None, overrides: Sequence[str] = ()
) -> Path:
    """Leaves a run of this recipe that reached `step`; its directory."""
    resolved = load_recipe(recipe, overrides)
    folder, train_keys = Path(str(resolved.job.job.dir)), resolved.job.train
    step = step or train_keys.max_steps
    folder.mkdir(parents=True, exist_ok=True)
    keep_recipe(folder, resolved.as_toml())
    tokens = step * train_keys.global_batch * resolved.job.data.sequence_length
    JsonlTracker(folder / METRICS).write(step, {METRIC: loss(resolved.job, step), "loss": 9.0, "tokens": tokens})
    return folder


@dataclass
class FakeRuns:
    """Starts nothing; a run ends after `looks` looks at it.

    Attributes:
        loss: of a job at a step.
        codes: exit codes of the starts of a point, in their order; 0 afterwards.
        commands: of all starts, and the environment of each.
    """

    loss: Callable[[Any, int], float]
    codes: Mapping[str, list[int]] = field(default_factory=dict)
    looks: int = 2
    commands: list[list[str]] = field(default_factory=list)
    environments: list[Mapping[str, str]] = field(default_factory=list)
    running: int = 0
    most: int = 0
    during: Callable[["FakeRuns"], None] = lambda runs: None

    def __call__(self, command: Sequence[str], environment: Mapping[str, str], output: Path) -> "FakeRun":
        self.commands.append(list(command))
        self.environments.append(environment)
        self.running += 1
        self.most = max(self.most, self.running)
        output.parent.mkdir(parents=True, exist_ok=True)
        recipe = next(Path(part) for part in command if part.endswith(".toml"))
        until = next((int(part.partition("=")[2]) for part in command if part.startswith("--train.stop_at=")), None)
        codes = self.codes.get(recipe.stem, [])
        return FakeRun(self, recipe, until, output, codes.pop(0) if codes else 0)

    @property
    def started(self) -> list[tuple[str, str]]:
        """(point, until) of every start; the step is empty where it goes to its end."""
        found = []
        for command in self.commands:
            until = [part.partition("=")[2] for part in command if part.startswith("--train.stop_at=")]
            found.append((next(Path(part).stem for part in command if part.endswith(".toml")), until[0] if until else ""))
        return found


@dataclass
class FakeRun:
    runs: FakeRuns
    recipe: Path
    until: int | None
    output: Path
    code: int
    looked: int = 0
    stopped: list[bool] = field(default_factory=list)

    def poll(self) -> int | None:
        self.looked += 1
        if self.looked < self.runs.looks:
            self.runs.during(self.runs)
            return None
        self.runs.running -= 1
        if self.stopped:
            write_run(self.recipe, self.runs.loss, 1)
            return REQUEUE
        if self.code:
            with self.output.open("a") as file:
                file.write(f"Traceback\n\nit ended with {self.code}\n")
            return self.code
        write_run(self.recipe, self.runs.loss, self.until)
        return 0

    def stop(self, hard: bool) -> None:
        self.stopped.append(hard)


def sweep_of(folder: Path, text: str, overrides: Sequence[str] = ()) -> Sweep:
    """A sweep of a file with this text, in a directory next to it."""
    (folder / "grid.toml").write_text(text)
    return read_sweep(folder / "grid.toml", overrides, folder / "sweep")


def run_all(
    sweep: Sweep, runs: FakeRuns, jobs: int = 1, asked: StopRequests | None = None
) -> tuple[Mapping[str, Outcome], list[str]]:
    """Trains a sweep with these runs; what became of its points, and what was said."""
    said: list[str] = []
    places = slots(jobs, 1, 0, {})
    train(sweep, Executor(sweep, places, said.append, asked or StopRequests(), runs, 0.0), said.append)
    return outcomes(sweep), said


def write_ladder(folder: Path, directory: str) -> None:
    """Leaves nine finished runs of three sizes and three lengths in `folder / directory`, with losses of a law."""

    def loss(job: Any, step: int) -> float:
        tokens = step * job.train.global_batch * job.data.sequence_length
        return 1.69 + 406.4 / run_size(job).parameters ** 0.34 + 410.7 / tokens**0.28

    (folder / "ladder.toml").write_text('recipe = "debug"\n[vary]\nmodel.dim = [32, 64, 128]\ntrain.max_steps = [20, 60, 180]\n')
    made = read_sweep(folder / "ladder.toml", (), folder / directory)
    write_recipes(made)
    run_all(made, FakeRuns(loss))
