"""A layer of experts against a loop over tokens: every router and kernel, capacity, padding, degenerate loads."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter

from forge_core.protocols.model import ExpertDispatcher, Observer
from forge_core.registry import Registry, installed
from forge_models.blocks.moe.dispatch import limited
from forge_models.blocks.moe.experts import Experts, unfit
from forge_models.blocks.moe.layer import ExpertLayer
from forge_models.components.attentions import MLA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import (
    HashConfig,
    MoEConfig,
    NormedTopKConfig,
    SigmoidTopKConfig,
    SoftmaxTopKConfig,
    TopKSigmoidConfig,
)
from forge_models.components.layers import GELU, GeGLU, ReLU2, SwiGLU
from forge_models.hf.families import FAMILIES
from forge_models.hf.family import misfits
from forge_models.shape import Losses
from models.conftest import fill

SIZES = {"dim": 16, "layers": 1, "heads": 2, "ffn_dim": 24, "vocab_size": 53, "max_length": 64}
ROUTERS = {
    entry.name: Registry().load_entry(entry)
    for entry in installed()
    if entry.group == "forge.routers" and entry.distribution == "forge-models"
}
GROUPS = {"softmax_raw": SoftmaxTopKConfig(normalize=False), "groups": SigmoidTopKConfig(n_group=4, topk_group=2, scaling=2.5)}
GROUPS["sqrt_softplus"] = SigmoidTopKConfig(scores="sqrt_softplus", normalize=False)
EVERY = {name: component() for name, component in ROUTERS.items()} | GROUPS


def layer(moe, mlp=None, dtype=torch.float64, seed=0):
    """The layer of a one-block decoder, weights large enough that choices differ and activations bend; a bias that matters."""
    model = DecoderConfig(**SIZES, mlp=mlp or SwiGLU(), moe=moe).build()
    fill(model, model.specs(), seed)
    part = model.blocks["0"].mlp
    assert isinstance(part, ExpertLayer)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.normal_(0, 0.4, generator=generator)
        if isinstance(getattr(part.router, "bias", None), torch.Tensor):
            part.router.bias.normal_(0, 0.3, generator=generator)
    return part.to(dtype)


def inputs(rows=3, length=7, dtype=torch.float64, seed=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, 16, generator=generator, dtype=torch.float64).to(dtype)
    return x.requires_grad_(), torch.randint(53, (rows, length), generator=generator)


def feed_forward(x, gate, up, down, mlp):
    function = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda h: F.gelu(h, approximate="tanh")}.get(
        mlp.activation, lambda h: h.relu() ** 2
    )
    return (function(gate @ x) * (up @ x) if gate is not None else function(up @ x)) @ down.T


def by_hand(part, x, tokens, mlp, dropped=()):
    """Token by token, expert by expert, from the router's choice; `dropped` are (token, slot) pairs."""
    rows = []
    flat = x.flatten(0, 1)
    routing = part.router(flat, tokens.flatten())
    for t, token in enumerate(flat):
        total = torch.zeros_like(token)
        for slot in range(routing.experts.shape[1]):
            e = int(routing.experts[t, slot])
            if (t, slot) in dropped:
                continue
            gate = part.experts.gate_proj
            each = feed_forward(token, None if gate is None else gate[e], part.experts.up_proj[e], part.experts.down_proj[e], mlp)
            total = total + routing.weights[t, slot] * each
        if part.shared is not None:
            s = part.shared
            gate = s.gate_proj.weight if mlp.gated else None
            total = total + feed_forward(token, gate, s.up_proj.weight, s.down_proj.weight, mlp)
        rows.append(total)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("mlp", [SwiGLU(), GeGLU(), ReLU2()], ids=lambda mlp: type(mlp).__name__)
