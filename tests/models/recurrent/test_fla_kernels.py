"""What goes to the kernels of flash-linear-attention and comes back, with kernels of the same arguments that compute one token at
a time; and what is refused. `tests/rehearsal/test_fla.py` runs the library's own kernels."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from forge_core.errors import ForgeError
from forge_core.layout import Layout
from forge_models import DecoderConfig, initialize
from forge_models.blocks import fla_kernels
from forge_models.blocks.channel_delta import channel_delta_rule
from forge_models.blocks.delta_rule import gated_delta_rule
from forge_models.blocks.fla_kernels import CHANNEL_DELTA, GATED_DELTA, STATE_SPACE
from forge_models.blocks.state_space import state_space
from forge_models.checks import recurrent_kernels_fit
from forge_models.components.kimi_delta import KDA
from forge_models.components.recurrent import GDN, Hybrid
from forge_models.components.state_space import Mamba2
from forge_parallel.torch_private import FakeTensorMode

KERNELS = {"delta": GATED_DELTA, "channels": CHANNEL_DELTA, "space": STATE_SPACE}
CALLS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "delta": fla_kernels.gated_delta_rule,
    "channels": fla_kernels.channel_delta_rule,
    "space": fla_kernels.state_space_scan,
}
TORCH: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "delta": gated_delta_rule,
    "channels": channel_delta_rule,
    "space": state_space,
}


def by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    *,
    scale: float,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A kernel as flash-linear-attention documents its own: (1, tokens, heads, width) and starts of sequences, or whole rows."""
    assert output_final_state
    assert all(x.is_contiguous() for x in (q, k, v, g))
    assert q.dtype == k.dtype == v.dtype
    assert initial_state.dtype == torch.float32
    if cu_seqlens is not None:
        assert v.shape[0] == 1
        bounds = cu_seqlens.tolist()
        places = [(0, start, end) for start, end in pairwise(bounds)]
    else:
        places = [(row, 0, v.shape[1]) for row in range(v.shape[0])]
    assert len(initial_state) == len(places)
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    outputs, states = [], []
    for n, (row, start, end) in enumerate(places):
        s = initial_state[n].double()
        for t in range(start, end):
            decay = g[row, t].double().exp()
            s = s * (decay[:, None, None] if decay.dim() == 1 else decay[:, :, None])
            value, key = v[row, t].double(), k[row, t].double()
            if beta is not None:
                value = beta[row, t].double()[:, None] * (value - torch.einsum("hkv,hk->hv", s, key))
            s = s + torch.einsum("hk,hv->hkv", key, value)
            outputs.append(scale * torch.einsum("hkv,hk->hv", s, q[row, t].double()))
        states.append(s)
    return torch.stack(outputs).view(v.shape).to(v.dtype), torch.stack(states).float()


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(fla_kernels, "CHUNK", 8)  # of the test of a kernel, which is short then
    fla_kernels.prove.cache_clear()
    yield
    fla_kernels.prove.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, function: Callable[..., tuple[Tensor, Tensor]] = by_token) -> None:
    for kernel in KERNELS.values():
        parts = kernel.module.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        setattr(sys.modules[kernel.module], kernel.function, function)


def inputs(name: str, dtype: torch.dtype = torch.float32, length: int = 20) -> list[Tensor]:
    kernel, draw = KERNELS[name], torch.Generator().manual_seed(5)
    keys = 4 if kernel.per_channel else 2

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    k = normal(2, length, keys, 5)
    g = -normal(2, length, 4, *((5,) if kernel.per_channel else ())).abs()
    made = [
        normal(2, length, keys, 5),
        k / k.norm(dim=-1, keepdim=True),
        normal(2, length, 4, 3),
        g,
        normal(2, length, 4).sigmoid(),
    ]
    made[:3] = [x.to(dtype) for x in made[:3]]
    made += [] if kernel.delta else [normal(4)]
    return [x.requires_grad_() for x in made]


def differentiated(run: Callable[..., tuple[Tensor, Tensor]], given: list[Tensor], **more: Any) -> list[Tensor]:
    out, after = run(*given, **more)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape), torch.linspace(1, 2, after.numel()).view(after.shape)
    total = (out.float() * weights[0]).sum() + (after * weights[1]).sum()
    leaves = [*given, more["state"]] if more.get("state") is not None else given
    return [out, after, *torch.autograd.grad(total, leaves)]


