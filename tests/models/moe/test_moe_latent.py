"""Experts in a space of their own width: against the module of transformers, and by the shape of what a dispatcher gets."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts, NemotronHMLP

from forge_core.errors import ForgeError
from forge_models.blocks.moe.layer import BRANCH_NORMS
from forge_models.components.attentions import MLA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, NormedTopKConfig, SigmoidTopKConfig
from forge_models.components.layers import GELU, ReLU2
from forge_models.hf.families import FAMILIES
from forge_models.hf.family import misfits
from forge_models.upcycle import _slices
from models.conftest import fill
from models.moe.test_moe_layer import SIZES, inputs, layer

LATENT = MoEConfig(experts=6, top_k=3, shared=2, ffn_dim=10, latent_dim=5, router=SigmoidTopKConfig(scaling=1.8))


def reference(part: Any, x: torch.Tensor) -> torch.Tensor:
    """What transformers' `NemotronHMoE` computes of the choice and the weights of our router."""
    config = SimpleNamespace(
        n_routed_experts=6,
        hidden_size=16,
        moe_intermediate_size=10,
        moe_latent_size=5,
        mlp_hidden_act="relu2",
        mlp_bias=False,
        intermediate_size=20,
        _experts_implementation="eager",
    )
    experts, shared = NemotronHExperts(config).double(), NemotronHMLP(config).double()
    enter, leave = nn.Linear(16, 5, bias=False).double(), nn.Linear(5, 16, bias=False).double()
    values = {
        **{f"experts.{name}": getattr(part.experts, name) for name in ("up_proj", "down_proj")},
        **{f"shared.{name}.weight": getattr(part.shared, name).weight for name in ("up_proj", "down_proj")},
        "enter.weight": part.latent_in.weight,
        "leave.weight": part.latent_out.weight,
    }
    flat = x.flatten(0, 1)
    routing = part.router(flat, None)
    modules = {"experts": experts, "shared": shared, "enter": enter, "leave": leave}

    def run(name: str, *args: torch.Tensor) -> torch.Tensor:
        own = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{name}.")}
        return torch.func.functional_call(modules[name], own, args)

    chosen = run("experts", run("enter", flat), routing.experts, routing.weights)
    return run("leave", chosen).view_as(x) + run("shared", x)


