"""The content of the stored checkpoints, as a formula: none of it was read from them.

The bytes are compared with those that another machine wrote, so every operation here is exact or correctly rounded by IEEE 754
(integers, division, `math.sqrt`). `torch.sqrt` is not: in fp64, Intel's MKL is off by one unit in the last place for some
numbers.
"""

import math
from typing import Any

import torch

META: dict[str, Any] = {"tokens": 12345678901234567, "rate": 0.1, "name": "naïve", "list": [1, None, True], "nested": {"a": {}}}


def full() -> dict[str, torch.Tensor]:
    """Every number format that a run has, and a scalar; rank 0 of 2 wrote the first half of the rows, rank 1 the others."""
    rows = torch.arange(40, dtype=torch.float64).reshape(8, 5)
    roots = torch.tensor([math.sqrt(number) for number in range(40)], dtype=torch.float64)
    return {
        "model/table.weight": (rows / 7).float(),
        "model/head.weight": (rows - 20).bfloat16(),
        "optimizer/exp_avg/table.weight": roots.reshape(8, 5),
        "optimizer/step/all": torch.tensor(7, dtype=torch.int64),
        "hooks/mask": rows % 3 == 0,
        "hooks/bytes": rows.to(torch.uint8),
    }
