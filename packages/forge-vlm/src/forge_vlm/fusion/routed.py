"""MoMa: shared attention and one group of experts per modality (Lin et al., 2024), with three kinds of routing.

`token_choice` is the routing of text models. With the others the number of experts of a token varies: in `expert_choice` each
expert takes the tokens that it scores highest; with `threshold` it takes those above its threshold, which follows the scores.
"""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.protocols.model import ExpertDispatcher
from forge_core.specs import Init, ModuleSpec, TensorSpec
from forge_models.autograd import attach
from forge_models.blocks.layers import STREAM, unfilled
from forge_models.blocks.moe.dispatch import LocalDispatch
from forge_models.blocks.moe.experts import Experts
from forge_models.blocks.moe.layer import ExpertLayer
from forge_models.inner_values import tap
from forge_models.shape import BlockContext, DecoderShape, MoEShape
from forge_vlm.context import FusionContext
from forge_vlm.fusion.fusion import FusionBase, Inputs
from forge_vlm.fusion.modalities import ModalityBlock, ModalityGroups

SCORE_STEPS = 4096
"""Scores are compared in steps of 1 / SCORE_STEPS, so that the earlier of two equal tokens, such as a repeated first word, is
selected in every layout, whatever the rounding."""
SCORE_BINS = 512
"""Number of bins of the histogram of scores between 0 and 1."""
Routing = Literal["token_choice", "expert_choice", "threshold"]


class MoMaFusion(FusionBase):
    """A fusion whose blocks have one group of experts per modality."""

    def __init__(self, context: FusionContext, *, routing: Routing = "token_choice", rate: float = 0.05) -> None:
        super().__init__(context)
        self.routing: Routing = routing
        self.rate = rate

    def block(self, shape: DecoderShape, layer: int) -> nn.Module:
        """See `Fusion`."""
        layers: dict[Routing, Any] = {
            "token_choice": ExpertLayer,
            "expert_choice": ExpertChoice,
            "threshold": partial(ThresholdRouting, rate=self.rate),
        }
        return ModalityBlock(shape, layer, self.context.modalities.names, untied=False, experts=layers[self.routing])

    def shared(self, inputs: Inputs) -> dict[str, Any]:
        """Returns the positions of each modality's tokens."""
        modalities = self.context.modalities
        return {"groups": ModalityGroups.of(modalities.of(inputs.tokens), len(modalities.names))}


