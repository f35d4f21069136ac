"""What a checkpoint of a run contains, and how model, optimizer and hooks are restored from it.

States of hooks are pairs [key, state] in the order of the hooks. A key is the registered name of the hook, which does not change
when its class is renamed; checkpoints of earlier versions have the name of the class.
"""

import json
import logging
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from forge_data.order.cursor import merge_cursors
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.optim.groups import Beginning
from forge_parallel.placement.boxes import local_box
from forge_parallel.transforms.shard import reduce_of
from forge_parallel.verify.state import not_finite
from forge_train.process.stop import TrainingError
from forge_train.recipe.load import Recipe
from forge_train.run.base import FrozenBase
from forge_train.run.health import Health
from forge_train.run.resume import anchors
from forge_train.run.training import Clock, Decided, OptimizerSpec, Requests, Training

_log = logging.getLogger(__name__)

Named = Mapping[str, torch.Tensor]

ONE_COUNT = "optimizer/step/all"
"""Where older checkpoints of bf16 state have the number of steps: one for all parameters."""


def pieces(model: ParallelModel, optimizer: Optimizer, trained: Named | None = None) -> Iterator[Piece]:
    """Yields every tensor of a run: `model/NAME` and `optimizer/STATE/NAME`, without the frozen base of an adapter.

    Args:
        trained: weights that training changes where others are evaluated (`ParallelModel.averaged`): `optimizer/trained/NAME`.
    """
    yield from (model.piece(f"model/{name}", tensor) for name, tensor in model.tensors() if name not in model.specs.base)
    for state, tensors in {**optimizer.state(), "trained": trained or {}}.items():
        for name, tensor in tensors.items():
            yield model.piece(f"optimizer/{state}/{name}", tensor)


def _learned(model: ParallelModel, optimizer: Optimizer) -> Iterator[Piece]:
    """Yields what training changes, by the names of `pieces`. Buffers are left out: some are infinite on purpose."""
    buffers = {f"model/{name}" for name, tensor in model.tensors() if not isinstance(tensor, torch.nn.Parameter)}
    return (piece for piece in pieces(model, optimizer) if piece.name not in buffers)


def _is_of_run(name: str) -> bool:
    """Whether a tensor of a checkpoint is one of `pieces`; tensors of hooks are in other sections."""
    return name.partition("/")[0] in ("model", "optimizer")


def _is_good(manifest: Manifest, health: Health, just: bool) -> bool:
    """Whether the loss was in its band when a checkpoint was saved, and had not left it by that step, as far as is known now.
    Values need no look: only finite states are saved."""
    state = manifest.meta.get("health")
    return state is not None and state["band"]["left"] is None and health.is_before(manifest.step, just)


def _of(piece: str) -> str:
    """Returns the parameter that a piece of optimizer state belongs to; empty for other pieces."""
    return piece.split("/", 2)[2] if piece.startswith("optimizer/") else ""


@dataclass
class RunContent:
    """What the checkpoints of a run contain."""

    decided: Decided
    training: Training
    hooks: list[Hook]
    health: Health
    requests: Requests
    clock: Clock

    def request(self, keep: RetentionPolicy, world: World) -> SaveRequest:
        """Collective: returns the metadata of a checkpoint of the current step, and which older checkpoints to keep."""
        decided, training = self.decided, self.training
        tokenizer = training.data.tokenizer
        meta = {
            "tokens": training.state.tokens,
            SECONDS: self.clock.seconds,
            "cursor": _merged_cursor(training.state.cursor, world),
            "anchors": anchors(decided.job),
            "layout": str(decided.topology.layout),
            "reduce": reduce_of(decided.plan),
            # The model is built from its section again, so a key of it that may not be a secret keeps its value.
            "config": {name: redacted(part, name, certain=name == "model") for name, part in decided.recipe.as_json().items()},
            "plugins": list(decided.plugins),
            "frozen": sorted(decided.optimizer.frozen(training.optimizer)),
            "health": self.health.state(),
            "hooks": states_of(self.hooks),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "tokenizer": None if tokenizer is None else tokenizer.fingerprint,
            **decided.origin,
        }
        return SaveRequest(training.state.step, meta, keep, self.health.spare(), dict(self.requests.marks))

    @contextmanager
    def pieces(self) -> Iterator[Sequence[Piece]]:
        """Inside, every tensor of a checkpoint: of model, optimizer and hooks."""
        model = self.training.model
        with model.averaged() as trained:
            of_hooks = (piece for _, _, piece in kept_by(self.hooks, model))
            yield (*pieces(model, self.training.optimizer, trained), *of_hooks)


def _merged_cursor(cursor: Cursor, world: World) -> dict[str, Any]:
    """Collective: returns one data position for all ranks. They differ only where each rank reads its own foreign loader."""
    if "foreign" not in cursor:
        return dict(cursor)
    parts = world.all_gather(json.dumps(cursor).encode())
    return dict(merge_cursors([json.loads(part) for part in parts]))


