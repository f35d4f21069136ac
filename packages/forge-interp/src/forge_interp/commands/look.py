"""Measures statistics of rows by layer during training, in one forward without gradients."""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forge_core.batch import Batch
from forge_core.protocols.run import Step
from forge_interp.attention_scores import AttentionScores, rule_of
from forge_interp.commands.ranks import capture_sharded
from forge_interp.tap_names import layer_of, taps
from forge_models.inner_values import is_from, listening
from forge_parallel.model.parallel_model import ParallelModel

STREAM = "residual_after"
EXPERTS = "router.experts"


class Look(NamedTuple):
    """Statistics by path of a block, such as `blocks.0`.

    Attributes:
        streams: (tokens, dim) output stream of the block for the chosen tokens, or (tokens, streams * dim) of several residual
            streams; the same on all ranks.
        experts: (tokens, top_k) selected experts of the same tokens, if the block has a router.
        lens: mean loss of the model's head on the stream, in nats per token with a label.
        attention: (sum of entropies in nats, their number, largest score) of this rank's heads.
    """

    streams: dict[str, Tensor]
    experts: dict[str, Tensor]
    lens: dict[str, float]
    attention: dict[str, tuple[float, float, float]]


def look(
    model: ParallelModel, whole: nn.Module, step: Step, batch: Batch, statistics: Collection[str], places: Sequence[int]
) -> Look:
    """Collective: evaluates a batch that is the same on all data ranks. The state of the run does not change.

    Args:
        whole: the model on the meta device, see `capture_sharded`.
        statistics: any of `cka`, `effective_rank`, `attention`, `lens`, `routing`.
        places: positions of each row to compare, and to measure the attention of.
    """
    inside = [name for name, one in taps(whole).items() if layer_of(name) is not None and not one.partial]
    streams = [name for name in inside if name.endswith(f".{STREAM}") and {"cka", "effective_rank"} & set(statistics)]
    routers = [name for name in inside if name.endswith(f".{EXPERTS}") and "routing" in statistics]
    local = _Local(model, statistics, list(places))
    with ExitStack() as stack:
        seen = None
        if streams or routers:
            seen = stack.enter_context(capture_sharded(model, whole, [*streams, *routers], positions=list(places), alike=True))
        stack.enter_context(listening(local.hear))
        for part in model.parts:
            stack.callback(part.register_forward_pre_hook(local.before, with_kwargs=True).remove)
        step.evaluate([batch])
    found = {} if seen is None else {name: seen[name] for name in seen}
    return Look(
        {_block(name): found[name].flatten(1) for name in streams},
        {_block(name): found[name] for name in routers},
        _means(model, local.losses),
        local.attention,
    )


class _Local:
    """Computes the statistics of this rank while its blocks run; keeps values no longer than one block."""

    def __init__(self, model: ParallelModel, statistics: Collection[str], places: list[int]) -> None:
        self.model, self.statistics, self.places = model, statistics, places
        self.losses: dict[str, Tensor] = {}
        self.attention: dict[str, tuple[float, float, float]] = {}
        self.given: dict[str, Any] = {}
        self.queries: Tensor | None = None

    def before(self, _part: nn.Module, _args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """Forward pre-hook of a part, which records labels, objective and documents of the forward."""
        self.given = given

    def hear(self, name: str, x: Tensor) -> None:
        """Receives one inner value of this rank."""
        layer = layer_of(name)
        part: Any = next((part for part in self.model.parts if is_from(part)), None)
        if layer is None or part is None:
            return
        if "lens" in self.statistics and name.endswith(f".{STREAM}"):
            terms = part.head(part.norm(x), self.given["labels"], self.given["objective"])
            self.losses[_block(name)] = torch.stack([terms.sum.double(), terms.tokens.double()])
        if "attention" in self.statistics and name.endswith(".attention.q"):
            self.queries = x
        if "attention" in self.statistics and name.endswith(".attention.k"):
            assert self.queries is not None
            kept = {f"blocks.{layer}.attention.q": self.queries, f"blocks.{layer}.attention.k": x}
            scores = AttentionScores(
                {layer: rule_of(part, layer)}, kept, self.given.get("documents"), self.given.get("token_mask")
            )
            entropy = scores.entropy(layer, queries=self.places)
            largest = scores.max_logit(layer, queries=self.places).amax()
            known = entropy[entropy.isfinite()]  # entropies of padding are NaN
            self.attention[_block(name)] = (float(known.sum()), float(known.numel()), float(largest))
            self.queries = None


def _means(model: ParallelModel, losses: dict[str, Tensor]) -> dict[str, float]:
    if not losses:
        return {}
    sums = model.topology.all_reduce(torch.stack(list(losses.values())))  # ranks with the same rows weigh the same
    return {name: (total / count.clamp(min=1)).item() for name, (total, count) in zip(losses, sums, strict=True)}


def _block(name: str) -> str:
    return ".".join(name.split(".")[:2])