class ExpertsByScore(nn.Module):
    """sum over the experts e that select a token of sigmoid(W x)_e * expert_e(x). Tokens that no expert selects pass through
    unchanged.

    A `forge_core.protocols.model.Observer` like `ExpertLayer`. Subclasses decide in `choose` which expert takes which token.
    """

    takes_sequences = True

    def __init__(self, shape: MoEShape, mlp: Any, context: BlockContext) -> None:
        super().__init__()
        self.shape, self.context = shape, context
        self.weight = unfilled(shape.experts, context.dim)
        widths = {**vars(context), "ffn_dim": shape.ffn_dim}
        self.experts = Experts(
            BlockContext(**widths), shape.experts, mlp.activation, mlp.gated, shape.kernel, getattr(mlp, "bias", False)
        )
        self.dispatch: ExpertDispatcher = LocalDispatch()
        self._scale: Tensor | None = None
        self._found: Tensor | None = None
        self._totals: Tensor | None = None

    def forward(
        self,
        x: Tensor,
        token_mask: Tensor | None = None,
        tokens: Tensor | None = None,
        cached: bool = False,
        sequences: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(1, n, dim) -> ((1, n, dim), statistics for `observe`; None in evaluation).

        Args:
            x: tokens of one modality, in their order.
            token_mask: (1, n) False for padding, which no expert takes.
            tokens: not used.
            cached: not used, because in evaluation the choice for a token depends only on that token.
            sequences: (1, n) int64, ascending: the sequence of each token.
        """
        del tokens, cached
        assert sequences is not None
        flat, count = x.flatten(0, -2), self.shape.experts
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = tap("router.logits", F.linear(flat.to(wide), self.weight.to(wide)))
        chosen, loss, in_evaluation = self.choose(flat, logits, sequences.flatten())
        if token_mask is not None:
            chosen = chosen & token_mask.flatten().unsqueeze(1)
        every = torch.arange(count, device=x.device).expand_as(chosen)
        experts = every.masked_fill(~chosen, -1)
        y = self.dispatch(flat, experts, logits.sigmoid(), self.experts, count).view_as(x)
        if not self.training:
            return y, None
        if loss is not None:
            loss = loss.sum(1) if token_mask is None else loss.sum(1) * token_mask.flatten()
            y = attach(y, loss.sum(), self._scale)
        with torch.no_grad():
            load = chosen.sum(0).double()
            seen = load.new_full((1,), len(flat)) if token_mask is None else token_mask.sum().double().view(1)
            agree = seen * count
            if in_evaluation is not None:
                same = chosen == in_evaluation
                agree = (same if token_mask is None else same & token_mask.flatten().unsqueeze(1)).sum().double().view(1)
            rest = [agree, *self.counted(logits, token_mask)]
            return y, torch.cat([load, seen, *rest])

    def choose(self, x: Tensor, logits: Tensor, sequences: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the choice (n, experts) bool; a loss (n, experts) with its graph, or None; and the choice that evaluation would
        make, or None if it is the same. The caller masks padding."""
        raise NotImplementedError

    def counted(self, logits: Tensor, token_mask: Tensor | None) -> list[Tensor]:
        """Returns further statistics, (k,) fp64 each, as sums over tokens."""
        del logits, token_mask
        return []

    def width(self) -> int:
        """Length of the vector of statistics."""
        return self.shape.experts + 2

    def observe(self, router_stats: Tensor) -> None:
        """Adds the statistics of a forward to the sum of this step."""
        router_stats = router_stats.detach()
        self._found = router_stats if self._found is None else self._found + router_stats

    def before_step(self, scale: Tensor) -> None:
        """See `Observer`."""
        self._scale, self._found = scale, None

    def statistics(self) -> Tensor:
        """See `Observer`."""
        if self._found is None:
            return torch.zeros(self.width(), dtype=torch.float64, device=self.weight.device)
        return self._found

    @torch.no_grad()
    def after_step(self, totals: Tensor, skip: Tensor) -> None:
        """See `Observer`."""
        del skip
        self._found, self._totals = None, totals

    def report(self) -> dict[str, Tensor]:
        """See `Observer`: `load` of each expert relative to the mean, and its extremes; `used`, the mean number of experts of a
        token; `agreement`, the share of decisions that evaluation would make too."""
        if self._totals is None:
            return {}
        count = self.shape.experts
        load, (tokens, agree) = self._totals[:count], self._totals[count : count + 2]
        relative, tokens = load / load.mean().clamp(min=1e-9), tokens.clamp(min=1)
        numbers = {"load": relative, "load_max": relative.max(), "load_min": relative.min()}
        return numbers | {"used": load.sum() / tokens, "agreement": agree / (tokens * count)}

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the matrix of scores; experts have their own specs."""
        return {"weight": TensorSpec((None, "embed"), Init("normal", self.context.init_std), "router")}

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the layout of the hidden states and of the tensors that accompany them."""
        return {"": ModuleSpec((STREAM, STREAM[:2], STREAM[:2]), (STREAM,))}


def choose_by_expert(scores: Tensor, sequences: Tensor) -> Tensor:
    """Returns the choice (n, experts) bool: each expert takes the ceil(s / experts) tokens with the highest scores of a sequence
    of s tokens; of equal scores, the earlier token. Sequences do not compete with each other.

    Args:
        scores: (n, experts) scores.
        sequences: (n,) int64 sequence of each token, ascending.
    """
    tokens, count = scores.shape
    by_score = (scores * SCORE_STEPS).round().argsort(dim=0, descending=True, stable=True)
    order = by_score.gather(0, sequences[by_score].argsort(dim=0, stable=True))
    # `sequences` is ascending, so position p of the sorted order belongs to the sequence of token p.
    first = torch.searchsorted(sequences, sequences)
    size = torch.searchsorted(sequences, sequences, right=True) - first
    rank = torch.arange(tokens, device=scores.device) - first
    taken = rank < -(-size // count)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(0, order, taken.unsqueeze(1).expand_as(order))


class ExpertChoice(ExpertsByScore):
    """In training each expert takes the tokens that it scores highest (Zhou et al., 2022; MoMa, 2024, 2.2).

    This is not causal, because the choice depends on later tokens; it cannot be used for autoregressive decoding. In evaluation a
    second router chooses, which sees one token at a time and is trained to predict the choice. It reads detached inputs, so it
    does not affect the training of the model.
    """

    def __init__(self, shape: MoEShape, mlp: Any, context: BlockContext) -> None:
        super().__init__(shape, mlp, context)
        self.foresight = unfilled(shape.experts, context.dim)
        self.foresight_bias = unfilled(shape.experts)

    def choose(self, x: Tensor, logits: Tensor, sequences: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See `ExpertsByScore`; the loss is the cross-entropy of each predicted decision."""
        foreseen = F.linear(x.detach().to(logits.dtype), self.foresight.to(logits.dtype), self.foresight_bias.to(logits.dtype))
        if not self.training:
            return foreseen > 0, None, None
        chosen = choose_by_expert(logits.detach(), sequences)
        loss = F.binary_cross_entropy_with_logits(foreseen, chosen.to(foreseen.dtype), reduction="none")
        return chosen, loss, foreseen > 0

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the matrix of scores and the second router."""
        foresight = TensorSpec((None, "embed"), Init("normal", self.context.init_std), "router")
        return {**super().tensor_specs(), "foresight": foresight, "foresight_bias": TensorSpec((None,), Init("zeros"), "vector")}


class ThresholdRouting(ExpertsByScore):
    """Each expert takes the tokens that it scores above its threshold (Expert Threshold routing, 2026).

    The threshold is a running mean of the score that 1 / experts of a step's tokens exceed, so an expert gets an equal share on
    average. The choice for a token depends only on that token, in training and in evaluation. Scores of a step are counted in
    `SCORE_BINS` bins over all ranks, so the threshold does not depend on the layout or the micro-batches.
    """

    threshold: Tensor

    def __init__(self, shape: MoEShape, mlp: Any, context: BlockContext, *, rate: float = 0.05) -> None:
        super().__init__(shape, mlp, context)
        self.rate = rate
        self.register_buffer("threshold", torch.full((shape.experts,), torch.nan))

    def choose(self, x: Tensor, logits: Tensor, sequences: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See `ExpertsByScore`. The buffer holds the threshold minus 1/2, the score of an untrained router."""
        del x, sequences
        chosen = logits.detach().sigmoid() > self.threshold + 0.5
        return chosen, None, None

    def counted(self, logits: Tensor, token_mask: Tensor | None) -> list[Tensor]:
        """Returns the histogram of each expert's scores."""
        bins = (logits.sigmoid() * SCORE_BINS).long().clamp(max=SCORE_BINS - 1)
        ones = torch.ones_like(bins, dtype=torch.float64)
        if token_mask is not None:
            ones = ones * token_mask.flatten().unsqueeze(1)
        counts = torch.zeros(SCORE_BINS, bins.shape[1], dtype=torch.float64, device=bins.device).scatter_add_(0, bins, ones)
        return [counts.flatten()]

    def width(self) -> int:
        """See `ExpertsByScore`."""
        return super().width() + SCORE_BINS * self.shape.experts

    @torch.no_grad()
    def after_step(self, totals: Tensor, skip: Tensor) -> None:
        """See `Observer`."""
        super().after_step(totals, skip)
        counts = totals[super().width() :].view(SCORE_BINS, -1)
        upper = histogram_quantile(counts, 1 - 1 / self.shape.experts).to(self.threshold.dtype) - 0.5
        moved = self.threshold + self.rate * (upper - self.threshold)
        still = (skip > 0) | (counts.sum(0) == 0)
        self.threshold.copy_(torch.where(still, self.threshold, moved))

    def _apply(self, fn: Any, recurse: bool = True) -> "ThresholdRouting":
        """Keeps the threshold in fp32 or wider if parameters become bf16, which would lose its small updates."""
        kept = self.threshold
        super()._apply(fn, recurse)
        if torch.finfo(self.threshold.dtype).bits < torch.finfo(kept.dtype).bits:
            self.threshold = kept.to(self.threshold.device, torch.promote_types(self.threshold.dtype, torch.float32))
        return self

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the matrix of scores and the threshold."""
        return super().tensor_specs() | {"threshold": TensorSpec((None,), Init("zeros"), "vector")}


def histogram_quantile(counts: Tensor, share: float) -> Tensor:
    """Returns the (experts,) fp64 quantile `share` of values in [0, 1], from (bins, experts) counts in equal bins. Values are
    assumed to be uniform within a bin."""
    bins = len(counts)
    total = counts.cumsum(0)
    wanted = share * total[-1]
    place = (total < wanted).sum(0).clamp(max=bins - 1)
    at = place.unsqueeze(0)
    before = total.gather(0, at)[0] - counts.gather(0, at)[0]
    inside = ((wanted - before) / counts.gather(0, at)[0].clamp(min=1)).clamp(0, 1)
    return (place + inside) / bins
