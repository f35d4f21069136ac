"""A foreign module and loop: every layout against the unsharded module, with the module's own weights and names."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_parallel import ParallelizedModule, parallelize
from forge_parallel.foreign.blocks import find_blocks
from forge_parallel.foreign.description import rules_of
from forge_parallel.foreign.pipeline import stage
from forge_parallel.model.parallel_model import gathered
from forge_parallel.transforms.compile import Compile
from forge_parallel.transforms.recompute import Recompute
from harness.pool import World
from harness.siblings import fast
from parallel.foreign_modules import BUILDERS, PLAN, VOCAB, Plain, llama, qwen3_moe, tied


def _tokens(rows: int) -> Tensor:
    return torch.randint(VOCAB, (rows, 7), generator=torch.Generator().manual_seed(5))


def _loss(output: Any, tokens: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _call(module: nn.Module, tokens: Tensor) -> Any:
    return module(tokens) if isinstance(module, Plain) else module(input_ids=tokens)


def _loop(module: nn.Module, parameters: Any, clip: Callable[[], Tensor], tokens: Tensor) -> tuple[list[float], list[float]]:
    """A loop that knows nothing of Forge, two steps of two accumulated micro-batches."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=False)
    losses, norms = [], []
    for _ in range(2):
        for half in tokens.chunk(2):
            loss = _loss(_call(module, half), half) / 2
            loss.backward()
            losses.append(loss.item())
        norms.append(float(clip()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def _alone(start: dict[str, Tensor], name: str, rows: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The unsharded module in plain torch."""
    module = BUILDERS[name]().double()
    module.load_state_dict(start, strict=False)
    halves = _tokens(rows)
    clip = lambda: torch.nn.utils.clip_grad_norm_(module.parameters(), 0.3)  # noqa: E731
    losses, norms = _loop(module, module.parameters(), clip, halves)
    return losses, norms, {key: value.detach() for key, value in module.named_parameters()}


def _sharded(
    name: str, layout: str, materialized: bool, more: list[Any], plan: dict[str, str] | None = None
) -> tuple[dict[str, Tensor], list[float], list[float], dict[str, Tensor]]:
    if materialized:
        torch.manual_seed(11)
    source: Any = BUILDERS[name]() if materialized else BUILDERS[name]
    plan = PLAN if plan is None and name in ("plain", "tied") and "tp" in layout else plan
    model = parallelize(source, layout, more, tp_plan=plan, compute="fp64", state="fp64", seed=3)
    start = model.state_dict(whole=True)
    rows = 4
    # micro-batches are cut over data ranks, so that each step sees the same rows in every layout
    halves = [half.chunk(model.data_ranks)[model.data_rank] for half in _tokens(rows).chunk(2)]
    with warnings.catch_warnings():
        if more:  # the compiler's own imports warn, and so does the way it looks at its inputs
            warnings.simplefilter("ignore")
        losses, norms = _loop(model.module, model.parameters(), lambda: model.clip_grad_norm(0.3), torch.cat(halves))
    return start, losses, norms, model.state_dict(whole=True)


def _equal(world: World, name: str, layout: str, materialized: bool, more: list[Any], plan: Any = None) -> None:
    results = world.run(_sharded, Layout.parse(layout).world, name, layout, materialized, more, plan, timeout=300)
    losses, norms, weights = _alone(results[0][0], name, 4)
    exact = 1e-7 if name == "mixtral" else 1e-9  # its router takes a softmax in fp32 whatever the model's format
    # AdamW turns the noise of a gradient near zero into a part of a step, which is 1e-2.
    near = 1e-5 if name == "mixtral" else exact
    for start, _, found_norms, found in results:
        assert found_norms == pytest.approx(norms, rel=exact)
        assert found.keys() >= weights.keys()
        for key, value in weights.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=near, msg=lambda text, key=key: f"{key}: {text}")
        for key in start:
            assert torch.equal(start[key], results[0][0][key]), key
    if "dp" not in layout:
        assert results[0][1] == pytest.approx(losses, rel=exact / 10)


CASES = [
    *((name, layout) for name in ("plain", "tied") for layout in ("1", "dp2", "tp2", "dp2tp2", "hsdp2x1tp2")),
    *(("llama", "dp2tp2"), ("llama, tied", "tp2"), ("qwen3", "tp2"), ("qwen3", "dp2tp2")),
    *(("mixtral", "tp2"), ("mixtral", "dp2tp2")),
]
FAST = (("plain", "1"), ("plain", "dp2"), ("tied", "dp2tp2"), ("llama, tied", "tp2"), ("qwen3", "tp2"), ("mixtral", "tp2"))


@pytest.mark.parametrize(("name", "layout"), fast(*FAST, of=CASES))
def test_a_builder_equals_the_unsharded_module(world: World, name: str, layout: str) -> None:
    _equal(world, name, layout, False, [])


@pytest.mark.parametrize("name", fast("tied", of=["tied", "llama"]))
def test_a_materialized_module_keeps_its_weights(world: World, name: str) -> None:
    _equal(world, name, "dp2tp2", True, [])
    torch.manual_seed(11)
    mine = BUILDERS[name]().double()
    for start, *_ in world.run(_sharded, 4, name, "dp2tp2", True, []):
        for key, value in mine.named_parameters():
            assert torch.equal(start[key], value), key


@pytest.mark.parametrize("policy", fast("selective", of=["full", "selective"]))
def test_recomputation(world: World, policy: Literal["full", "selective"]) -> None:
    _equal(world, "plain", "dp2tp2", False, [Recompute(policy=policy)])


@pytest.mark.slow
def test_compilation(world: World) -> None:
    _equal(world, "plain", "dp2tp2", False, [Compile()])


def test_the_initialiser_is_the_modules_own_and_the_same_in_every_layout(world: World) -> None:
    (alone,) = world.run(_sharded, 1, "llama", "1", False, [])
    for start, *_ in world.run(_sharded, 2, "llama", "tp2", False, []):
        for key, value in alone[0].items():
            assert torch.equal(start[key], value), key
    start = alone[0]
    assert torch.equal(start["model.norm.weight"], torch.ones(16, dtype=torch.float64))
    table = start["lm_head.weight"]
    assert table.std().item() == pytest.approx(0.02, rel=0.2), "LlamaConfig.initializer_range"
    assert not torch.equal(start["model.layers.0.mlp.up_proj.weight"], start["model.layers.1.mlp.up_proj.weight"])


def _different() -> str:
    torch.manual_seed(torch.distributed.get_rank())
    try:
        parallelize(Plain(), "dp2")
    except PlanError as refusal:
        return str(refusal)
    return "no refusal"


def test_different_weights_on_ranks_are_refused(world: World) -> None:
    for message in world.run(_different, 2):
        assert "the weights differ between ranks, first in embed.weight" in message


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"blocks.*.up": "diagonal"}, "style 'diagonal'"),
        ({"layers.*.up": "colwise"}, r"'layers\.\*\.up' \(colwise\) matches no module"),
        ({"blocks.*.norm": "colwise"}, r"needs an? Linear, but blocks\.0\.norm is a LayerNorm"),
        ({"blocks.*.norm": "replicate"}, "splits no parameter"),
    ],
)
def test_plans_that_cannot_be_followed_are_refused(plan: dict[str, str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        rules_of(Plain(), plan)


def test_a_tied_head_without_a_style_is_refused() -> None:
    with pytest.raises(PlanError, match=r"is tied to embed\.weight"):
        rules_of(tied(), {"embed": "embedding_rowwise"})


def test_e9_alternatives_in_a_models_own_plan_may_match_nothing(world: World) -> None:
    """Every layer of this Qwen3MoE has experts, so its plan's lines for dense layers match nothing."""
    _equal(world, "qwen3 moe", "tp2", False, [])


def test_e9_a_users_pattern_must_match() -> None:
    module = qwen3_moe()
    assert rules_of(module, module._tp_plan)
    with pytest.raises(PlanError, match=r"'model\.layers\.\*\.mlp\.up_proj' \(rowwise\) matches no module"):
        rules_of(module, {**module._tp_plan, "model.layers.*.mlp.up_proj": "rowwise"})


@pytest.mark.parametrize("name", ["tied", "llama, tied"])
def test_e8_a_tied_head_may_stay_whole(world: World, name: str) -> None:
    blocks = {key: value for key, value in PLAN.items() if key.startswith("blocks")}
    whole = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.gate_proj": "colwise"}
    _equal(world, name, "tp2", False, [], blocks if name == "tied" else {**whole, "model.layers.*.mlp.down_proj": "rowwise"})


class Stack(nn.Module):
    """Experts that are laid out as those of a transformers model."""

    def __init__(self, packed: int = 6, biased: bool = False, **layout: bool) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.empty(2, packed, 4))
        self.experts.down_proj = nn.Parameter(torch.empty(2, 4, 3))
        if biased:
            self.experts.bias = nn.Parameter(torch.empty(2, 4))
        for name, value in layout.items():
            setattr(self.experts, name, value)


EXPERTS = {"experts.gate_up_proj": "packed_colwise", "experts.down_proj": "rowwise", "experts": "moe_tp_experts"}


@pytest.mark.parametrize(
    ("changes", "plan", "message"),
    [
        ({"packed": 5}, EXPERTS, r"experts\.gate_up_proj is laid out differently"),
        ({"biased": True}, EXPERTS, "without biases"),
        ({"is_transposed": True}, EXPERTS, r"\(experts, outputs, inputs\)"),
        ({"is_concatenated": False}, EXPERTS, "one after the other"),
        ({}, {key: EXPERTS[key] for key in list(EXPERTS)[:2]}, "give its module the style 'moe_tp_experts'"),
        ({}, {key: EXPERTS[key] for key in list(EXPERTS)[1:]}, "does not split all of its weights"),
        ({}, {**EXPERTS, "experts.down_proj": "grouped_gemm"}, "'grouped_gemm'"),
        ({}, {**EXPERTS, "experts.gate_up_proj": "mla_kv_a_proj"}, "'mla_kv_a_proj'"),
    ],
)
def test_experts_that_are_stacked_otherwise_are_refused(changes: dict[str, Any], plan: dict[str, str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        rules_of(Stack(**changes), plan)


def _halves() -> list[tuple[int, ...]]:
    model = parallelize(BUILDERS["mixtral"], "tp2")
    experts: Any = model.module.get_submodule("model.layers.0.mlp.experts")
    whole = model.state_dict(whole=True)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    model.load_state_dict({key: torch.arange(value.numel()).view(value.shape).float() for key, value in whole.items()})
    first = torch.arange(3 * 18 * 16).view(3, 2, 9, 16)[:, :, slice(0, 5) if model.topology.rank == 0 else slice(5, 9)]
    assert torch.equal(experts.gate_up_proj, first.flatten(1, 2).float()), "its rows of the gate, then its rows of up"
    assert torch.equal(model.state_dict(whole=True)[name].flatten(), torch.arange(3 * 18 * 16).float())
    return [tuple(experts.gate_up_proj.shape), tuple(experts.down_proj.shape), tuple(whole[name].shape)]


def test_each_rank_has_its_part_of_every_packed_matrix(world: World) -> None:
    """Of 9 features, which two ranks do not share evenly."""
    found = world.run(_halves, 2)
    assert found == [[(3, 10, 16), (3, 16, 5), (3, 18, 16)], [(3, 8, 16), (3, 16, 4), (3, 18, 16)]]


def test_blocks_are_found() -> None:
    assert find_blocks(Plain()) == ["blocks.0", "blocks.1", "blocks.2"]
    assert find_blocks(nn.Linear(2, 2)) == []


def _stepped(layout: str) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    model = parallelize(Plain, layout, tp_plan=PLAN, compute="fp64", state="fp64")
    start = model.state_dict(whole=True)
    tokens = _tokens(4)
    mine = tokens.chunk(model.data_ranks)[model.data_rank]
    batches = [{"tokens": row[None]} for row in mine]
    keep = lambda batch: batch["tokens"][:, 1:] % 3 != 0  # noqa: E731 (rows with different numbers of tokens)

    def loss(output: Tensor, batch: Any) -> Tensor:
        each = F.cross_entropy(output[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten(), reduction="none")
        return (each * keep(batch).flatten()).sum()

    mean = model.step(batches, loss, lambda batch: keep(batch).sum())
    return float(mean), start, gathered(model, {name: t.grad for name, t, _ in model.trainable()})


@pytest.mark.parametrize(("layout", "size"), [("dp2", 2), ("dp2tp2", 4), ("pp2", 2), ("pp2dp2", 4), ("pp2tp2", 4)])
def test_a_step_weighs_tokens_over_all_ranks(world: World, layout: str, size: int) -> None:
    results = world.run(_stepped, size, layout)
    module = Plain().double()
    module.load_state_dict(results[0][1])
    tokens = _tokens(4)
    each = F.cross_entropy(module(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    keep = (tokens[:, 1:] % 3 != 0).flatten()
    expected = each[keep].mean()
    expected.backward()
    for mean, _, gradients in results:
        assert mean == pytest.approx(expected.item(), rel=1e-12)
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12)


def _stepped_llama(layout: str, name: str) -> tuple[float, float, dict[str, Tensor], dict[str, Tensor]]:
    model = parallelize(BUILDERS[name], layout, compute="fp64", state="fp64")
    start = model.state_dict(whole=True)
    batches = [{"input_ids": row} for row in _tokens(4).chunk(2)]

    def loss(output: Any, batch: Any) -> Tensor:
        logits = output if isinstance(output, Tensor) else output.logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="sum")

    mean = model.step(batches, loss, lambda batch: torch.tensor(batch["input_ids"][:, 1:].numel()))
    norm = model.clip_grad_norm(1e9)
    return float(mean), float(norm), start, gathered(model, {name: t.grad for name, t, _ in model.trainable()})


@pytest.mark.parametrize(("name", "layout"), [("llama, tied", "pp2"), ("llama", "pp2tp2")])
def test_transformers_models_run_in_a_pipeline(world: World, name: str, layout: str) -> None:
    results = world.run(_stepped_llama, Layout.parse(layout).world, layout, name, timeout=180)
    module = BUILDERS[name]().double()
    module.load_state_dict(results[0][2], strict=False)
    expected = _loss(module(input_ids=_tokens(4)), _tokens(4))
    expected.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(module.parameters(), 1e9))
    for mean, found_norm, _, gradients in results:
        assert mean == pytest.approx(expected.item(), rel=1e-12)
        assert found_norm == pytest.approx(norm, rel=1e-10)
        for key, parameter in module.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(gradients[key], parameter.grad, rtol=0, atol=1e-12)


class Scaling(Plain):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * 2.0
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def test_a_module_that_computes_between_its_modules_is_not_cut() -> None:
    with pytest.raises(PlanError, match=r"computes with the hidden states between embed and blocks\.0"):
        stage(Scaling(), ["blocks.0", "blocks.1", "blocks.2"], _tokens(2))
    with pytest.raises(PlanError, match="needs modules with parameters before and after its blocks"):
        stage(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["0", "1"], torch.zeros(2, 3, 2))


def _loaded() -> bool:
    model: ParallelizedModule = parallelize(Plain, "tp2", tp_plan=PLAN, seed=1)
    other = {key: torch.randn_like(value) for key, value in copy.deepcopy(Plain().state_dict()).items()}
    torch.manual_seed(0)
    other = {key: torch.randn(value.shape) for key, value in other.items()}
    model.load_state_dict(other)
    return all(torch.equal(value, other[key]) for key, value in model.state_dict(whole=True).items())


def test_whole_states_go_in_and_out_under_the_modules_names(world: World) -> None:
    assert world.run(_loaded, 2) == [True, True]


class Dropping(Plain):
    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.drop = nn.Dropout(rate)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.drop(super().forward(tokens))


class Unused(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)


def llama_dropping() -> nn.Module:
    return llama(attention_dropout=0.1)


def sleeping() -> nn.Module:
    """As transformers' `from_pretrained` gives it: a loop calls `train()` later."""
    return Dropping().eval()


def gpt2_without_dropout() -> nn.Module:
    """Its configuration still has a `summary_first_dropout` of 0.1, of a head that it does not have."""
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_head=4, n_layer=2, vocab_size=VOCAB, n_positions=16, **rates))


class LayerDrop(Plain):
    """As Whisper: a random number is drawn, and compared with a rate."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if not (self.training and torch.rand([]) < self.rate):
                x = block(x)
        return self.head(self.norm(x))


TABLE_AND_HEAD = {"transformer.wte": "embedding_rowwise", "lm_head": "colwise_gather_output"}
DROPPING: dict[str, tuple[Callable[[], nn.Module], dict[str, str] | None, str]] = {
    "dropout": (Dropping, PLAN, "drop draws random numbers"),
    "dropout of attention": (llama_dropping, None, "model.layers.0.self_attn"),
    "evaluation": (sleeping, PLAN, "drop draws random numbers"),
    "layer drop": (partial(LayerDrop, 1e-6), PLAN, "the module itself draws random numbers"),
    "not called": (Unused, PLAN, ""),
    "rate of zero": (partial(Dropping, 0.0), PLAN, ""),
    "layer drop of zero": (partial(LayerDrop, 0.0), PLAN, ""),
    "gpt2": (gpt2_without_dropout, TABLE_AND_HEAD, ""),
}


def _refusal(named: str, layout: str) -> str:
    build, plan, _ = DROPPING[named]
    try:
        parallelize(build, layout, tp_plan=plan)
    except PlanError as refusal:
        return str(refusal)
    return ""


def _refusals() -> list[str]:
    return [_refusal(named, "tp2") for named in DROPPING]


def test_trials_d8_dropout_under_tp_is_judged_by_what_runs(world: World) -> None:
    for messages in world.run(_refusals, 2):
        for message, (_, _, expected) in zip(messages, DROPPING.values(), strict=True):
            assert (message == "") == (expected == ""), message
            assert expected in message
    assert not _refusal("dropout", "1"), "one rank draws for itself"


def test_low_precision_is_spanned_or_refused() -> None:
    model = parallelize(Plain, "1", compute="bf16")
    tokens = _tokens(2)
    with pytest.raises(PlanError, match=r"model\.computing"):
        model.module(tokens)
    with model.computing():
        out = model.module(tokens)
        out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_axes_that_need_a_seam_are_refused() -> None:
    with pytest.raises(PlanError, match="cp = 2 is not supported"):
        parallelize(Plain, "cp2")