def test_equals_a_loop_over_tokens_with_gradients(name, mlp):
    part = layer(MoEConfig(experts=8, top_k=3, shared=2, ffn_dim=8, router=EVERY[name]), mlp)
    x, tokens = inputs()
    ours, counted = part(x, None, tokens)
    theirs = by_hand(part, x, tokens, mlp)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    leaves = [x, *part.parameters()]
    slope = torch.randn(ours.shape, dtype=torch.float64)
    mine = torch.autograd.grad((ours * slope).sum(), leaves)
    other = torch.autograd.grad((theirs * slope).sum(), leaves)
    for one, two in zip(mine, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)
    assert float(counted[:8].sum()) == 21 * 3


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("router", [TopKSigmoidConfig(), SoftmaxTopKConfig()], ids=lambda router: type(router).__name__)
def test_weights_of_inputs_equal_a_loop_over_tokens_with_gradients(router, top_k):
    part = layer(MoEConfig(experts=6, top_k=top_k, shared=1, ffn_dim=8, router=router, weigh_inputs=True))
    x, tokens = inputs()
    masked = torch.arange(7) < torch.tensor([[7], [5], [0]])
    flat, chosen = x.flatten(0, 1), part.router(x.flatten(0, 1), None)
    experts, rows = part.experts, []
    for t, token in enumerate(flat):
        total = part.shared(token)
        for weight, e in zip(chosen.weights[t], chosen.experts[t].tolist(), strict=True):
            matrices = experts.gate_proj[e], experts.up_proj[e], experts.down_proj[e]
            total = total + feed_forward(weight * token, *matrices, SwiGLU()) * masked.flatten()[t]
        rows.append(total)
    theirs, (ours, counted) = torch.stack(rows).view_as(x), part(x, masked, tokens)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    leaves, slope = [x, *part.parameters()], torch.randn(ours.shape, dtype=torch.float64)
    mine, other = (torch.autograd.grad((y * slope).sum(), leaves) for y in (ours, theirs))
    for one, two in zip(mine, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)
    assert float(counted[:6].sum()) == 12 * top_k


def test_the_sigmoid_of_the_largest_logits_weighs():
    """Also of logits whose sigmoids are equal."""
    part = layer(MoEConfig(experts=8, top_k=2, router=TopKSigmoidConfig()))
    flat = 200 * inputs()[0].flatten(0, 1)
    logits = (flat @ part.router.weight.T).detach()
    routing = part.router(flat, None)
    assert torch.equal(routing.experts, logits.topk(2).indices)
    torch.testing.assert_close(routing.weights, logits.sort(descending=True).values[:, :2].sigmoid())


def test_two_shared_experts_are_two():
    """Their weights side by side are two separate feed-forward parts added up."""
    part = layer(MoEConfig(experts=4, top_k=1, shared=2, ffn_dim=8))
    x, _ = inputs()
    first, second = (feed_forward_of(part.shared, slice(8 * index, 8 * index + 8), x) for index in (0, 1))
    torch.testing.assert_close(part.shared(x), first + second, rtol=1e-12, atol=1e-12)
    assert sum(parameter.numel() for parameter in part.shared.parameters()) == 2 * 3 * 16 * 8


def feed_forward_of(shared, rows, x):
    hidden = F.silu(x @ shared.gate_proj.weight[rows].T) * (x @ shared.up_proj.weight[rows].T)
    return hidden @ shared.down_proj.weight[:, rows].T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mlp", [SwiGLU(), GELU()], ids=lambda mlp: type(mlp).__name__)
@pytest.mark.parametrize("capacity", [None, 0.8])
def test_the_grouped_product_equals_the_loop(dtype, mlp, capacity):
    found = {}
    for kernel in ("grouped", "loop"):
        part = layer(MoEConfig(experts=8, top_k=2, kernel=kernel, capacity=capacity, router=SoftmaxTopKConfig()), mlp, dtype)
        x, tokens = inputs(dtype=dtype)
        y, _ = part(x, None, tokens)
        y.sum().backward()  # a gradient of stride 0, at which the product's own backward crashes
        found[kernel] = [y, x.grad, *(p.grad for p in part.parameters())]
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for one, two in zip(found["grouped"], found["loop"], strict=True):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance * float(two.detach().abs().max()))


