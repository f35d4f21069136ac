"""What single heads do."""

import torch
from torch import Tensor, nn

from forge_models.interp.listing import InterpError
from forge_models.interp.qk import capture_qk


@torch.no_grad()
def induction_scores(model: nn.Module, tokens: Tensor) -> Tensor:
    """(layers, heads): how much attention goes from a token of the second copy to the one behind its first occurrence
    (Olsson et al., 2022), averaged over rows and positions.

    Args:
        tokens: (B, 2 n): each row is a sequence of n random tokens, twice.

    Raises:
        InterpError: a row is not a sequence twice.
    """
    half = tokens.shape[1] // 2
    if tokens.shape[1] != 2 * half or not torch.equal(tokens[:, :half], tokens[:, half:]) or half < 2:
        raise InterpError("induction is measured on rows that are a sequence of tokens twice, such as torch.cat((x, x), 1)")
    with capture_qk(model) as kept:
        model(tokens)
    queries = torch.arange(half, 2 * half)
    found = []
    for layer in kept.layers:
        pattern = kept.pattern(layer, queries=queries.tolist())
        keys = (queries - half + 1).to(pattern.device).expand(*pattern.shape[:2], -1).unsqueeze(3)
        found.append(pattern.gather(3, keys).mean((0, 2, 3)))
    return torch.stack(found)
