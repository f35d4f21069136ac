"""From logits to a token."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Sampler:
    """Greedy at temperature 0, else a draw from softmax(logits / temperature) cut to `top_k`, then `top_p`, then `min_p`.

    Each call draws one number per row on the CPU and inverts the cumulative distribution in fp64: the same tokens on
    every device that computes the same logits.

    Raises:
        ValueError: for settings out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    _generator: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature {self.temperature} must be at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} must be in (0, 1]")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p {self.min_p} must be in [0, 1]")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty {self.repetition_penalty} must be above 0")
        self._generator = torch.Generator().manual_seed(self.seed)

    def __call__(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """(B, vocab) -> (B,) int64 on the CPU. `seen` (B, vocab) marks tokens that the repetition penalty makes less
        likely: positive logits are divided by it, negative ones multiplied (Keskar et al., 2019)."""
        if seen is not None:
            logits = logits.float()
            punished = torch.where(logits < 0, logits * self.repetition_penalty, logits / self.repetition_penalty)
            logits = torch.where(seen, punished, logits)
        if self.temperature == 0:
            return logits.argmax(dim=-1).cpu()
        probabilities, tokens = self.distribution(logits)
        draws = torch.rand(logits.shape[0], 1, generator=self._generator, dtype=torch.float64)
        cumulative = probabilities.cumsum(dim=-1)
        # Scaled by the sum as it came out, so that rounding never points past the last token that can be drawn.
        place = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
        last = (probabilities > 0).sum(dim=-1, keepdim=True) - 1
        return tokens.gather(1, place.minimum(last)).squeeze(1)

    def distribution(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities in descending order and their tokens, (B, vocab) or (B, top_k) each, fp64 on the CPU."""
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