@pytest.mark.parametrize("kernel", ["grouped", "loop"])
@pytest.mark.parametrize("counts", [[0, 0, 9, 0], [0, 0, 0, 0], [9, 0, 0, 0], [1, 0, 5, 3]], ids=str)
def test_fault_42_experts_without_tokens_and_one_with_all_have_defined_gradients(kernel, counts):
    context = DecoderConfig(**SIZES).shape.context(0)
    experts = Experts(context, 4, "silu", True, kernel)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, 0, 0.2)
    rows = torch.randn(sum(counts), 16, requires_grad=True)
    experts(rows, torch.tensor(counts)).sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad is not None
        used = [bool(grad.count_nonzero()) for grad in parameter.grad]
        assert used == [count > 0 for count in counts]
    assert rows.grad is not None and bool(rows.grad.isfinite().all())


@pytest.mark.parametrize("busy", [{5: 9}, {0: 3, 15: 8}, {2: 1, 3: 1, 4: 1, 9: 30}, {1: 2, 2: 2, 3: 2, 5: 2, 7: 2}], ids=str)
def test_the_grouped_product_equals_the_loop_when_few_experts_have_tokens(busy):
    """Up to a quarter of them: only their matrices are multiplied then, on a CPU."""
    counts, found = torch.tensor([busy.get(expert, 0) for expert in range(16)]), {}
    for kernel in ("grouped", "loop"):
        torch.manual_seed(0)
        experts = Experts(DecoderConfig(**SIZES).shape.context(0), 16, "silu", True, kernel)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, 0, 0.2)
        rows = torch.randn(sum(busy.values()) + 2, 16, requires_grad=True)  # two are nobody's
        y = experts(rows, counts)[:-2]
        y.pow(2).sum().backward()
        found[kernel] = [y, rows.grad[:-2], *(parameter.grad for parameter in experts.parameters())]
    for one, two in zip(found["grouped"], found["loop"], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", ["grouped", "loop"])
def test_rows_of_nobody_change_nothing_and_get_no_gradient(kernel):
    """NaN in the rows of dropped slots reaches neither outputs nor gradients."""
    part = layer(MoEConfig(experts=4, top_k=2, kernel=kernel, capacity=0.5), dtype=torch.float32)
    x, _ = inputs(dtype=torch.float32)
    with torch.no_grad():
        kept = limited(*part.router(x.flatten(0, 1), None)[:2], 0.5, 4)
        lost = (kept < 0).all(1).view(3, 7)
    assert bool(lost.any())
    with torch.no_grad():
        x[lost] = torch.nan  # whoever is dropped entirely; its choice was made before
    y = part.dispatch(x.flatten(0, 1), kept, torch.ones(21, 2), part.experts, 4)
    y.sum().backward()
    assert bool(y.isfinite().all()) and bool(x.grad.isfinite().all())
    assert float(x.grad[lost].abs().sum()) == 0
    assert all(bool(parameter.grad.isfinite().all()) for parameter in part.experts.parameters())


def test_a_kernel_that_does_not_fit_is_refused_and_auto_takes_the_loop():
    assert unfit(torch.bfloat16, 16, 24) == ""
    assert "fp64" in unfit(torch.float64, 16) or "float64" in unfit(torch.float64, 16)
    assert "rows of 10 values" in unfit(torch.float32, 16, 10)
    with pytest.raises(ValueError, match=r"model\.moe\.kernel 'grouped'.*use 'auto' or 'loop'"):
        layer(MoEConfig(experts=4, kernel="grouped"))(inputs()[0])
    odd = layer(MoEConfig(experts=4, ffn_dim=10), dtype=torch.float32)
    odd(inputs(dtype=torch.float32)[0])[0].sum().backward()


@pytest.mark.parametrize("name", EVERY)
def test_choices_are_different_experts_and_weights_are_those_of_the_formula(name):
    part = layer(MoEConfig(experts=8, top_k=3, router=EVERY[name]))
    x, tokens = inputs(5, 11)
    routing = part.router(x.flatten(0, 1), tokens.flatten())
    assert routing.experts.shape == routing.weights.shape == (55, 3)
    assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 8 for row in routing.experts.tolist())
    total = EVERY[name].total
    if total is not None:
        torch.testing.assert_close(routing.weights.sum(1), torch.full((55,), total, dtype=torch.float64))
    if routing.probabilities is not None:
        torch.testing.assert_close(routing.probabilities.sum(1), torch.ones(55, dtype=torch.float64))


