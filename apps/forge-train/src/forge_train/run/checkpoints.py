"""What a checkpoint of a run contains, and how model, optimizer and hooks are restored from it.

States of hooks are pairs [key, state] in the order of the hooks. A key is the registered name of the hook, which does not change
when its class is renamed; checkpoints of earlier versions have the name of the class.
"""

import json
import logging
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from forge_ckpt.checkpoint import read
from forge_ckpt.checkpoint.fence import Fence
from forge_ckpt.checkpoint.retention import SECONDS, RetentionPolicy
from forge_ckpt.checkpoint.write import SaveRequest
from forge_ckpt.format.manifest import Manifest
from forge_ckpt.format.names import committed
from forge_ckpt.world import from_rank_0
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Piece, Store, World
from forge_core.protocols.data import Cursor
from forge_core.protocols.model import Optimizer
from forge_core.protocols.run import Hook
from forge_core.redaction import redacted
from forge_core.registry import Entry, Registry
from forge_data.order.cursor import merged
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.optim.groups import Beginning
from forge_parallel.placement.boxes import local_box
from forge_parallel.transforms.shard import reduce_of
from forge_parallel.verify.state import not_finite
from forge_train.process.stop import TrainingError
from forge_train.recipe.load import Resolved
from forge_train.run.health import Health
from forge_train.run.resume import anchors
from forge_train.run.run import Run

_log = logging.getLogger(__name__)

Named = Mapping[str, torch.Tensor]

ONE_COUNT = "optimizer/step/all"
"""Where older checkpoints of bf16 state have the number of steps: one for all parameters."""


def pieces(model: ParallelModel, optimizer: Optimizer, trained: Named | None = None) -> Iterator[Piece]:
    """Every tensor of a run: `model/NAME` and `optimizer/STATE/NAME`. `trained`, of `ParallelModel.averaged`, are weights that
    are not the ones to evaluate: `optimizer/trained/NAME`."""
    yield from model.pieces()
    for state, tensors in {**optimizer.state(), "trained": trained or {}}.items():
        for name, tensor in tensors.items():
            yield model.piece(f"optimizer/{state}/{name}", tensor)


def _learned(model: ParallelModel, optimizer: Optimizer) -> Iterator[Piece]:
    """What training moves, by the names of `pieces`; a model's buffers may be infinite for a reason."""
    buffers = {f"model/{name}" for name, tensor in model.tensors() if not isinstance(tensor, torch.nn.Parameter)}
    return (piece for piece in pieces(model, optimizer) if piece.name not in buffers)


def _is_of_run(name: str) -> bool:
    """Whether a tensor of a checkpoint is one of `pieces`; those of hooks are in other sections."""
    return name.partition("/")[0] in ("model", "optimizer")


def _is_good(manifest: Manifest, health: Health, just: bool) -> bool:
    """Whether the loss was in its band when a checkpoint was saved, and is not known to have left it by then. What is saved is
    finite, since that is noted."""
    kept = manifest.meta.get("health")
    return kept is not None and kept["band"]["left"] is None and health.is_before(manifest.step, just)


def _of(piece: str) -> str:
    """The parameter whose state a piece of the optimizer is."""
    return piece.split("/", 2)[2] if piece.startswith("optimizer/") else ""