def test_values_and_gradients_are_those_of_nemotron() -> None:
    part = layer(LATENT, ReLU2())
    x, _ = inputs()
    ours, theirs = part(x)[0], reference(part, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    leaves, slope = [x, *part.parameters()], torch.randn(ours.shape, dtype=torch.float64)
    mine, other = (torch.autograd.grad((y * slope).sum(), leaves) for y in (ours, theirs))
    for one, two in zip(mine, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "moe",
    [
        MoEConfig(experts=5, top_k=2, ffn_dim=8, latent_dim=24),
        MoEConfig(experts=4, top_k=1, ffn_dim=8, latent_dim=4, shared=1, weigh_inputs=True),
        MoEConfig(experts=4, top_k=2, ffn_dim=8, latent_dim=4, shared=1, shared_gate=True, weigh_inputs=True),
        MoEConfig(experts=4, top_k=2, ffn_dim=8, latent_dim=4, shared=2, branch_norms=True, router=NormedTopKConfig()),
    ],
    ids=["wider", "one weighed input", "weighed inputs, gate", "norms of branches"],
)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biases"])
def test_other_options_equal_a_loop_over_tokens(moe: MoEConfig, bias: bool) -> None:
    part = layer(moe, GELU(bias=bias)).eval()
    x, _ = inputs()
    shared, norms = part.shared, {name: getattr(part, name) or nn.Identity() for name in BRANCH_NORMS}
    matrices = [part.experts.up_proj, part.experts.down_proj]
    biases = [part.experts.up_bias, part.experts.down_bias] if bias else [torch.zeros(moe.experts, 1)] * 2
    with torch.no_grad():
        routing, rows = part.router(x.flatten(0, 1), None), []
        for t, token in enumerate(x.flatten(0, 1)):
            inner, total = part.latent_in(norms["experts_norm"](token)), 0
            for e, weight in zip(routing.experts[t].tolist(), routing.weights[t], strict=True):
                given, factor = (weight * inner, 1) if moe.weigh_inputs else (inner, weight)
                hidden = F.gelu(matrices[0][e] @ given + biases[0][e], approximate="tanh")
                total = total + factor * (matrices[1][e] @ hidden + biases[1][e])
            y = norms["experts_post_norm"](part.latent_out(total))
            if shared is not None:
                gate = 1 if part.shared_gate is None else (part.shared_gate[0] @ token).sigmoid()
                y = y + gate * norms["shared_post_norm"](shared(norms["shared_norm"](token)))
            rows.append(y)
        torch.testing.assert_close(part(x)[0], torch.stack(rows).view_as(x), rtol=1e-11, atol=1e-11)
    assert (part.latent_in.bias is not None) == (part.latent_out.bias is not None) == bias


def test_a_dispatcher_sends_the_narrow_tokens_and_calls_the_shared_experts_meanwhile() -> None:
    part = layer(LATENT, ReLU2()).eval()
    x, _ = inputs()
    calls: list[str] = []
    shapes: list[tuple[int, ...]] = []
    inner, run = part.dispatch, part.shared.forward
    part.shared.forward = lambda x: (calls.append("shared"), run(x))[1]

    def dispatch(x: torch.Tensor, *args: Any) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        calls.append("dispatched")
        y = inner(x, *args)
        calls.append("combined")
        assert y.shape == x.shape
        return y

    expected = part(x)[0]
    calls.clear()
    part.dispatch = dispatch
    torch.testing.assert_close(part(x)[0], expected)
    assert shapes == [(21, 5)]
    assert calls == ["dispatched", "shared", "combined"]


def test_specs_cover_the_projections() -> None:
    model = DecoderConfig(**SIZES | {"layers": 4}, mlp=ReLU2(), moe=LATENT).build()
    fill(model, model.specs(), 0)
    mlp = model.blocks["0"].mlp
    assert mlp.latent_in.weight.std().item() == pytest.approx(0.02, rel=0.25)
    assert mlp.latent_out.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.25)
    specs = model.specs().tensors
    assert specs["blocks.0.mlp.latent_in.weight"].dims == (None, "embed")
    assert specs["blocks.0.mlp.experts.down_proj"].dims == ("expert", None, "ffn")
    assert specs["blocks.0.mlp.experts.down_proj"].init.std == pytest.approx(0.02 / 8**0.5)


def test_the_size_of_a_model_counts_the_width_of_the_experts() -> None:
    config = DecoderConfig(**SIZES | {"layers": 3}, mlp=ReLU2(), moe=replace(LATENT, first_dense=1))
    counted = {name: value for name, value in config.build().named_parameters() if not {"norm", "router"} & {*name.split(".")}}
    counted = {name: value for name, value in counted.items() if "_norm." not in name}
    assert config.shape.elements == sum(value.numel() for value in counted.values())
    hidden, experts = config.shape.matrices()
    shapes = {name.removesuffix(".weight"): value.shape for name, value in counted.items() if name.startswith("blocks.")}
    assert shapes == {name: matrix.shape for name, matrix in hidden.items()} | {
        name: (6, *matrix.shape) for name, matrix in experts.items()
    }
    specs = config.build().specs().tensors
    for name, matrix in (hidden | experts).items():
        assert specs[name if name in experts else f"{name}.weight"].dims[-2:] == matrix.dims, name


def test_families_without_them_refuse_them() -> None:
    sizes = {"dim": 16, "layers": 2, "heads": 4, "vocab_size": 40, "attention": MLA(kv_lora_rank=8)}
    moe = MoEConfig(experts=4, shared=1, ffn_dim=8, latent_dim=4, router=SigmoidTopKConfig(bias_rate=0.0))
    assert any("latent_dim" in told for told in misfits(FAMILIES["deepseek_v3"], DecoderConfig(**sizes, moe=moe)))


def test_what_cannot_have_them_is_refused() -> None:
    with pytest.raises(ForgeError, match=r"remove model\.moe\.latent_dim"):
        _slices(MoEConfig(experts=4, latent_dim=8).shape(24), 24)
    with pytest.raises(ValueError, match="parameters; the limit is"):
        DecoderConfig(**SIZES, moe=MoEConfig(experts=4, latent_dim=1 << 60))