def test_softmax_takes_the_largest_probabilities():
    part = layer(MoEConfig(experts=8, top_k=2, router=SoftmaxTopKConfig(normalize=False)))
    flat = inputs()[0].flatten(0, 1)
    p = (flat @ part.router.weight.T).softmax(1).detach()
    routing = part.router(flat, None)
    for row, experts, weights in zip(p, routing.experts, routing.weights, strict=True):
        best = sorted(range(8), key=lambda e: -float(row[e]))[:2]
        assert experts.tolist() == best
        torch.testing.assert_close(weights, row[best])


def test_the_bias_chooses_and_never_weighs():
    part = layer(MoEConfig(experts=8, top_k=2, router=SigmoidTopKConfig()))
    flat = inputs()[0].flatten(0, 1)
    scores = (flat @ part.router.weight.T).sigmoid()
    with torch.no_grad():
        part.router.bias.zero_()
        part.router.bias[5] = 10.0
    routing = part.router(flat, None)
    assert bool((routing.experts == 5).any(1).all())
    chosen = scores.gather(1, routing.experts)
    torch.testing.assert_close(routing.weights, chosen / chosen.sum(1, keepdim=True))
    other = scores.scatter(1, torch.full((21, 1), 5), -1).argmax(1)
    assert {*routing.experts[0].tolist()} == {5, int(other[0])}
    assert "bias" not in dict(part.router.named_parameters()) and not part.router.bias.requires_grad
    assert "router.bias" in part.state_dict()


def test_scores_without_a_limit_equal_the_router_of_deepseek_v4():
    part = layer(MoEConfig(experts=8, top_k=3, router=SigmoidTopKConfig(scores="sqrt_softplus", scaling=1.5)))
    sizes = {"num_experts_per_tok": 3, "num_local_experts": 8, "hidden_size": 16, "routed_scaling_factor": 1.5}
    theirs = DeepseekV4TopKRouter(SimpleNamespace(**sizes, scoring_func="sqrtsoftplus")).double()
    flat = (20 * inputs()[0].flatten(0, 1)).requires_grad_()
    with torch.no_grad():
        part.router.bias.copy_(torch.linspace(-1, 1, 8))
        theirs.weight.copy_(part.router.weight)
        theirs.e_score_correction_bias.copy_(part.router.bias)
    found, (_, weights, experts) = part.router(flat, None), theirs(flat)
    order, other = found.experts.argsort(1), experts.argsort(1)
    assert torch.equal(found.experts.gather(1, order), experts.gather(1, other))
    torch.testing.assert_close(found.weights.gather(1, order), weights.gather(1, other), rtol=1e-12, atol=0)
    factor = torch.randn(21, 3, dtype=torch.float64)
    mine = torch.autograd.grad((found.weights.gather(1, order) * factor).sum(), [flat, part.router.weight])
    wanted = torch.autograd.grad((weights.gather(1, other) * factor).sum(), [flat, theirs.weight])
    for ours, reference in zip(mine, wanted, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.probabilities.sum(1), torch.ones(21, dtype=torch.float64))
    with torch.no_grad():
        part.router.weight.mul_(1e6)  # where the softplus is 0
    (gradient,) = torch.autograd.grad(part.router(flat, None).weights.sum(), [part.router.weight])
    assert bool(gradient.isfinite().all())


