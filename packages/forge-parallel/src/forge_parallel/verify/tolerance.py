"""How far a layout may be from one process. Torch-free: `check` holds receipts to it."""

import math
from collections.abc import Mapping
from types import MappingProxyType

TOLERANCE = MappingProxyType({"fp64": 1e-10, "fp32": 2e-6, "bf16": 2**-6})
"""Largest accepted error relative to the largest element of the tensor, by the format of the state. Gradients that are kept
in bf16 are rounded once a micro-batch, by 2^-9 each time, so that format can only be held to a few of these; its loss is
held to fp32's."""


def within(errors: Mapping[str, float], state: str) -> bool:
    """Whether `loss`, `norm`, `gradients` and, in fp64, `weights` are close enough; what is absent or unknown is not."""
    limit = TOLERANCE.get(state, -1.0)
    compared = ("norm", "gradients", *(["weights"] if state == "fp64" else []))
    loss = errors.get("loss", math.inf) <= min(limit, TOLERANCE["fp32"])
    return loss and all(errors.get(name, math.inf) <= limit for name in compared)