@dataclass
class Checkpoints:
    """What of one run is kept, and how it comes back.

    Attributes:
        frozen: parameters of the model that are never trained.
        origin: what the checkpoints keep of the weights that the run started from (`forge_train.run.weights`).
        tokenizer: fingerprint of the tokenizer that the ids are of, where there is one.
    """

    store: Store
    world: World
    config: Mapping[str, Any]
    plugins: Sequence[Mapping[str, str]]
    keep: RetentionPolicy
    present: Sequence[str] = ()
    fence: Fence | None = None
    checked: int = -1
    frozen: frozenset[str] = frozenset()
    origin: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None

    def newest(self, policy: read.ResumePolicy) -> read.VerifiedCheckpoint | None:
        """Collective: what a start resumes from; changes nothing until this job owns the store."""
        self.present = self._committed()
        return read.newest(self.store, self.world, policy, aside=self.fence is not None)

    def own(self) -> Fence:
        """Collective: takes the store from every older job. Called once this one can go on from what `newest` found."""
        self.fence = Fence.take(self.store, self.world)
        return self.fence

    def tidy(self, found: read.VerifiedCheckpoint | None) -> None:
        """Collective: renames what `newest` found damaged. For the owner."""
        read.set_aside(self.store, self.world, found.skipped if found else ())

    def later(self, policy: read.ResumePolicy) -> read.VerifiedCheckpoint | None:
        """Collective: what `newest` finds now, if an older job has saved since it was called."""
        return self.newest(policy) if set(self._committed()) - set(self.present) else None

    def _committed(self) -> list[str]:
        return from_rank_0(self.world, lambda: [entry.name for entry in committed(self.store.list())])

    def order(self, run: Run) -> SaveRequest:
        """Collective: what a checkpoint of the current step says about the run, and which older ones stay."""
        meta = {
            "tokens": run.state.tokens,
            SECONDS: run.seconds,
            "cursor": self._cursor_of_all(run.state.cursor),
            "anchors": anchors(run.job),
            "layout": str(run.topology.layout),
            "reduce": reduce_of(run.model.plan),
            # The model is built from its part again, so a key that may mean something else than a secret keeps its value there.
            "config": {name: redacted(part, name, certain=name == "model") for name, part in self.config.items()},
            "plugins": list(self.plugins),
            "frozen": sorted(self.frozen_by(run.optimizer)),
            "health": run.health.state(),
            "hooks": states_of(run.hooks),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "tokenizer": self.tokenizer,
            **self.origin,
        }
        return SaveRequest(run.state.step, meta, self.keep, run.health.spare(), dict(run.marks))

    @contextmanager
    def state_of(self, run: Run) -> Iterator[Sequence[Piece]]:
        """Inside, all that a checkpoint keeps: model, optimizer, and what hooks hold."""
        with run.model.averaged() as trained:
            kept = (piece for _, _, piece in kept_by(run.hooks, run.model))
            yield (*pieces(run.model, run.optimizer, trained), *kept)

    def check(self, run: Run) -> None:
        """Collective: looks at every value of the state, once for each step.

        Raises:
            TrainingError: a parameter or the optimizer's state is not finite.
        """
        if self.checked == run.state.step:
            return
        if found := not_finite(_learned(run.model, run.optimizer), run.topology):
            raise TrainingError(
                f"after step {run.state.step} {found.name} has non-finite values (first seen on rank {found.rank}); "
                f"this state is not saved. Lower the learning rate or check the data. {self.advice(run.health)}"
            )
        self.checked = run.state.step

    def good(self, health: Health, just: bool = False) -> read.VerifiedCheckpoint | None:
        """Collective: the newest verified checkpoint of before the loss left its band, as `Health.is_before`; nothing changes."""
        return read.newest_that(self.store, self.world, lambda manifest: _is_good(manifest, health, just))

    def good_step(self, health: Health) -> int | None:
        """Collective: where a run may go back to: a step whose weights are above suspicion, else the one just before."""
        found = self.good(health) or self.good(health, just=True)
        return None if found is None else found.step

    def advice(self, health: Health) -> str:
        """Collective: how to go on after a failure, with a good checkpoint."""
        on_offer = self._committed()
        found = self.good(health)
        if found is None:
            return "No usable checkpoint is left; start over with --fresh"
        if found.name == on_offer[0]:
            return (
                f"Start the run again to resume from step {found.step}, its newest checkpoint; its loss was in the expected band"
            )
        return (
            f"Resume from step {found.step} with --checkpoint.resume={found.step}: this is the newest verified checkpoint "
            "with the loss in the expected band"
        )

    def _cursor_of_all(self, cursor: Cursor) -> dict[str, Any]:
        """Collective: one position of those of all ranks, which differ only where each reads a foreign loader of its own."""
        if "foreign" not in cursor:
            return dict(cursor)
        parts = self.world.all_gather(json.dumps(cursor).encode())
        return dict(merged([json.loads(part) for part in parts]))

    def restore(
        self, found: read.VerifiedCheckpoint, model: ParallelModel, optimizer: Optimizer, again: Callable[[Any], Optimizer]
    ) -> Mapping[str, Any]:
        """Collective: fills model and optimizer from a verified checkpoint and returns its facts.

        What was frozen and is trained from now on gets the state that an optimizer has at first, from `again`, which builds one;
        the state of what is frozen now is left out.

        Raises:
            CheckpointError: it does not fit the model.
        """
        if callable(tell := getattr(optimizer, "at_step", None)):
            tell(found.step)
        begins, ends = self._other_frozen(found.meta, optimizer)
        with model.averaged() as trained:
            mine = [piece for piece in pieces(model, optimizer, trained) if _of(piece.name) not in begins]
            count = torch.zeros((), dtype=torch.int64)
            if older := ONE_COUNT in found.manifest.index:
                mine = [piece for piece in mine if not piece.name.startswith("optimizer/step/")]
                mine.append(Piece(ONE_COUNT, (), (), count, owned=False))
            meta = read.load(self.store, found, mine, self.world, select=lambda name: _is_of_run(name) and _of(name) not in ends)
            if older:
                for step in optimizer.state()["step"].values():
                    step.copy_(count)
            for name, tensor in model.parameters_held():
                if name in begins and name in trained:  # it has been evaluated as it was
                    local_box(trained[name]).local.copy_(local_box(tensor).local)
        _begin(model, optimizer, again, begins)
        if bad := not_finite(_learned(model, optimizer), model.topology):
            raise CheckpointError(f"{found.name} cannot be resumed: {bad.name} has non-finite values. {self.advice(Health())}")
        return meta

    def other_frozen(self, meta: Mapping[str, Any], optimizer: Optimizer) -> Iterator[str]:
        """Which parameters were frozen in a checkpoint and are not now, and the other way round; a line each."""
        begins, ends = self._other_frozen(meta, optimizer)
        if begins:
            yield f"trained from now on, without optimizer state at first: {', '.join(sorted(begins))}"
        if ends:
            yield f"frozen from now on, their optimizer state is dropped: {', '.join(sorted(ends))}"

    def frozen_by(self, optimizer: Optimizer) -> frozenset[str]:
        """Parameters of the model that are not trained: never, or in the stage that the optimizer is in."""
        stage = getattr(optimizer, "stage_settings", None)
        return self.frozen if stage is None else stage.frozen

    def _other_frozen(self, meta: Mapping[str, Any], optimizer: Optimizer) -> tuple[frozenset[str], frozenset[str]]:
        """Parameters that begin to be trained, and that no longer are."""
        before, now = frozenset(meta.get("frozen", ())), self.frozen_by(optimizer)
        return before - now, now - before

    def restore_kept(self, found: read.VerifiedCheckpoint, run: Run) -> None:
        """Collective: fills the tensors that hooks keep, as far as the checkpoint has their section.

        Raises:
            CheckpointError: a section has other tensors.
        """
        stored = {info.name.partition("/")[0] for info in found.manifest.tensors}
        kept = [(section, piece) for section, _, piece in kept_by(run.hooks, run.model) if section in stored]
        sections = {section for section, _ in kept}
        if self.world.size > 1:  # a stage of a pipeline may have nothing that learns
            sections = {
                section for part in self.world.all_gather(json.dumps(sorted(sections)).encode()) for section in json.loads(part)
            }
        if sections:
            mine = lambda name: name.partition("/")[0] in sections  # noqa: E731 (a condition on names)
            read.load(self.store, found, [piece for _, piece in kept], self.world, select=mine)


