"""A layer of experts that tokens enter by score: as many as choose each of them, and not k for every token."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.protocols.model import ExpertDispatcher
from forge_core.specs import Init, ModuleSpec, TensorSpec
from forge_models.autograd import attach
from forge_models.blocks.layers import STREAM, unfilled
from forge_models.blocks.moe.dispatch import LocalDispatch
from forge_models.blocks.moe.experts import Experts
from forge_models.inner_values import tap
from forge_models.shape import BlockContext, MoEShape


class ScoredExperts(nn.Module):
    """sum over the experts e that a token is with of sigmoid(W x)_e * expert_e(x); a token that is with none passes.

    A `forge_core.protocols.model.Observer` like `ExpertLayer`. Subclasses say in `choose` who is with whom.
    """

    takes_sequences = True

    def __init__(self, shape: MoEShape, mlp: Any, context: BlockContext) -> None:
        super().__init__()
        self.shape, self.context = shape, context
        self.weight = unfilled(shape.experts, context.dim)
        widths = {**vars(context), "ffn_dim": shape.ffn_dim}
        self.experts = Experts(BlockContext(**widths), shape.experts, mlp.activation, mlp.gated, shape.kernel)
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
        """(1, n, dim) -> ((1, n, dim), what `observe` takes; None in evaluation).

        Args:
            x: tokens of one modality, in their order.
            token_mask: (1, n) False for padding, which no expert sees.
            tokens: not read.
            cached: not read: who is with whom in evaluation depends on each token alone.
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
        """(chosen (n, experts) bool, a loss (n, experts) with its graph or None, what evaluation would choose (n, experts) bool,
        None where that is `chosen`). Padding is masked by the caller."""
        raise NotImplementedError

    def counted(self, logits: Tensor, token_mask: Tensor | None) -> list[Tensor]:
        """Further statistics, (k,) fp64 each, sums over tokens."""
        del logits, token_mask
        return []

    def width(self) -> int:
        """Length of the vector of statistics."""
        return self.shape.experts + 2

    def observe(self, router_stats: Tensor) -> None:
        """Adds the statistics of a forward to this step's sum."""
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
        """See `Observer`: `load` of each expert in units of their mean, and its extremes; `used`, experts of a token;
        `agreement`, the share of decisions that evaluation would make alike."""
        if self._totals is None:
            return {}
        count = self.shape.experts
        load, (tokens, agree) = self._totals[:count], self._totals[count : count + 2]
        relative, tokens = load / load.mean().clamp(min=1e-9), tokens.clamp(min=1)
        found = {"load": relative, "load_max": relative.max(), "load_min": relative.min()}
        return found | {"used": load.sum() / tokens, "agreement": agree / (tokens * count)}

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """The matrix of scores; experts have their own."""
        return {"weight": TensorSpec((None, "embed"), Init("normal", self.context.init_std), "router")}

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Layout of the hidden states, and of the tensors that enter with them."""
        return {"": ModuleSpec((STREAM, STREAM[:2], STREAM[:2]), (STREAM,))}
