"""What Triton asks of its driver and Inductor of the devices, as an H100 answers."""

from dataclasses import replace
from functools import cache
from typing import Any

HOPPER = 90


@cache
def install() -> None:
    """Makes this process one in which Triton compiles for an H100, and Inductor gives its kernels to nobody.

    The process needs the devices of the rehearsal.
    """
    import torch
    import triton
    from torch._inductor import config
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):
        """Triton's own asks libcuda."""

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            raise NotImplementedError("nothing is launched")

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", HOPPER, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_benchmarker(self) -> Any:
            raise NotImplementedError("nothing is launched")

    backends["nvidia"] = replace(backends["nvidia"], driver=Driver)
    triton.runtime.driver.set_active(Driver())
    config.use_static_cuda_launcher = False
    torch._C._dynamo.guards._empty_strided_cuda = _memory
    _operators(torch)


def _memory(size: Any, stride: Any, dtype: Any) -> Any:
    import torch

    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _operators(torch: Any) -> None:
    """Operators that only CUDA has. Scaled dot product attention is cuDNN's, as Forge asks on Hopper; what runs has the right
    shapes, and any numbers."""
    aten = torch.ops.aten
    library = torch.library.Library("aten", "IMPL")
    for operator in (aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_cudnn_attention_backward):
        library.impl(operator.default.name(), _of_shapes(torch, operator.default), "CUDA")

    def attention(
        q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0, is_causal: bool = False, *,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        needs = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        found = aten._scaled_dot_product_cudnn_attention(q, k, v, mask, needs, dropout, is_causal, False, scale=scale)
        return found[0]

    library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
    torch._forge_rehearsal_operators = library  # torch forgets what a library that is not held has registered


def _of_shapes(torch: Any, operator: Any) -> Any:
    from torch.utils._pytree import tree_map_only

    def run(*args: Any, **kwargs: Any) -> Any:
        shapes = tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, kwargs))
        return tree_map_only(torch.Tensor, lambda x: torch.zeros_like(x, device="cuda"), operator(*shapes[0], **shapes[1]))

    return run
