"""Asks tasks of the LM Evaluation Harness during training."""

import importlib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from forge_core.errors import ForgeError
from forge_core.protocols.run import Run
from forge_train.hooks.periodic import Periodic, length_limit


def harness() -> Any:
    """The module that needs the library.

    Raises:
        ForgeError: it is not installed; says what to install.
    """
    try:
        return importlib.import_module("forge_train.inference.harness")
    except ModuleNotFoundError as cause:
        if (cause.name or "").partition(".")[0] != "lm_eval":
            raise  # the library is there, and something that it needs is not: its own message says what
        raise ForgeError('tasks need the LM Evaluation Harness: pip install "forge-train[eval]"') from cause


class _Left(Exception):
    """The run was asked to stop, between two batches of questions."""


class TasksHook(Periodic):
    """Asks every task on all ranks alike, which share its questions, and logs its metrics. Training goes on as without it, and a
    run that is asked to stop meanwhile leaves it, without a result."""

    leisurely = True
    observes = True

    def __init__(
        self,
        tasks: Sequence[str],
        every: int = 1000,
        folder: str | None = None,
        shots: int | None = None,
        limit: int | None = None,
        batch: int = 8,
        weights: str = "model",
    ) -> None:
        super().__init__(every)
        self.tasks, self.folder = tuple(tasks), None if folder is None else Path(folder)
        self.shots, self.limit, self.batch, self.weights = shots, limit, batch, weights
        self._index: Any = None

    def check(self, run: Run) -> None:
        """Refuses a run without a tokenizer, without the library, names that are none of its tasks, and tasks that ask for more
        new tokens than the model takes."""
        if run.data.tokenizer is None:
            raise ForgeError("hook 'tasks' needs a tokenizer: add [data.tokenizer], or remove the hook")
        found = harness()
        self._index = found.open_tasks(self.tasks, self.folder)
        room = length_limit(run)
        for name, tokens in found.new_tokens(self.tasks, self._index) if room is not None else ():
            if tokens >= room:
                raise ForgeError(
                    f"hook 'tasks': task {name!r} asks for {tokens} new tokens, and the model takes {room} with the question; "
                    "set max_gen_toks in its generation_kwargs, raise model.max_length, or leave the task out"
                )

    def act(self, run: Run) -> None:
        """Asks all of them."""
        found = harness()
        assert run.data.tokenizer is not None, "`check` refuses a run without a tokenizer"

        def look(count: int) -> None:
            if self.leaves(run, "tasks of the LM Evaluation Harness", count):
                raise _Left

        index = self._index or found.open_tasks(self.tasks, self.folder)
        try:
            with nullcontext() if self.weights == "model" else run.weights(self.weights):
                model = found.HarnessModel(run.model, run.data.tokenizer, batch=self.batch, before=look)
                results = found.results_of(model, self.tasks, index, self.shots, self.limit)
        except _Left:
            return
        at = "" if self.weights == "model" else f"@{self.weights}"
        values = {f"tasks/{name}{at}/{metric}": value for name, one in results.items() for metric, value in one.items()}
        run.measured.update({name: (run.state.step, value) for name, value in values.items()})
        run.log({**values, "tokens": run.state.tokens})
        if run.console is not None:
            said = "  ".join(f"{name.removeprefix('tasks/')} {value:.4f}" for name, value in values.items())
            run.console.print(f"step {run.state.step}  {said}", highlight=False)
