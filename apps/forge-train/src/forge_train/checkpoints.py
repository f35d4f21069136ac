"""Between a run and its checkpoints: which tensors and which facts are kept, and how they come back."""

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from forge_ckpt import resume, saver
from forge_ckpt.collective import from_rank_0
from forge_ckpt.fence import Fence
from forge_ckpt.names import committed
from forge_core.errors import CheckpointError
from forge_core.protocols.ckpt import Piece, Store, World
from forge_core.protocols.data import Cursor
from forge_core.protocols.model import Optimizer
from forge_core.protocols.run import Hook
from forge_core.redact import redacted
from forge_data.cursor import merged
from forge_parallel.model import ParallelModel
from forge_train.resuming import anchors
from forge_train.run import Run


def pieces(model: ParallelModel, optimizer: Optimizer) -> Iterator[Piece]:
    """Every tensor of a run: `model/NAME` and `optimizer/STATE/NAME`."""
    yield from model.pieces()
    for state, tensors in optimizer.state().items():
        for name, tensor in tensors.items():
            yield model.piece(f"optimizer/{state}/{name}", tensor)


@dataclass
class Checkpoints:
    """Saves and restores one run."""

    store: Store
    world: World
    config: Mapping[str, Any]
    plugins: Sequence[Mapping[str, str]]
    keep: int
    present: Sequence[str] = ()
    fence: Fence | None = None

    def newest(self, policy: Literal["auto", "never", "require"]) -> resume.Found | None:
        """What a start resumes from: `forge_ckpt.resume.newest`, which changes nothing until this job owns the store."""
        self.present = self._committed()
        return resume.newest(self.store, self.world, policy, aside=self.fence is not None)

    def own(self) -> Fence:
        """Takes the store from every older job; collective. Called once this one can go on from what `newest` found."""
        self.fence = Fence.take(self.store, self.world)
        return self.fence

    def tidy(self, found: resume.Found | None) -> None:
        """Puts aside what `newest` found damaged; collective. For the owner."""
        resume.set_aside(self.store, self.world, found.skipped if found else ())

    def later(self, policy: Literal["auto", "never", "require"]) -> resume.Found | None:
        """What `newest` finds now, if an older job has saved since it was called; collective."""
        return self.newest(policy) if set(self._committed()) - set(self.present) else None

    def _committed(self) -> list[str]:
        return from_rank_0(self.world, lambda: [entry.name for entry in committed(self.store.list())])

    def save(self, run: Run) -> str:
        """Writes a checkpoint of the current step, durably; all ranks enter.

        Raises:
            Superseded: another job has started in the run's directory; nothing was written.
            CheckpointError: it could not be written.
        """
        meta = {
            "tokens": run.state.tokens,
            "cursor": self._cursor_of_all(run.state.cursor),
            "anchors": anchors(run.job),
            "layout": str(run.topology.layout),
            # The model is built from its part again, so that is kept as it is.
            "config": {name: part if name == "model" else redacted(part, name) for name, part in self.config.items()},
            "plugins": list(self.plugins),
            "hooks": [[type(hook).__name__, dict(hook.state())] for hook in run.hooks],
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
        }
        assert self.fence is not None, "a run owns its store before it trains"
        try:
            return saver.save(
                self.store,
                pieces(run.model, run.optimizer),
                meta,
                run.state.step,
                self.world,
                keep=self.keep,
                may=self.fence.may_write,
            )
        except CheckpointError:
            self.fence.check()  # a newer job may be why
            raise

    def _cursor_of_all(self, cursor: Cursor) -> dict[str, Any]:
        """One position of those of all ranks, which differ only where each knows its own streams."""
        if not {"readers", "foreign"} & cursor.keys():
            return dict(cursor)
        parts = self.world.all_gather(json.dumps(cursor).encode())
        return dict(merged([json.loads(part) for part in parts]))

    def restore(self, found: resume.Found, model: ParallelModel, optimizer: Optimizer) -> Mapping[str, Any]:
        """Fills model and optimizer from a verified checkpoint and returns its facts.

        Raises:
            CheckpointError: it does not fit the model.
        """
        return resume.load(self.store, found, pieces(model, optimizer), self.world)


def restore_hooks(hooks: Sequence[Hook], saved: Sequence[Sequence[Any]]) -> None:
    """Gives each hook the state that a hook of its type had, in order; a new hook starts afresh."""
    left = [(name, state) for name, state in saved]
    for hook in hooks:
        match = next((item for item in left if item[0] == type(hook).__name__), None)
        if match:
            left.remove(match)
            hook.load_state(match[1])