@dataclass
class Checkpoints:
    """The checkpoints of one run: which one to resume from, which one to go back to, and how state is restored.

    Attributes:
        store: where they are.
        world: the ranks that save and load together.
        keep: how many are kept, and which.
        present: names of the checkpoints that `newest` saw.
        fence: this job's mark in the store, once it owns the store.
        checked: the step whose values were last looked at.
    """

    store: Store
    world: World
    keep: RetentionPolicy
    present: Sequence[str] = ()
    fence: Fence | None = None
    checked: int = -1

    def newest(self, policy: read.ResumePolicy) -> read.VerifiedCheckpoint | None:
        """Collective: returns the checkpoint to resume from, verified; changes nothing while this job does not own the store."""
        self.present = self._committed()
        return read.newest(self.store, self.world, policy, aside=self.fence is not None)

    def own(self, store: Store) -> Fence:
        """Collective: takes the store from every older job.

        Args:
            store: the store of the run; a new one where `--fresh` has moved the directory of the old one.
        """
        self.store = store
        self.fence = Fence.take(self.store, self.world)
        return self.fence

    def tidy(self, checkpoint: read.VerifiedCheckpoint | None) -> None:
        """Collective: renames the damaged checkpoints that `newest` skipped; only the owner of the store may."""
        read.set_aside(self.store, self.world, checkpoint.skipped if checkpoint else ())

    def later(self, policy: read.ResumePolicy) -> read.VerifiedCheckpoint | None:
        """Collective: returns what `newest` finds now, if an older job has saved since `newest` was called; else None."""
        return self.newest(policy) if set(self._committed()) - set(self.present) else None

    def _committed(self) -> list[str]:
        return from_rank_0(self.world, lambda: [entry.name for entry in committed(self.store.list())])

    def check(self, content: RunContent) -> None:
        """Collective: checks that every value of the state is finite, once per step.

        Raises:
            TrainingError: a parameter or the optimizer's state is not finite.
        """
        training = content.training
        step = training.state.step
        if self.checked == step:
            return
        if fault := not_finite(_learned(training.model, training.optimizer), content.decided.topology):
            raise TrainingError(
                f"after step {step} {fault.name} has non-finite values (first seen on rank {fault.rank}); "
                f"this state is not saved. Lower the learning rate or check the data. {self.advice(content.health)}"
            )
        self.checked = step

    def good(self, health: Health, just: bool = False) -> read.VerifiedCheckpoint | None:
        """Collective: returns the newest verified checkpoint from before the loss left its band (`Health.is_before`)."""
        return read.newest_that(self.store, self.world, lambda manifest: _is_good(manifest, health, just))

    def good_step(self, health: Health) -> int | None:
        """Collective: returns the step that a run goes back to: the newest from before the loss left its band, else the step
        just before; None if there is no such checkpoint."""
        checkpoint = self.good(health) or self.good(health, just=True)
        return None if checkpoint is None else checkpoint.step

    def advice(self, health: Health) -> str:
        """Collective: returns how the user can go on after a failure, in one sentence."""
        names = self._committed()
        checkpoint = self.good(health)
        if checkpoint is None:
            return "No usable checkpoint is left; start over with --fresh"
        step = checkpoint.step
        if checkpoint.name == names[0]:
            return f"Start the run again to resume from step {step}, its newest checkpoint; its loss was in the expected band"
        return (
            f"Resume from step {step} with --checkpoint.resume={step}: this is the newest verified checkpoint "
            "with the loss in the expected band"
        )

    def restore(
        self, checkpoint: read.VerifiedCheckpoint, model: ParallelModel, optimizer: Optimizer, spec: OptimizerSpec
    ) -> Mapping[str, Any]:
        """Collective: fills model and optimizer from a verified checkpoint and returns its metadata.

        Parameters that were frozen and are trained from now on get the state of a new optimizer. State of parameters that are
        frozen from now on is left out.

        Raises:
            CheckpointError: the checkpoint does not fit the model.
        """
        if callable(tell := getattr(optimizer, "at_step", None)):
            tell(checkpoint.step)
        begins, ends = _changed_frozen(checkpoint.meta, spec.frozen(optimizer))
        with model.averaged() as trained:
            mine = [piece for piece in pieces(model, optimizer, trained) if _of(piece.name) not in begins]
            count = torch.zeros((), dtype=torch.int64)
            if older := ONE_COUNT in checkpoint.manifest.index:
                mine = [piece for piece in mine if not piece.name.startswith("optimizer/step/")]
                mine.append(Piece(ONE_COUNT, (), (), count, owned=False))
            select = lambda name: _is_of_run(name) and _of(name) not in ends  # noqa: E731 (a condition on names)
            meta = read.load(self.store, checkpoint, mine, self.world, select=select)
            if older:
                for step in optimizer.state()["step"].values():
                    step.copy_(count)
            for name, tensor in model.parameters_held():
                if name in begins and name in trained:  # it was frozen, so the evaluated weights are the trained ones
                    local_box(trained[name]).local.copy_(local_box(tensor).local)
        _begin(model, optimizer, spec, begins)
        if fault := not_finite(_learned(model, optimizer), model.topology):
            raise CheckpointError(
                f"{checkpoint.name} cannot be resumed: {fault.name} has non-finite values. {self.advice(Health())}"
            )
        return meta

    def restore_hooks(self, checkpoint: read.VerifiedCheckpoint, hooks: Sequence[Hook], model: ParallelModel) -> None:
        """Collective: fills the tensors of hooks, as far as the checkpoint has their section.

        Raises:
            CheckpointError: a section has other tensors.
        """
        stored = {info.name.partition("/")[0] for info in checkpoint.manifest.tensors}
        kept = [(section, piece) for section, _, piece in kept_by(hooks, model) if section in stored]
        sections = {section for section, _ in kept}
        if self.world.size > 1:  # a pipeline stage may have no trained parameter
            sections = {
                section for part in self.world.all_gather(json.dumps(sorted(sections)).encode()) for section in json.loads(part)
            }
        if sections:
            select = lambda name: name.partition("/")[0] in sections  # noqa: E731 (a condition on names)
            read.load(self.store, checkpoint, [piece for _, piece in kept], self.world, select=select)


