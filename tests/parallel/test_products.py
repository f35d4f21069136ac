"""fp32 products of a compiled block on a CPU: oneDNN's, as exact as torch's own, and only where they gain."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from forge_parallel.transforms import products

CPU = torch.device("cpu")
HERE = bool(products.options(CPU))
QUIET = pytest.mark.filterwarnings("ignore")  # inductor itself uses what torch has deprecated


class Pair(nn.Module):
    """Two products, the first one of them large enough."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(512, 2048, bias=False)
        self.down = nn.Linear(2048, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.silu(self.up(x)))


def made(dtype: torch.dtype = torch.float32) -> tuple[Pair, Tensor]:
    torch.manual_seed(0)
    return Pair().to(dtype), torch.randn(64, 512, dtype=dtype, requires_grad=True)


def ran(module: Pair, x: Tensor, **options: object) -> tuple[list[Tensor], int]:
    """Output and gradients, and how many products oneDNN's operator did, of the second call."""
    forward = torch.compile(module.forward, fullgraph=True, dynamic=False, options=options)
    forward(x).square().sum().backward()
    module.zero_grad()
    x.grad = None
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        out = forward(x)
        out.square().sum().backward()
    count = sum(event.count for event in seen.key_averages() if event.key == "mkldnn::_linear_pointwise")
    return [out.detach(), x.grad, module.up.weight.grad, module.down.weight.grad], count  # type: ignore[list-item]


@pytest.mark.skipif(not HERE, reason="a torch without MKL or oneDNN")
@QUIET
def test_they_are_as_exact_as_torchs_own() -> None:
    module, x = made()
    found, count = ran(module, x, **products.options(CPU))
    assert count == 3, "the forward, the gradients of its input and of its weight; not the small ones"
    exact, wide = copy.deepcopy(module).double(), x.detach().double().requires_grad_()
    exact.zero_grad()
    out = exact(wide)
    out.square().sum().backward()
    expected = [out.detach(), wide.grad, exact.up.weight.grad, exact.down.weight.grad]
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-6


@QUIET
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_other_precisions_keep_every_bit(dtype: torch.dtype) -> None:
    without, with_it = ran(*made(dtype)), ran(*made(dtype), **products.options(CPU))
    assert with_it[1] == without[1] == 0
    for one, other in zip(without[0], with_it[0], strict=True):
        assert torch.equal(one, other)


def test_equal_options_share_graphs() -> None:
    assert products.options(CPU) == products.options(CPU)


def test_graphs_of_an_accelerator_are_left_alone() -> None:
    assert products.options(torch.device("cuda")) == {}


@pytest.mark.parametrize(
    ("left", "right", "gain"),
    [
        (torch.empty(32, 512), torch.empty(512, 1024), True),
        (torch.empty(32, 512), torch.empty(1024, 512).T, True),
        (torch.empty(32, 1024).T, torch.empty(32, 1024), True),
        (torch.empty(31, 512), torch.empty(512, 1024), False),
        (torch.empty(32, 512), torch.empty(512, 1023), False),
        (torch.empty(31, 1024).T, torch.empty(31, 1024), False),
        (torch.empty(32, 1024).T, torch.empty(32, 1023), False),
        (torch.empty(32, 1024)[:, :512], torch.empty(512, 1024), False),
        (torch.empty(32, 512), torch.empty(512, 2048)[:, ::2], False),
        (torch.empty(32, 512, dtype=torch.float64), torch.empty(512, 1024, dtype=torch.float64), False),
        (torch.empty(32, 512, device="meta"), torch.empty(512, 1024, device="meta"), False),
    ],
    ids=["rows", "weight", "sum", "few rows", "small", "few in a sum", "small sum", "cut", "strides", "fp64", "elsewhere"],
)
def test_which_products_gain(left: Tensor, right: Tensor, gain: bool) -> None:
    assert products.gains(left, right) == gain