def test_families_refuse_scores_that_they_do_not_have():
    sizes = {"dim": 16, "layers": 2, "heads": 4, "vocab_size": 40, "attention": MLA(kv_lora_rank=8)}
    routers = [SigmoidTopKConfig(bias_rate=0.0, scores=scores) for scores in ("sigmoid", "sqrt_softplus")]
    models = [DecoderConfig(**sizes, moe=MoEConfig(experts=4, shared=1, ffn_dim=8, router=router)) for router in routers]
    told = [set(misfits(FAMILIES["deepseek_v3"], model)) for model in models]
    (more,) = told[1] - told[0]
    assert "sqrt_softplus" in more


def test_groups_limit_the_choice():
    """Against a search over all tokens by hand: groups of two, the two best by the sum of their scores."""
    part = layer(MoEConfig(experts=8, top_k=3, router=SigmoidTopKConfig(n_group=4, topk_group=2)))
    flat = inputs()[0].flatten(0, 1)
    biased = ((flat @ part.router.weight.T).sigmoid() + part.router.bias).detach()
    for row, experts in zip(biased.tolist(), part.router(flat, None).experts.tolist(), strict=True):
        groups = sorted(range(4), key=lambda g: -(row[2 * g] + row[2 * g + 1]))[:2]
        best = sorted((e for g in groups for e in (2 * g, 2 * g + 1)), key=lambda e: -row[e])[:3]
        assert set(experts) == set(best)


def test_the_hash_depends_on_token_layer_and_seed_only_and_spreads():
    part, x = layer(MoEConfig(experts=8, top_k=2, router=HashConfig())), torch.randn(10000, 16)
    tokens = torch.arange(10000)
    first = part.router(x, tokens).experts
    assert torch.equal(first, part.router(torch.randn(10000, 16), tokens).experts)
    counts = torch.bincount(first.flatten(), minlength=8)
    assert float((counts - 2500).abs().max()) < 5 * (10000 * 2 * (1 / 8) * (7 / 8)) ** 0.5
    reseeded = layer(MoEConfig(experts=8, top_k=2, router=HashConfig(seed=1))).router(x, tokens).experts
    # Two independent choices of 2 out of 8 agree entirely once in 56 ordered pairs.
    assert abs(float((first == reseeded).all(1).float().mean()) - 1 / 56) < 0.01
    with pytest.raises(ValueError, match="needs token ids"):
        part.router(x, None)


