"""Hooks `evaluate`, `tasks`, `best` and `early_stop`, and the names of their results. No torch."""

import importlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, MinLen

from forge_core.batch import Batch
from forge_core.component import FREE
from forge_core.errors import DataError, ForgeError
from forge_core.protocols.run import Hook, Run, StepResult
from forge_train.hooks.periodic import Periodic, length_limit

_log = logging.getLogger(__name__)
_IMAGES_SHOWN = 10
"""Maximum number of missing images in a message."""

Mode = Literal["min", "max"]


def result_names(name: str, weights: str, metrics: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the names of loss and perplexity of a set in logs: `evaluation/NAME/loss` and `.../perplexity`, or
    `evaluation/NAME@WEIGHTS/...` for weights other than `model`. If the objective is evaluated by `metrics` of its own, their
    names replace the perplexity."""
    at = name if weights == "model" else f"{name}@{weights}"
    return tuple(f"evaluation/{at}/{what}" for what in ("loss", *(metrics or ("perplexity",))))


def evaluated(objective: Any) -> tuple[str, ...]:
    """Returns the metrics by which an objective is evaluated besides its loss; empty for the perplexity."""
    return getattr(objective, "evaluated", ())


@dataclass
class Improvement:
    """Tracks the best result of one evaluation metric. All ranks have the same results, so all ranks agree.

    Attributes:
        metric: name of the metric in logs, such as `evaluation/held_out/loss`.
        mode: `min` if smaller is better, `max` if larger is better.
        least: minimum improvement over the best result.
        best: the best finite result so far; None before the first.
        step: step of the best result.
        seen: step of the newest result; -1 before the first.
    """

    metric: str
    mode: Mode = "min"
    least: float = 0.0
    best: float | None = None
    step: int = 0
    seen: int = -1

    def look(self, run: Run) -> bool | None:
        """Returns True if this step has a new best result, False if its new result is not the best, and None without one."""
        step, value = run.results.get(self.metric, (-1, math.nan))
        if step != run.state.step or step == self.seen:
            return None
        self.seen = step
        gain = math.inf if self.best is None else (self.best - value) * (1 if self.mode == "min" else -1)
        if not math.isfinite(value) or not gain > self.least:
            return False
        self.best, self.step = value, step
        return True

    def state(self) -> Mapping[str, Any]:
        """Returns the state to save in a checkpoint."""
        if self.seen < 0:
            return {}
        return {"metric": self.metric, "mode": self.mode, "best": self.best, "step": self.step, "seen": self.seen}

    def load_state(self, state: Mapping[str, Any]) -> bool:
        """Restores the state and returns True; returns False if the state is of another metric or mode."""
        if (state.get("metric"), state.get("mode")) != (self.metric, self.mode):
            return False
        self.best, self.step, self.seen = state["best"], state["step"], state["seen"]
        return True


def bits_per_byte(loss: float, tokens: int, text_bytes: float) -> float:
    """Returns the bits per byte of text.

    Args:
        loss: mean loss in nats per predicted token.
        tokens: number of predicted tokens.
        text_bytes: size of the text of exactly these tokens; see `EvaluationSet.predicted`.
    """
    return loss * tokens / math.log(2) / text_bytes


@dataclass(kw_only=True)
class Evaluate(Periodic):
    """Loss and perplexity on every set of `[data.evaluation]`, weighted by tokens over all ranks.

    They are logged as `evaluation/NAME/loss` (nats per token) and `evaluation/NAME/perplexity`; objectives such as `dpo` have
    metrics of their own in place of the perplexity. Each rank reads its own share of
    a set. Loss and valid tokens are summed over all ranks before the division, so the result does not depend on the number of
    ranks.
    """

    key_class: ClassVar = FREE
    leisurely = True
    observes = True

    every: Annotated[int, Gt(0)] = 500
    """Optimizer steps between evaluations; the last step of the run is always evaluated."""
    at_start: bool = False
    """Also evaluate the initial weights, before the first step."""
    weights: Literal["model", "ema"] = "model"
    """Weights to evaluate: the model's, or their average of hook `ema`, whose results have `@ema` in their names."""

    def check(self, run: Run) -> None:
        """Refuses sets with missing images, since a failed evaluation would not end the run but have no result."""
        for name, held_out in run.evaluations.items():
            source: Any = getattr(held_out, "source", None)
            gone = source.missing() if hasattr(source, "missing") else []
            if gone:
                others = f" and {len(gone) - _IMAGES_SHOWN} others" if len(gone) > _IMAGES_SHOWN else ""
                named = f"{', '.join(gone[:_IMAGES_SHOWN])}{others}"
                raise DataError(
                    f"hook 'evaluate': held-out set {name!r} has {len(gone)} missing images: {named}; restore them, or remove "
                    f"{getattr(source, 'name', 'its store')}, which is then prepared again without them as far as `skip` allows"
                )

    def start(self, run: Run) -> None:
        """Evaluates the initial weights if `at_start` is set."""
        super().start(run)
        if self.at_start and run.state.step == 0:
            self.once(run)

    def act(self, run: Run) -> None:
        """Evaluates every set; a stop request ends the evaluation without a result."""
        with nullcontext() if self.weights == "model" else run.weights(self.weights):
            self._evaluate(run)

    def _evaluate(self, run: Run) -> None:
        values: dict[str, float] = {}
        metrics = evaluated(getattr(run.job, "objective", None))
        summed: dict[str, Any] = {"metrics": metrics} if metrics else {}
        for name, held_out in run.evaluations.items():
            batches = held_out.batches(run.topology.data_rank, run.topology.data_size, run.job.train.micro_batch)
            result = run.step.evaluate(self._until_left(run, name, batches), **summed)
            if self.left:
                return
            if result.tokens == 0:
                _log.warning("held-out set %r has no token to predict and is skipped", name)
                continue
            more = [result.metrics[metric] / result.tokens for metric in metrics] or [perplexity(result.loss)]
            values |= dict(zip(result_names(name, self.weights, metrics), (result.loss, *more), strict=True))
        if not values:
            return
        run.results.update({metric: (run.state.step, value) for metric, value in values.items()})
        run.log({**values, "tokens": run.state.tokens})
        if run.console is not None:
            run.console.print("  ".join([f"step {run.state.step}", *_described(values)]), highlight=False)

    def _until_left(self, run: Run, name: str, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields batches until a stop request. All ranks have the same number of batches, so all stop before the same one."""
        for count, batch in enumerate(batches):
            if self.leaves(run, f"the evaluation of {name!r}", count):
                return
            yield batch


def perplexity(loss: float) -> float:
    """Returns exp(loss), with the loss in nats per token; inf on overflow."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _described(values: dict[str, float]) -> list[str]:
    """Returns results as text: `held_out loss 3.2145`, `perplexity 24.89`."""
    parts = []
    for key, value in values.items():
        name, _, kind = key.removeprefix("evaluation/").rpartition("/")
        parts.append(f"{name} loss {value:.4f}" if kind == "loss" else f"{kind} {value:.{2 if kind == 'perplexity' else 4}f}")
    return parts


def import_harness() -> Any:
    """Imports the module that needs the LM Evaluation Harness.

    Raises:
        ForgeError: the library is not installed; the error says what to install.
    """
    return import_library("forge_train.inference.harness", "lm_eval", "the LM Evaluation Harness", "eval")


def import_library(module: str, library: str, name: str, extra: str) -> Any:
    """Imports a module that needs a library of tasks.

    Args:
        module: the module.
        library: the package that may be missing.
        name: name of the library, for messages.
        extra: extra of forge-train that installs it.

    Raises:
        ForgeError: the library is not installed; the error says what to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as cause:
        if (cause.name or "").partition(".")[0] != library:
            raise  # the library is installed but lacks a dependency, which the original message names
        raise ForgeError(f'tasks need {name}; install it: pip install "forge-train[{extra}]"') from cause


def lmms_manifest() -> Any:
    """Returns what lmms-eval registers as its model `forge`.

    It is an entry point, which the library loads while it is being imported, so this module imports nothing of it.
    """
    from lmms_eval.models.registry_v2 import ModelManifest  # pyright: ignore[reportMissingImports]

    module = "forge_train.inference.lmms_harness"
    return ModelManifest(model_id="forge", simple_class_path=f"{module}.LmmsModel", chat_class_path=f"{module}.LmmsChatModel")


class _Left(Exception):
    """A stop request arrived between two batches of questions."""


@dataclass(kw_only=True)
class Tasks(Periodic):
    """Runs tasks of the LM Evaluation Harness on the current weights; needs `pip install "forge-train[eval]"`. Metrics of a task
    are logged as `tasks/NAME/METRIC`.

    All ranks share the questions. The tasks do not affect training; a stop request ends them without a result.
    """

    key_class: ClassVar = FREE
    leisurely = True
    observes = True
    generates = True

    tasks: Annotated[list[str], MinLen(1)]
    """Names of tasks, or of groups of tasks."""
    every: Annotated[int, Gt(0)] = 1000
    """Optimizer steps between evaluations on the tasks; the last step of the run is always evaluated."""
    folder: str | None = None
    """Folder with your own task files."""
    shots: Annotated[int, Ge(0)] | None = None
    """Examples before each question; by default as the task says."""
    limit: Annotated[int, Gt(0)] | None = None
    """Maximum number of questions per task; by default all."""
    batch: Annotated[int, Gt(0)] = 8
    """Texts per forward and rank."""
    weights: Literal["model", "ema"] = "model"
    """Weights to evaluate: the model's, or their average of hook `ema`, for which NAME becomes `NAME@ema`."""

    @classmethod
    def examples(cls, folder: Path) -> "Iterable[Tasks]":
        """Returns a task with one question."""
        question = folder / "question.jsonl"
        question.write_text('{"text": "a", "answer": 1}\n')
        (folder / "task.yaml").write_text(
            f"task: forge_example\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {question}}}}}\ntest_split: test\n"
            "output_type: multiple_choice\ndoc_to_text: '{{text}}'\ndoc_to_choice: [b, c]\ndoc_to_target: '{{answer}}'\n"
            "metric_list: [{metric: acc}]\n"
        )
        return (cls(tasks=["forge_example"], folder=str(folder), every=2),)

    def __post_init__(self) -> None:
        self._index: Any = None

    def _open(self) -> Any:
        """Returns the index of the tasks."""
        return import_harness().open_tasks(self.tasks, None if self.folder is None else Path(self.folder))

    def check(self, run: Run) -> None:
        """Refuses a run without a tokenizer or without the library, unknown tasks, and tasks that need more new tokens than the
        model supports."""
        if run.data.tokenizer is None:
            raise ForgeError("hook 'tasks' needs a tokenizer: add [data.tokenizer], or remove the hook")
        harness = import_harness()
        self._index = self._open()
        room = length_limit(run)
        for name, tokens in harness.new_tokens(self.tasks, self._index) if room is not None else ():
            if tokens >= room:
                raise ForgeError(
                    f"hook 'tasks': task {name!r} needs {tokens} new tokens, but the model supports {room} with the question; "
                    "set max_gen_toks in its generation_kwargs, raise model.max_length, or remove the task"
                )

    def act(self, run: Run) -> None:
        """Runs all tasks."""
        harness = import_harness()
        assert run.data.tokenizer is not None, "`check` refuses a run without a tokenizer"

        def look(count: int) -> None:
            if self.leaves(run, "tasks of the LM Evaluation Harness", count):
                raise _Left

        index = self._index or self._open()
        try:
            with nullcontext() if self.weights == "model" else run.weights(self.weights):
                model = harness.HarnessModel(run.model, run.data.tokenizer, batch=self.batch, before=look)
                results = harness.results_of(model, self.tasks, index, self.shots, self.limit)
        except _Left:
            return
        at = "" if self.weights == "model" else f"@{self.weights}"
        values = {f"tasks/{name}{at}/{metric}": value for name, one in results.items() for metric, value in one.items()}
        run.results.update({name: (run.state.step, value) for name, value in values.items()})
        run.log({**values, "tokens": run.state.tokens})
        if run.console is not None:
            said = "  ".join(f"{name.removeprefix('tasks/')} {value:.4f}" for name, value in values.items())
            run.console.print(f"step {run.state.step}  {said}", highlight=False)


BEST_MARK = "best"
"""File next to the checkpoints with one line: the name of the best checkpoint."""


@dataclass(kw_only=True)
class Best(Hook):
    """Saves a checkpoint at each new best evaluation, writes its name to the file `best`, and protects it from retention.

    Hook `save` writes the checkpoint. It is protected until a better one is durable. Initial weights do not count.
    """

    key_class: ClassVar = FREE

    metric: str = "evaluation/held_out/loss"
    """Metric to compare, by its name in logs."""
    mode: Mode = "min"
    """`min` if smaller is better, `max` if larger is better."""

    def __post_init__(self) -> None:
        self.improvement = Improvement(self.metric, self.mode)

    def start(self, run: Run) -> None:
        """Restores the mark of the best checkpoint, and checks the result of an evaluation that was interrupted earlier."""
        if self.improvement.best is not None:
            run.requests.marks[BEST_MARK] = self.improvement.step
        self._look(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Looks at the evaluation of this step, if there was one."""
        self._look(run)

    def finish(self, run: Run) -> None:
        """Checks the final evaluation."""
        self._look(run)

    def state(self) -> Mapping[str, Any]:
        """Returns the best result and its step."""
        return self.improvement.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` gave."""
        self.improvement.load_state(state)

    def _look(self, run: Run) -> None:
        if run.state.step and self.improvement.look(run):
            run.requests.marks[BEST_MARK] = run.state.step
            run.requests.save = True


@dataclass(kw_only=True)
class EarlyStop(Hook):
    """Ends the run when evaluations no longer improve, with a checkpoint and exit code 0.

    A later start ends at once, unless `patience` was raised.
    """

    key_class: ClassVar = FREE

    metric: str = "evaluation/held_out/loss"
    """Metric to compare, by its name in logs."""
    mode: Mode = "min"
    """`min` if smaller is better, `max` if larger is better."""
    patience: Annotated[int, Gt(0)] = 3
    """Number of consecutive evaluations without improvement after which the run ends."""
    min_delta: Annotated[float, Ge(0)] = 0.0
    """Minimum change over the best result that counts as an improvement."""

    def __post_init__(self) -> None:
        self.improvement = Improvement(self.metric, self.mode, self.min_delta)
        self.waited = 0

    def start(self, run: Run) -> None:
        """Checks the result of an evaluation that was interrupted earlier, and ends the run if an earlier start had ended it."""
        self._look(run)
        self._judge(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Looks at the evaluation of this step, if there was one."""
        if self._look(run):
            self._judge(run)

    def state(self) -> Mapping[str, Any]:
        """Returns the best result, its step, and the number of evaluations since."""
        kept = self.improvement.state()
        return {**kept, "waited": self.waited} if kept else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` gave."""
        if self.improvement.load_state(state):
            self.waited = state["waited"]

    def _look(self, run: Run) -> bool:
        better = self.improvement.look(run)
        if better is not None:
            self.waited = 0 if better else self.waited + 1
        return better is not None

    def _judge(self, run: Run) -> None:
        if self.waited >= self.patience:
            found = self.improvement
            best = f"{found.best:.6g} of step {found.step}" if found.best is not None else "no finite result"
            run.stop.end(f"{found.metric} did not improve on {best} in {self.waited} evaluations")
