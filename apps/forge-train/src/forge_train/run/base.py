"""The base and the adapter of a run with `[model.lora]`: opened and hashed by all ranks together, then read shard by shard."""

import json
from pathlib import Path
from typing import Any

import torch

from forge_core.errors import ForgeError
from forge_core.protocols.checkpoint import World
from forge_core.protocols.weights import Weights
from forge_core.registry import Registry
from forge_models.blocks.lora import MAGNITUDE
from forge_models.classification import HEAD, has_head
from forge_models.lora_weights import Parts, base_hash, check_hash, magnitudes_of, names_of, tensor_hash
from forge_models.quantized_weights import DequantizedWeights, QuantizedWeights
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.realize import initialize
from forge_train.formats.base import BASE, open_base
from forge_train.formats.converters import format_of
from forge_train.recipe.schema import Job


class FrozenBase:
    """The base of a run with an adapter.

    Attributes:
        weights: the base's weights, of which each rank reads its shards.
        identity: what checkpoints record of it (`forge_train.formats.base.BASE`).
        notes: notes on the base and on the adapter that the run starts from.
    """

    def __init__(self, job: Job, registry: Registry, world: World) -> None:
        """Collective: opens the base, and hashes it; each rank reads some of its tensors.

        Raises:
            ForgeError: there is no base, or it does not fit the model.
        """
        self._model: Any = job.model
        self._seed, self._registry = job.job.seed, registry
        self.weights = open_base(job.model, job.start, registry)
        labels = getattr(job.model, "labels", ())
        self._has_head = bool(labels) and has_head(labels, self.weights)
        names = names_of(job.model, self.weights)
        own = {
            name: tensor_hash(name, self.weights.tensors[name], self.weights.read([name])[name])
            for name in names[world.rank :: world.size]
        }
        hashes: dict[str, str] = {}
        for reply in world.all_gather(json.dumps(own).encode()):
            hashes |= json.loads(reply)
        self.identity = {"sha256": base_hash(hashes), "origin": self.weights.facts.origin, "tensors": len(names)}
        if (kind := self._model.lora.base_format) != "full":
            self.identity["format"] = kind
        origin = self.weights.facts.origin
        self.notes = [
            *(f"{origin}: {note}" for note in self.weights.facts.notes),
            f"base of the adapter: {origin}, {len(names)} tensors, sha256 {self.identity['sha256'][:12]}",
        ]

    def check(self, name: str, meta: Any) -> None:
        """Checks that the checkpoint `name` with the metadata `meta` has an adapter of this base.

        Raises:
            CheckpointError: it has one of another base.
        """
        if BASE in meta:
            check_hash(meta[BASE], self.identity["sha256"], name, self.weights.facts.origin)

    @torch.no_grad()
    def fill(self, model: ParallelModel) -> None:
        """Fills this rank's shards of the base."""
        full = self._model.lora.base_format == "full"
        weights = self.weights if full else QuantizedWeights(self.weights, self._model)
        held = set(weights.tensors)
        for name, tensor in model.tensors():
            if name in model.specs.base and name in held:
                piece = model.piece(name, tensor)
                if piece.local.numel():
                    piece.local.copy_(weights.box(name, piece.offset, tuple(piece.local.shape)))
        initialize(model, self._seed, [name for name in model.specs.base if name not in held])

    @torch.no_grad()
    def begin(self, model: ParallelModel) -> None:
        """Fills this rank's shards of the adapter for the first step: from `model.lora.from_adapter`, else as at the start of an
        adapter that changes nothing.

        Raises:
            ForgeError: the adapter that the run starts from does not fit.
        """
        initialize(model, self._seed, [name for name in model.specs.tensors if name not in model.specs.base])
        path = self._model.lora.from_adapter
        adapter = None if path is None else self._opened(path)
        parts = Parts(self._model)
        full = self._model.lora.base_format == "full"
        values = self.weights if full else DequantizedWeights(self.weights, self._model)
        for name, tensor in model.tensors():
            piece = model.piece(name, tensor)
            if name not in parts.adapter or not piece.local.numel():
                continue
            extent = tuple(piece.local.shape)
            if adapter is None and name == HEAD and self._has_head:
                piece.local.copy_(self.weights.box(name, piece.offset, extent))
            elif adapter is not None:
                piece.local.copy_(adapter.box(name, piece.offset, extent))
            elif name in parts.tuned:
                piece.local.copy_(self.weights.box(name, piece.offset, extent))
            elif name.endswith(MAGNITUDE):
                piece.local.copy_(magnitudes_of(values, name, piece.offset, extent))

    def _opened(self, path: str) -> Weights:
        kind = format_of(path)
        if kind not in ("peft", "forge"):
            raise ForgeError(f"model.lora.from_adapter: {path} is neither a folder of the peft library nor a run of Forge")
        if kind == "peft":
            from forge_models.hf.peft import PeftAdapter

            adapter: Weights = PeftAdapter(Path(path), self._model, self.weights.facts.family)
        else:
            from forge_ckpt.checkpoint.locate import locate
            from forge_train.formats.forge import ForgeWeights

            stored = ForgeWeights(locate(path), self._registry)
            if BASE not in stored.meta:
                raise ForgeError(f"model.lora.from_adapter: {stored.facts.origin} has no adapter; name a run with [model.lora]")
            self.check(stored.facts.origin, stored.meta)
            adapter = stored
        Parts(self._model).check_adapter(adapter)
        there, here = getattr(adapter.model, "lora", self._model.lora).base_format, self._model.lora.base_format
        if there != here:
            raise ForgeError(
                f"{adapter.facts.origin} was trained on a base in the format {there!r}, but [model.lora] has {here!r}; set "
                f"model.lora.base_format = {there!r}, or merge that adapter into its base, and train on the result"
            )
        if (other := getattr(adapter.model, "lora", None)) is not None and other.scaling != self._model.lora.scaling:
            raise ForgeError(
                f"{adapter.facts.origin} was trained with the scale {other.scaling:g} (alpha = {other.alpha:g}, rank = "
                f"{other.rank}), but [model.lora] has {self._model.lora.scaling:g}; set model.lora.alpha to {other.alpha:g} and "
                f"rank_stabilized to {str(other.rank_stabilized).lower()}"
            )
        self.notes.append(f"the adapter starts from {adapter.facts.origin}")
        return adapter
