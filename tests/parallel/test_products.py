"""fp32 products of a compiled block on a CPU: oneDNN's, as exact as torch's own, and only where they gain."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from forge_core.batch import Batch
from forge_core.layout import Layout
from forge_core.protocols.model import Transform
from forge_models.components.decoder import Decoder
from forge_models.components.objectives import CrossEntropy
from forge_parallel.components.transforms import Compile
from forge_parallel.plan import Plan
from forge_parallel.realization import Blueprint, realize
from forge_parallel.step import Step
from forge_parallel.topology import Topology
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


@pytest.mark.skipif(not HERE, reason="a torch without MKL or oneDNN")
@QUIET
def test_a_compiled_model_is_as_exact_as_an_eager_one() -> None:
    """Loss and every gradient of a block wide enough for oneDNN, against fp64; what `compile` asks for reaches the graphs."""
    tokens = torch.randint(64, (2, 65), generator=torch.Generator().manual_seed(1))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    decoder = Decoder(dim=768, layers=1, heads=12, ffn_dim=1536, vocab_size=64, max_length=64)

    def trained(compute: str, *transforms: Transform) -> tuple[float, int, dict[str, Tensor]]:
        topology = Topology(Layout(), CPU)
        model = realize(Blueprint.of(decoder.build), Plan.of(transforms, topology.layout), topology, 0, compute)
        step = Step(model, CrossEntropy().build())
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            loss = step([batch]).numbers()["loss"]
        count = sum(event.count for event in seen.key_averages() if event.key == "mkldnn::_linear_pointwise")
        return loss, count, {name: parameter.grad.double() for name, parameter, _ in model.trainable()}  # type: ignore[union-attr]

    exact, eager, compiled = trained("fp64"), trained("fp32"), trained("fp32", Compile().build())
    assert eager[1] == 0 and compiled[1] == 14 + 3, "forward and input of 7 matrices, and the gradients of the 3 of the mlp"
    assert compiled[0] == pytest.approx(exact[0], rel=1e-6)
    for name, expected in exact[2].items():
        wrong, usual = (float((run[2][name] - expected).norm() / expected.norm()) for run in (compiled, eager))
        assert wrong < 2 * usual, f"{name}: rounding of {wrong}, eager {usual}"


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
