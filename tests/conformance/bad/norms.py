"""Norms that do not do what they have to."""

import torch

from conformance.modules import VECTOR, One, average, halves, infinite, neutral, noisy, unused
from conformance.part import Part


def allocates(dim):
    with torch.device("cpu"):
        return One(neutral, dim)


def narrow(weight, x, *rest):
    """Statistics in the dtype of the input."""
    return x / x.square().cumsum(-1)[..., -1:].sqrt() * weight.to(x.dtype)


BAD = {
    "check_specs": [
        (Part(make=lambda dim: One(neutral, dim, specs={})), "leave out weight"),
        (Part(make=lambda dim: One(neutral, dim, specs={"weight": VECTOR, "bias": VECTOR})), "not there: bias"),
        (Part(make=lambda dim: One(neutral, 1, dim, specs={"weight": VECTOR})), "has 2 dimensions, but its spec names 1"),
        (Part(make=allocates), "allocates memory for weight"),
        (Part(make=lambda dim: dim), "not a torch.nn.Module"),
    ],
    "check_rows": [
        (Part(make=lambda dim: One(average, dim)), "token 0 alone and in its row"),
        (Part(make=lambda dim: One(halves, dim)), "becomes"),
    ],
    "check_dtype": [
        (Part(make=lambda dim: One(lambda weight, x: x * weight, dim)), "bfloat16 becomes torch.float32"),
        (Part(make=lambda dim: One(narrow, dim)), "statistics belong in fp32"),
    ],
    "check_deterministic": [(Part(make=lambda dim: One(noisy, dim)), "other outputs the second time")],
    "check_gradients": [
        (Part(make=lambda dim: One(unused, dim)), "weight gets no gradient"),
        (Part(make=lambda dim: One(neutral, dim)), "gradient of weight is 0"),
        (Part(make=lambda dim: One(infinite, dim)), "gradient of weight is not finite"),
    ],
}
