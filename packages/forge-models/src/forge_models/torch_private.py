"""Private names of torch, each used only through this module, with the reason. Tests call all of them."""

from collections.abc import Callable

import torch
from torch import Tensor

# Whether the current backward retains its graph: only the last backward of a graph may work in place.
from torch._C._autograd import _get_current_graph_task_keep_graph as graph_is_kept  # noqa: F401

# Sees every operator of a context. The module is private; torch's documentation names it.
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: F401

# A view that autograd does not mark as one, because FSDP warns about modules that return views.
unsafe_view: Callable[..., Tensor] = torch.ops.aten._unsafe_view

# Assertion on the device, which does not synchronize with the host: (condition, message).
assert_async: Callable[[Tensor, str], None] = torch._assert_async


def version_of(tensor: Tensor) -> object:
    """Returns a value that changes with each write into a tensor in place. In inference mode torch does not count writes, and
    each call returns another value."""
    return object() if tensor.is_inference() else tensor._version


def onednn_product(rows: Tensor, weight: Tensor) -> Tensor:
    """Returns rows @ weight.T from oneDNN: (n, inputs), (outputs, inputs) -> (n, outputs), fp32 on a CPU. `torch.mm` uses MKL."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