class Restoration:
    """The weights of a checkpoint, for `forge_parallel.model.realize.realize`: builds the optimizer and restores both.

    Attributes:
        optimizer: the restored optimizer.
        facts: metadata of the checkpoint.
    """

    optimizer: Optimizer
    facts: Mapping[str, Any]

    def __init__(
        self,
        checkpoints: Checkpoints,
        checkpoint: read.VerifiedCheckpoint,
        spec: OptimizerSpec,
        base: FrozenBase | None = None,
    ) -> None:
        self._checkpoints, self._checkpoint, self._spec, self._base = checkpoints, checkpoint, spec, base

    def __call__(self, model: ParallelModel) -> None:
        """Collective: fills a model whose memory is allocated. The base of an adapter is read from where it is."""
        if self._base is not None:
            self._base.fill(model)
        self.optimizer = self._spec.build(model)
        self.facts = self._checkpoints.restore(self._checkpoint, model, self.optimizer, self._spec)


def changed_training(meta: Mapping[str, Any], frozen: frozenset[str]) -> Iterator[str]:
    """Yields a line for the parameters that were frozen in a checkpoint and are not now, and one for the opposite."""
    begins, ends = _changed_frozen(meta, frozen)
    if begins:
        yield f"trained from now on, without optimizer state at first: {', '.join(sorted(begins))}"
    if ends:
        yield f"frozen from now on, their optimizer state is dropped: {', '.join(sorted(ends))}"


def _changed_frozen(meta: Mapping[str, Any], frozen: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the parameters that are trained from now on, and those that no longer are."""
    before = frozenset(meta.get("frozen", ()))
    return before - frozen, frozen - before


def _begin(model: ParallelModel, optimizer: Optimizer, spec: OptimizerSpec, names: frozenset[str]) -> None:
    """Gives some parameters the state of a new optimizer."""
    if names.isdisjoint(name for name, _ in model.parameters_held()):
        return
    # In a run of stages, the new optimizer has the settings of the stage that trains these parameters.
    new = spec.build(Beginning(model, names), getattr(optimizer, "stage_settings", None))
    for state, tensors in new.state().items():
        for name, tensor in tensors.items():
            local_box(optimizer.state()[state][name]).local.copy_(local_box(tensor).local)


HookState = tuple[str, Any]


def build_hooks(recipe: Recipe, registry: Registry) -> list[Hook]:
    """The hooks of a recipe, each with the key of its state."""
    hooks: list[Hook] = []
    for index, component in enumerate(recipe.job.hooks):
        hook = component.build()
        hook.state_key = _registered(registry.find(*recipe.outcome.chosen[f"hooks.{index}"]))
        hooks.append(hook)
    return hooks


def states_of(hooks: Sequence[Hook]) -> list[HookState]:
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
    """Gives each hook the first state under its key, or a former one, that is left; a hook without one starts anew.

    Forge's hooks were once called `EmaHook` and so on, and the first checkpoints have their states under these names.

    Returns:
        The keys of the states that no hook took and that hold something.
    """
    left: list[HookState] = [(key, state) for key, state in saved]
    for hook in hooks:
        class_name = type(hook).__name__
        names = (hook.state_key, *hook.former_keys, class_name, f"{class_name}Hook")
        found = next((item for name in names for item in left if item[0] == name), None)
        if found:
            left.remove(found)
            hook.load_state(found[1])
    return [key for key, state in left if state]


def _registered(entry: Entry) -> str:
    """`forge-train:evaluate`; `mine.py:Largest` for a class in a file, wherever the file lies."""
    return f"{entry.distribution}:{entry.name.rpartition(':')[2]}"
