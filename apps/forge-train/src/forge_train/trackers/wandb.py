"""Numbers to Weights & Biases, online or into a folder that `wandb sync` uploads later.

W&B's own step never goes back, and it drops what is logged for an earlier one. After a resume the steps since the
checkpoint are trained again, so every row carries `step`, which W&B is told to draw against, and `started_after`, the
step that this start of the run resumed from. A row is void when a later start has a `started_after` below its `step`.
"""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from forge_core.errors import ForgeError
from forge_core.redaction import redacted
from forge_train.trackers.guarded import library

RUN_ID = "wandb-id"
"""File in the run's directory with the W&B run id: a resumed run goes on under the same one."""

FINISH_SECONDS = 120.0
"""How long the end of a run waits for a network; what is not sent by then stays in the folder, for `wandb sync`."""


class WandbTracker:
    """One W&B run for all starts of a run; the connection is made by `rewind`, which every start calls once.

    The resolved recipe is sent without secrets. Source code, command line and the terminal's text are not sent.

    Raises:
        ForgeError: wandb is not installed, or is to go online and knows no API key.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        config: Mapping[str, Any],
        *,
        project: str = "forge",
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "offline"] | None = None,
    ) -> None:
        self._wandb = library("wandb", "wandb")
        _refuse_without_key(self._wandb, mode)
        self._directory, self._name, self._config = directory, name, config
        self._project, self._entity, self._group, self._tags, self._mode = project, entity, group, list(tags), mode
        self._after = 0
        self._run: Any = None

    def rewind(self, step: int) -> None:
        """Opens the W&B run, new or by its kept id; rows from here on say that they started after `step`."""
        self._after = step
        if self._run is None:
            self._run = self._start()
            self._run.define_metric("step", hidden=True)
            self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs one row. Nothing while the run could not be opened: asking again at each step would hold up training."""
        if self._run is not None:
            self._run.log({**values, "step": step, "started_after": self._after})

    def close(self) -> None:
        """Ends the W&B run and waits for what is still to be sent."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _start(self) -> Any:
        quiet = self._wandb.Settings(
            silent=True,
            console="off",  # the terminal belongs to the trainer
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            x_disable_meta=True,  # it holds the command line, where a secret may stand
            x_save_requirements=False,
            init_timeout=30.0,
            login_timeout=1.0,  # a run cannot answer a question
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
        )
        return self._wandb.init(
            project=self._project,
            entity=self._entity,
            group=self._group,
            tags=self._tags or None,
            name=self._name,
            id=run_id(self._directory),
            resume="allow",
            dir=str(self._directory),
            mode=self._mode,
            config=redacted(self._config),
            settings=quiet,
        )


def _refuse_without_key(wandb: Any, mode: str | None) -> None:
    """Raises ForgeError when W&B would ask at the terminal for a key, while the other ranks wait."""
    online = mode in (None, "online") and wandb.setup().settings.mode == "online"
    if online and not wandb.login(prompt=False):
        raise ForgeError("tracker 'wandb' has no API key: run `wandb login`, set WANDB_API_KEY, or set mode = \"offline\"")


def run_id(directory: Path) -> str:
    """The W&B id of the run in `directory`, made at the first call and kept in a file."""
    path = directory / RUN_ID
    if path.is_file() and (known := path.read_text(encoding="utf-8").strip()):
        return known
    made = uuid.uuid4().hex[:12]
    path.write_text(made + "\n", encoding="utf-8")
    return made
