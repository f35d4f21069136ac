"""Names of torch that its documentation does not promise to keep: each here once, with the reason. Tests call all of them."""

from collections.abc import Callable

import torch
from torch import Tensor

# Whether the backward that runs keeps its graph for another one: only the last may work in place.
from torch._C._autograd import _get_current_graph_task_keep_graph as graph_is_kept  # noqa: F401

# A view that does not say that it is one; FSDP warns of modules that return views.
unsafe_view: Callable[..., Tensor] = torch.ops.aten._unsafe_view

# An error on the device, where the host would have to wait to raise one: (condition, message).
assert_async: Callable[[Tensor, str], None] = torch._assert_async


def onednn_product(rows: Tensor, weight: Tensor) -> Tensor:
    """rows @ weight.T by oneDNN: (n, inputs), (outputs, inputs) -> (n, outputs), fp32 on a CPU. The public product calls MKL."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
