"""From logits to a token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from forge_core.errors import ForgeError


class GenerationError(ForgeError):
    """Prompts or settings from which nothing can be generated."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen; by default the most likely one.

    The cuts apply in the order of the fields, each to what the one before it left, and what is left is drawn by its
    share.

    Attributes:
        repetition_penalty: tokens of the prompt and of the row so far get less likely (above 1) or more (below).
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: draw among the k most likely tokens only.
        top_p: then among the fewest of these that hold this probability together.
        min_p: then among those at least this fraction as likely as the most likely one.
        seed: of the draws. Row r of a batch of n gets the same draws for any other rows.

    Raises:
        GenerationError: a setting is out of range.
    """

    repetition_penalty: float = 1.0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        # Written so that not-a-number is refused too.
        if not self.repetition_penalty > 0:
            raise GenerationError(f"repetition_penalty {self.repetition_penalty} must be above 0")
        if not self.temperature >= 0:
            raise GenerationError(f"temperature {self.temperature} must be at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise GenerationError(f"top_k {self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise GenerationError(f"top_p {self.top_p} must be in (0, 1]")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise GenerationError(f"min_p {self.min_p} must be in [0, 1]")

    def penalized(self, logits: Tensor, seen: Tensor) -> Tensor:
        """Logits (B, vocab) in fp32; of the tokens that `seen` (B, vocab) marks, positive ones are divided by the
        repetition penalty and negative ones multiplied (Keskar et al., 2019)."""
        wide = logits.float()
        return torch.where(seen, torch.where(wide < 0, wide * self.repetition_penalty, wide / self.repetition_penalty), wide)

    def distribution(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """What is drawn from, for a temperature above 0: probabilities in descending order and their tokens, (B, vocab)
        or (B, top_k) each, fp64 on the CPU."""
        scaled = logits.detach().cpu().double() / self.temperature
        size = scaled.shape[-1] if self.top_k is None else min(self.top_k, scaled.shape[-1])
        best, tokens = scaled.topk(size, dim=-1)
        probabilities = best.softmax(dim=-1)
        if self.top_p is not None:
            # A token stays when those before it hold less than top_p: the first always does.
            before = probabilities.cumsum(dim=-1) - probabilities
            probabilities = probabilities.where(before < self.top_p, 0.0)
        if self.min_p is not None:
            probabilities = probabilities.where(probabilities >= self.min_p * probabilities[:, :1], 0.0)
        if self.top_p is not None or self.min_p is not None:
            probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        return probabilities, tokens


GREEDY = Sampling()
"""The most likely token."""


class Sampler:
    """Chooses tokens, one of each row a call.

    A call draws one number per row on the CPU and inverts the cumulative distribution in fp64: the same tokens on every
    device that computes the same logits.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """(B, vocab) -> (B,) int64 on the CPU. `seen` (B, vocab) marks the tokens that a repetition penalty is for."""
        if seen is not None:
            logits = self.sampling.penalized(logits, seen)
        if self.sampling.temperature == 0:
            return logits.argmax(dim=-1).cpu()
        probabilities, tokens = self.sampling.distribution(logits)
        draws = torch.rand(logits.shape[0], 1, generator=self._generator, dtype=torch.float64)
        cumulative = probabilities.cumsum(dim=-1)
        # Scaled by the sum as it came out, so that rounding never points past the last token that can be drawn.
        place = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
        last = (probabilities > 0).sum(dim=-1, keepdim=True) - 1
        return tokens.gather(1, place.minimum(last)).squeeze(1)