DOCUMENTS = torch.stack((torch.arange(20) // 7, torch.zeros(20, dtype=torch.int64)))


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("name", KERNELS)
def test_values_states_and_gradients_equal_plain_torch(
    monkeypatch: pytest.MonkeyPatch, name: str, documents: Tensor | None, with_state: bool
) -> None:
    install(monkeypatch)
    state = torch.randn(2, 4, 5, 3, generator=torch.Generator().manual_seed(1)).requires_grad_() if with_state else None
    more = {"documents": documents, "state": state}
    found, expected = (differentiated(run[name], inputs(name), **more) for run in (CALLS, TORCH))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", KERNELS)
def test_a_row_of_one_token(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install(monkeypatch)
    found, expected = (differentiated(run[name], inputs(name, length=1)) for run in (CALLS, TORCH))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", KERNELS)
def test_bf16_comes_back_as_bf16(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install(monkeypatch)
    out, after = CALLS[name](*inputs(name, torch.bfloat16), documents=DOCUMENTS)
    assert (out.dtype, after.dtype) == (torch.bfloat16, torch.float32)


class Nan(torch.autograd.Function):
    """Returns its input; the gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * float("nan")


def faulty(fault: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def kernel(*args: Any, **given: Any) -> tuple[Tensor, Tensor]:
        starts = given.get("cu_seqlens")
        if fault == "sees other documents" and starts is not None:
            given["cu_seqlens"] = torch.tensor([0, *starts[2:].tolist()])
            given["initial_state"] = given["initial_state"][1:]
        if fault == "forgets the state":
            given["initial_state"] = given["initial_state"] * 0
        if fault == "loses gradients":
            given["g"] = given["g"].detach() + 0 * given["g"]
        if fault == "has one gradient that is NaN":
            given["q"] = Nan.apply(given["q"])
        out, after = by_token(*args, **given)
        if fault == "sees other documents" and starts is not None:
            after = torch.cat((after[:1], after))
        return (out * float("nan") if fault == "gives NaN" else out), after

    return kernel


@pytest.mark.parametrize(
    "fault", ["sees other documents", "forgets the state", "loses gradients", "gives NaN", "has one gradient that is NaN"]
)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, fault: str) -> None:
    install(monkeypatch)
    setattr(sys.modules[KERNELS[name].module], KERNELS[name].function, faulty(fault))
    with pytest.raises(ForgeError, match=r"gives other numbers than plain torch here.*set kernel = 'torch'"):
        CALLS[name](*inputs(name))


def test_the_test_of_a_kernel_is_no_part_of_the_graph_and_leaves_the_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputation compares the tensors that the first forward and the second one keep."""
    install(monkeypatch)
    given, before = inputs("delta"), torch.get_rng_state()
    out = checkpoint(lambda *x: CALLS["delta"](*x)[0], *given, use_reentrant=False)
    assert torch.equal(torch.get_rng_state(), before)
    found = torch.autograd.grad(out.sum(), given)
    expected = torch.autograd.grad(CALLS["delta"](*given)[0].sum(), given)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_without_gradients_the_kernel_is_tested_too(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, faulty("loses gradients"))
    with torch.no_grad(), pytest.raises(ForgeError, match=r"the gradient of g"):
        CALLS["delta"](*inputs("delta"))


def test_what_a_kernel_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ForgeError, match=r"needs flash-linear-attention .*pip install 'forge-models\[fla\]'"):
        CALLS["delta"](*inputs("delta"))
    with pytest.raises(ForgeError, match=r"not in torch\.float64; set kernel = 'torch'"):
        CALLS["delta"](*inputs("delta", torch.float64))
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ForgeError, match="needs a CUDA device, and this is cpu; set kernel = 'torch'"):
        CALLS["delta"](*inputs("delta"))


@pytest.mark.parametrize("name", KERNELS)
def test_a_dry_run_needs_no_kernel(name: str) -> None:
    with FakeTensorMode() as mode:
        out, after = CALLS[name](*(mode.from_tensor(x) for x in inputs(name)))
    assert (out.shape, after.shape) == ((2, 20, 4, 3), (2, 4, 5, 3))


LAYERS = {"gated_delta_net": GDN(conv_width=2), "kimi_delta": KDA(conv_width=2), "mamba2": Mamba2(heads=4, state_dim=6)}


@pytest.mark.parametrize("name", LAYERS)
def test_a_model_with_kernels_equals_one_without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install(monkeypatch)
    tokens = torch.arange(24).view(2, 12) % 7
    found = []
    for kernel in ("fla", "torch"):
        layer = replace(LAYERS[name], kernel=kernel)
        model = DecoderConfig(dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=24, vocab_size=7, attention=layer).build()
        initialize(model, 3)
        logits = model(tokens, documents=DOCUMENTS[:, :12])
        found.append([logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.detach().abs().max()) + 1e-6)


@pytest.mark.parametrize("key", ["kernel", "recurrent.kernel"])
def test_what_a_recipe_may_not_combine(key: str) -> None:
    attention = GDN(kernel="fla") if key == "kernel" else Hybrid(recurrent=GDN(kernel="fla"))

    def faults(compute: str = "bf16", deterministic: bool = False, transforms: tuple[str, ...] = ()) -> list[str]:
        job: Any = SimpleNamespace(
            model=SimpleNamespace(attention=attention),
            precision=SimpleNamespace(compute=compute),
            train=SimpleNamespace(deterministic=deterministic),
            transforms=dict.fromkeys(transforms),
        )
        return [str(fault) for fault in recurrent_kernels_fit(job, Layout())]

    assert not faults()
    for refused in (faults("fp64"), faults(deterministic=True), faults(transforms=("compile",))):
        assert len(refused) == 1
        assert f"model.attention.{key}" in refused[0]
    attention = GDN()
    assert not faults("fp64", deterministic=True, transforms=("compile",))


def test_layers_that_share_documents_read_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    asked: list[int] = []
    nonzero = Tensor.nonzero

    def counted(self: Tensor, *args: Any, **more: Any) -> Tensor:
        asked.append(1)
        return nonzero(self, *args, **more)

    documents = DOCUMENTS.clone()
    CALLS["delta"](*inputs("delta"), documents=DOCUMENTS)  # the kernel's own test reads documents too
    monkeypatch.setattr(Tensor, "nonzero", counted)
    for _ in range(3):
        CALLS["delta"](*inputs("delta"), documents=documents)
    assert len(asked) == 1
    documents.zero_()  # another batch in the same memory
    out, _ = CALLS["delta"](*inputs("delta"), documents=documents)
    torch.testing.assert_close(out, TORCH["delta"](*inputs("delta"))[0], rtol=1e-4, atol=1e-5)