@pytest.mark.parametrize("name", ROUTERS)
def test_training_and_evaluation_give_equal_outputs(name):
    part = layer(MoEConfig(experts=8, top_k=2, shared=1, capacity=0.7, router=EVERY[name]))
    x, tokens = inputs()
    trained, counted = part(x, None, tokens)
    part.eval()
    with torch.no_grad():
        evaluated, nothing = part(x, None, tokens)
    assert torch.equal(trained, evaluated)
    assert counted is not None and nothing is None


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("capacity", [None, 0.75])
def test_padding_never_changes_a_real_token(name, capacity):
    """Rows with padding equal the same tokens without it: outputs, gradients, statistics, losses."""
    losses = Losses(sequence=0.3, micro_batch=0.2, z=0.1) if EVERY[name].learned else Losses()
    moe = MoEConfig(experts=4, top_k=2, shared=1, capacity=capacity, router=EVERY[name], losses=losses)
    part = layer(moe)
    x, tokens = inputs(2, 9)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[:, 6:] = False
    slope = torch.randn(2, 6, 16, dtype=torch.float64)
    short, short_counts = part(x[:, :6], None, tokens[:, :6])
    expected = torch.autograd.grad((short * slope).sum(), [x, *part.parameters()])
    for garbage in (1.0, 100.0):
        with torch.no_grad():
            padded_x = x.where(real.unsqueeze(-1), garbage * torch.randn_like(x)).requires_grad_()
        padded, counts = part(padded_x, real, tokens)
        torch.testing.assert_close(padded[:, :6], short, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(counts, short_counts, rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad((padded[:, :6] * slope).sum(), [padded_x, *part.parameters()])
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def test_capacity_counts_over_all_slots_keeps_the_largest_weights_and_saves_work():
    generator = torch.Generator().manual_seed(0)
    tokens, slots, count, factor = 40, 3, 5, 0.6
    experts = torch.stack([torch.randperm(count, generator=generator)[:slots] for _ in range(tokens)])
    experts[:, 0] = 0  # everyone wants expert 0
    experts[:, 1:] = experts[:, 1:].where(experts[:, 1:] != 0, 4)
    experts[7] = -1
    weights = torch.rand(tokens, slots, generator=generator)
    kept = limited(experts, weights, factor, count)
    most = -(-int(factor * 39 * slots * 1000) // (1000 * count))  # 39 tokens are there
    assert most == 15
    for e in range(count):
        wanted = sorted(
            ((float(weights[t, s]), -t) for t in range(tokens) for s in range(slots) if experts[t, s] == e), reverse=True
        )
        took = [(float(weights[t, s]), -t) for t in range(tokens) for s in range(slots) if kept[t, s] == e]
        assert sorted(took, reverse=True) == wanted[:most]
    assert torch.equal(kept[kept >= 0], experts[kept >= 0])

    seen = []
    part = layer(MoEConfig(experts=4, top_k=2, capacity=0.5))
    inner = part.experts.forward
    part.experts.forward = lambda rows, counts: seen.append(counts) or inner(rows, counts)  # type: ignore[method-assign]
    part(inputs(4, 8)[0])
    assert int(seen[0].max()) <= 8  # 0.5 * 64 slots / 4 experts
    assert int(seen[0].sum()) <= 32 < 64  # half of the products are not made


def test_generation_with_a_cache_drops_nothing():
    part = layer(MoEConfig(experts=4, top_k=2, capacity=0.1)).eval()
    free = layer(MoEConfig(experts=4, top_k=2)).eval()
    x, tokens = inputs()
    assert torch.equal(part(x, None, tokens, cached=True)[0], free(x, None, tokens)[0])
    assert not torch.equal(part(x, None, tokens)[0], free(x, None, tokens)[0])


def test_the_bias_keeps_its_precision_when_a_model_becomes_bf16():
    part = layer(MoEConfig(experts=4, router=SigmoidTopKConfig()), dtype=torch.float32)
    before = part.router.bias.clone()
    part.bfloat16()
    assert part.experts.up_proj.dtype == torch.bfloat16
    assert part.router.bias.dtype == torch.float32 and torch.equal(part.router.bias, before)
    assert part.double().router.bias.dtype == torch.float64


def test_protocols():
    part = layer(MoEConfig())
    assert isinstance(part, Observer) and isinstance(part.dispatch, ExpertDispatcher)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts": 4, "top_k": 5}, "top_k 5 is more than experts 4"),
        ({"router": SigmoidTopKConfig(n_group=3)}, "router: n_group 3 must divide experts 8"),
        ({"top_k": 3, "router": SigmoidTopKConfig(n_group=4, topk_group=1)}, "router: topk_group 1 leaves 2 of 8 experts"),
        ({"router": HashConfig(), "losses": Losses(z=1e-3)}, "router HashConfig is not learned"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig(**fields)


@pytest.mark.parametrize(
    ("moe", "fields", "message"),
    [
        (MoEConfig(first_dense=1), {}, "no layer experts"),
        (MoEConfig(every=2), {}, "no layer experts"),
        (MoEConfig(), {"mlp": SoftmaxTopKConfig()}, "does not declare"),
    ],
)
def test_a_decoder_that_cannot_have_experts_is_refused(moe, fields, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**SIZES | fields, moe=moe)


def test_frequency_and_first_dense():
    def sparse(**fields):
        model = DecoderConfig(**SIZES | {"layers": 6}, moe=MoEConfig(**fields)).build()
        return [int(name) for name, block in model.blocks.items() if isinstance(block.mlp, ExpertLayer)]

    assert sparse() == [0, 1, 2, 3, 4, 5]
    assert sparse(every=2) == [1, 3, 5]
    assert sparse(first_dense=3) == [3, 4, 5]
    assert sparse(every=2, first_dense=2) == [3, 5]


def test_a_gate_scales_what_shared_experts_add():
    """Against the two terms apart: the gate reads the token, and touches nothing of the chosen experts."""
    part = layer(MoEConfig(experts=4, shared=2, shared_gate=True, ffn_dim=12)).eval()
    x, _ = inputs()
    with torch.no_grad():
        found, _ = part(x)
        gate = (x * part.shared_gate[0]).sum(-1, keepdim=True).sigmoid()
        expected = gate * part.shared(x)
        part.shared_gate, shared = None, part.shared
        part.shared = None
        expected += part(x)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert isinstance(shared, torch.nn.Module)
    with pytest.raises(ValueError, match="shared_gate needs shared experts"):
        MoEConfig(shared_gate=True)


def test_norms_of_branches_are_around_shared_and_chosen_experts():
    """Against the plain layer on what the norms make; the router reads the stream itself."""
    part = layer(MoEConfig(experts=4, shared=2, ffn_dim=12, branch_norms=True)).eval()
    x, _ = inputs()
    with torch.no_grad():
        found, _ = part(x)
        routing = part.router(x.flatten(0, 1), None)
        matrices = [part.experts.gate_proj, part.experts.up_proj, part.experts.down_proj]
        chosen = torch.zeros_like(x)
        for at, token in enumerate(part.experts_norm(x).flatten(0, 1)):
            for expert, weight in zip(routing.experts[at], routing.weights[at], strict=True):
                made = feed_forward(token, *(matrix[expert] for matrix in matrices), SwiGLU())
                chosen.flatten(0, 1)[at] += weight * made
        expected = part.shared_post_norm(part.shared(part.shared_norm(x))) + part.experts_post_norm(chosen)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for moe in ({}, {"shared": 1, "shared_gate": True}):
        with pytest.raises(ValueError, match="branch_norms needs shared experts without a gate"):
            MoEConfig(branch_norms=True, **moe)
    whole = {"norm_placement": "sandwich", "moe": MoEConfig(experts=4, shared=1, branch_norms=True)}
    block = DecoderConfig(**SIZES, **whole).build().blocks["0"]
    assert block.mlp_norm is None and block.mlp_post_norm is not None
    with pytest.raises(ValueError, match=r"moe\.branch_norms does not support shared_norm"):
        DecoderConfig(**SIZES, **whole, shared_norm=True, parallel_residual=True)


def test_a_router_that_normalizes_its_input_has_the_weights_of_its_formula():
    part = layer(MoEConfig(experts=5, top_k=3, router=NormedTopKConfig(eps=1e-2))).router
    x = inputs()[0].detach().flatten(0, 1)
    z = x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt() * part.scale / 16**0.5
    exponents = (z @ part.weight.T).exp()
    chosen = exponents.topk(3)
    routing = part(x, None)
    assert torch.equal(routing.experts, chosen.indices)
    expected = chosen.values / chosen.values.sum(-1, keepdim=True) * part.expert_scale[chosen.indices]
    torch.testing.assert_close(routing.weights, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(routing.probabilities, exponents / exponents.sum(-1, keepdim=True), rtol=1e-12, atol=0)
