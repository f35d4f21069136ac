"""fp32 matrix products of compiled graphs on a CPU, by oneDNN instead of the BLAS that torch otherwise calls.

torch gives bf16 products to oneDNN and fp32 ones to MKL, which reaches 60 to 85 % of the rate of oneDNN for large ones on
processors that are not Intel's (`benchmarks/LOG.md`). The compiler itself calls the same operator for the products of inference.
Its sums over 768 terms round to 1.1e-6 of a gradient's norm where MKL's round to 0.75e-6.
torch's FlopCounterMode counts 0 for them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

LEAST = 2**19
"""Elements of a right factor, a weight of a forward or of the gradient of an input, from which a product gains."""

LEAST_SUM = 2**20
"""Elements of the gradient of a weight from which it gains: its left factor is read by columns, which oneDNN first copies."""

ROWS = 32
"""Fewer rows are bound by reading the weight."""


def options(device: torch.device) -> dict[str, Any]:
    """What `torch.compile(options=)` needs for graphs on `device`; nothing where there is no MKL to replace."""
    if device.type != "cpu" or not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return {}
    return {"post_grad_custom_post_pass": ByOneDNN()}


@dataclass(frozen=True)
class ByOneDNN(CustomGraphPass):
    """The pass over a graph. All are equal, so blocks that are compiled with different ones share their graphs."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Replaces products in place."""
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
            if gains(*(factor.meta["val"] for factor in node.args)):
                node.target = torch.ops.forge_parallel.product.default

    def uuid(self) -> bytes:
        """Key of compiled graphs in the compiler's cache."""
        return get_hash_for_files((__file__,))


def gains(left: Tensor, right: Tensor) -> bool:
    """Whether left @ right is faster by oneDNN; for sizes that are known only when a graph runs, no."""
    if left.device.type != "cpu" or left.dtype != torch.float32:
        return False
    rows, inner, columns = *left.shape, right.shape[1]
    if not all(isinstance(size, int) for size in (rows, inner, columns, *left.stride(), *right.stride())):
        return False
    if 1 not in right.stride():
        return False
    if left.stride() == (inner, 1):
        return rows >= ROWS and inner * columns >= LEAST
    return left.stride() == (1, rows) and inner >= ROWS and rows * columns >= LEAST_SUM


@torch.library.custom_op("forge_parallel::product", mutates_args=(), device_types="cpu")
def _product(a: Tensor, b: Tensor) -> Tensor:
    """a (rows, inner) @ b (inner, columns)."""
    return torch.ops.mkldnn._linear_pointwise(a, b.T, None, "none", [], "")


@_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])