def _begin(model: ParallelModel, optimizer: Optimizer, again: Callable[[Any], Optimizer], names: frozenset[str]) -> None:
    """Gives some parameters the state of an optimizer that has just been built."""
    if names.isdisjoint(name for name, _ in model.parameters_held()):
        return
    for state, tensors in again(Beginning(model, names)).state().items():
        for name, tensor in tensors.items():
            local_box(optimizer.state()[state][name]).local.copy_(local_box(tensor).local)


State = tuple[str, Any]


def build_hooks(resolved: Resolved, registry: Registry) -> list[Hook]:
    """The hooks of a recipe, each with the key of its state."""
    hooks: list[Hook] = []
    for index, component in enumerate(resolved.job.hooks):
        hook = component.build()
        hook.state_key = _registered(registry.find(*resolved.outcome.chosen[f"hooks.{index}"]))
        hooks.append(hook)
    return hooks


def states_of(hooks: Sequence[Hook]) -> list[State]:
    """What a checkpoint keeps of the hooks: JSON. One that only observes and cannot say its state has none, and a warning."""
    return [(hook.state_key or type(hook).__name__, _state_of(hook)) for hook in hooks]


def _state_of(hook: Hook) -> dict[str, Any]:
    try:
        return dict(hook.state())
    except Exception as cause:
        if not hook.observes:
            raise
        name = hook.state_key or type(hook).__name__
        _log.warning("hook %r has no state in this checkpoint: %s: %s", name, type(cause).__name__, cause)
        return {}


def kept_by(hooks: Sequence[Hook], model: ParallelModel) -> Iterator[tuple[str, str, Piece]]:
    """(section, name, box) of every tensor that hooks keep; in a checkpoint it is called `section/name`."""
    for hook in hooks:
        for section, tensors in hook.tensors(model).items():
            for name, tensor in tensors.items():
                yield section, name, model.piece(f"{section}/{name}", tensor)


def restore_hooks(hooks: Sequence[Hook], saved: Sequence[Sequence[Any]]) -> list[str]:
    """Gives each hook the first state under its key that is left; a hook without one starts anew.

    Returns:
        The keys of the states that no hook took and that hold something.
    """
    left: list[State] = [(key, state) for key, state in saved]
    for hook in hooks:
        names = (hook.state_key, type(hook).__name__)
        found = next((item for name in names for item in left if item[0] == name), None)
        if found:
            left.remove(found)
            hook.load_state(found[1])
    return [key for key, state in left if state]


def _registered(entry: Entry) -> str:
    """`forge-train:evaluate`; `mine.py:Largest` for a class in a file, wherever the file lies."""
    return f"{entry.distribution}:{entry.name.rpartition(':')[2]}"
