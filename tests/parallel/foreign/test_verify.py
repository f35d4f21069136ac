"""`verify_layout`: one probe step against one process finds what no static rule is told of. Rules are switched off to see it."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.errors import PlanError
from forge_parallel import parallelize, verify_layout
from forge_parallel.foreign import module
from forge_parallel.foreign.weights import ConstructorRecording
from forge_parallel.launch import local_processes
from harness.pool import World
from harness.siblings import fast
from parallel.foreign_modules import PLAN, Plain
from parallel.tensor.test_following import ATTENTION, FUSED, Attention, Fused, Interleaved, Model


class Dropping(Plain):
    """Functional dropout, which no module shows."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.dropout(self.head(self.norm(x)), 0.2, self.training)


class Batched(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Across()


class Across(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Skipping(Plain):
    """Each block gets the embedding, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Skip() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x0 = x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, x0)
        return self.head(self.norm(x))


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor, x0: Tensor) -> Tensor:
        return x + self.mix(x) * x0


class Changed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm.bias.data.add_(1.0)
        self.head.weight.data.mul_(0.5)


@pytest.mark.parametrize("layout", ["1", "dp4", "hsdp2x1", "dp2tp2", "pp2"])
def test_a_right_layout_passes(layout: str) -> None:
    """On two processes an axis, whatever the number of ranks."""
    before = torch.get_rng_state()
    verify_layout(Plain, layout, tp_plan=PLAN)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_module_with_weights_passes_and_is_unchanged() -> None:
    module = Plain(tied=True)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    verify_layout(module, "tp2", tp_plan=PLAN)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(not hook for part in module.modules() for hook in (part._forward_pre_hooks,))


def test_dropout_is_compared_while_it_drops_out() -> None:
    """The ranks of dp and the stages of pp draw what one process draws for the same rows and modules."""
    verify_layout(Dropping, "dp2", tp_plan=PLAN)
    verify_layout(DroppingBlocks, "dp2pp2")


class DroppingBlocks(Plain):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up = nn.Sequential(block.up, nn.Dropout(0.3))


def _no_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing could be seen statically. Children are forked, so they have it, too."""
    monkeypatch.setattr(module, "follow", lambda *_: frozenset())
    monkeypatch.setattr(module, "refuse_batch_statistics", lambda _: None, raising=False)
    monkeypatch.setattr("forge_parallel.foreign.pipeline.must_hand_on", lambda *_: None, raising=False)


WRONG: list[tuple[str, Callable[[], nn.Module], str, dict[str, str], str]] = [
    ("e2", Skipping, "pp2", {}, r"gradient of .* is off.*Under pp blocks may depend on nothing but"),
    ("e4", lambda: Model(Attention), "tp2", ATTENTION, r"gradient of blocks\.0\.q_norm\.weight is off .*Under tp"),
    ("e5", Dropping, "tp2", PLAN, r"its forward draws random numbers; "),
    ("e5", lambda: Model(Fused), "tp2", FUSED, r"loss is .*gradient of .*Under tp everything between"),
    ("e5", Batched, "dp2", {}, r"buffer norm\.inner\.running_mean has another value on rank 0.*Under dp_shard"),
]


@pytest.mark.parametrize(("label", "build", "layout", "plan", "message"), WRONG)
def test_e2_e4_e5_are_found(
    monkeypatch: pytest.MonkeyPatch, label: str, build: Any, layout: str, plan: dict[str, str], message: str
) -> None:
    _no_rules(monkeypatch)
    with pytest.raises(PlanError, match=rf"verify: layout \S+ differs from one process: .*{message}"):
        verify_layout(build, layout, tp_plan=plan)


def test_e3_lost_initial_values_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    verify_layout(Changed, "1")
    needed = ConstructorRecording._needed
    lost = ("mul_", "add_")  # what a constructor does beyond a layer's own rule
    monkeypatch.setattr(
        ConstructorRecording,
        "_needed",
        lambda self, key: {at for at in needed(self, key) if self._tape[at].function.overloadpacket.__name__ not in lost},
    )
    with pytest.raises(PlanError, match=r"initial value of norm\.bias; initial value of head\.weight$"):
        verify_layout(Changed, "1")


def test_good_forms_of_what_is_refused_pass() -> None:
    verify_layout(lambda: Model(Interleaved), "tp2", tp_plan=FUSED)


def _verified(build: Callable[[], nn.Module], layout: str, plan: dict[str, str] | None) -> str:
    try:
        model = parallelize(build, layout, tp_plan=plan, verify=True)
    except PlanError as error:
        return str(error)
    return str(model.topology.layout)


def test_under_a_launcher_the_layout_itself_is_tried(world: World) -> None:
    """All ranks call it, agree, and go on; a fault is the same error on all of them."""
    assert world.run(_verified, 2, Plain, "tp2", PLAN) == ["tp2", "tp2"]
    found = world.run(_verified, 2, Counting, "dp2", PLAN)
    assert len(set(found)) == 1
    assert "buffer count has another value on rank 0" in found[0]


class Counting(Plain):
    """Sums up what it sees: each data rank sees a part."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.count += tokens.sum()
        return super().forward(tokens)


def test_an_example_and_a_loss_of_ones_own() -> None:
    class Two(Plain):
        def forward(self, tokens: Tensor, *, weights: Tensor) -> Any:  # type: ignore[override]
            return {"logits": super().forward(tokens), "weights": weights.sum()}

    example = {"tokens": torch.arange(24).view(4, 6) % 19, "weights": torch.ones(4, 6)}
    loss: Any = lambda out, rows: F.cross_entropy(out["logits"].flatten(0, 1), rows["tokens"].flatten())  # noqa: E731
    verify_layout(Two, "dp2", example=example, loss=loss)
    with pytest.raises(PlanError, match="has 3 rows, which cannot be split into 2 equal shares"):
        verify_layout(Two, "dp2", example={name: value[:3] for name, value in example.items()}, loss=loss)


def _interrupted(kind: str) -> Any:
    if kind == "raises":
        raise ValueError("from a rank")
    if kind == "ends":
        os._exit(3)
    if kind == "hangs":
        torch.distributed.barrier() if torch.distributed.get_rank() else __import__("time").sleep(60)
    return torch.distributed.get_rank()


@pytest.mark.parametrize(
    ("kind", "message"),
    [("raises", "ValueError: from a rank"), ("ends", "ended without a message"), ("hangs", "did not finish in time")],
)
def test_no_process_is_left_behind(monkeypatch: pytest.MonkeyPatch, kind: str, message: str) -> None:
    children: list[int] = []
    fork = os.fork

    def counted() -> int:
        if child := fork():
            children.append(child)
        return child

    monkeypatch.setattr(os, "fork", counted)
    with pytest.raises(PlanError, match=message):
        local_processes.fork_local(2, lambda: _interrupted(kind), 3.0)
    assert len(children) == 2
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    assert local_processes.fork_local(2, lambda: _interrupted("none"), 60.0) == [0, 1]


def test_a_fork_that_cannot_compute_gradients_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """As builds of torch for GPUs answer once this process has computed gradients."""

    def refuse(*_: object) -> None:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")

    monkeypatch.setattr(torch.Tensor, "backward", refuse)
    with pytest.raises(PlanError, match="before the first backward, in a process of its own, or under torchrun"):
        local_processes.fork_local(2, lambda: 1, 60.0)


class Narrow(Plain):
    """Refuses formats, as operators do that have no kernel for them."""

    refused: tuple[torch.dtype, ...] = (torch.float64,)

    def forward(self, tokens: Tensor) -> Tensor:
        if (dtype := next((p.dtype for p in self.parameters()), None)) in self.refused:
            raise RuntimeError(f"no kernel for {dtype}")
        return super().forward(tokens)


class Narrower(Narrow):
    refused = (torch.float64, torch.float32)


class Narrowest(Narrow):
    refused = (torch.float64, torch.float32, torch.bfloat16)


class NarrowlyWrong(Narrow):
    """Its blocks see the number of the features that a rank has."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.down = Divided(12, 8)


class Divided(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + x.shape[-1] / 12)


@pytest.mark.parametrize(
    ("build", "layout", "width"), [(Narrow, "dp2tp2", "fp32"), (Narrow, "pp2", "fp32"), (Narrower, "dp2", "bf16")]
)
def test_trials_d6_the_widest_format_that_operators_accept(build: Callable[[], nn.Module], layout: str, width: str) -> None:
    with pytest.warns(UserWarning, match=rf"does not compute in fp64, so both sides were compared in {width}"):
        assert verify_layout(build, layout, tp_plan=PLAN) == width
    assert verify_layout(Plain, layout, tp_plan=PLAN) == "fp64"


def test_trials_d6_a_wrong_layout_is_found_in_a_narrow_format(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_rules(monkeypatch)
    with pytest.raises(PlanError, match=r"verify: layout \S+ differs from one process \(in fp32; .*gradient of"):
        verify_layout(NarrowlyWrong, "tp2", tp_plan=PLAN)


def test_trials_d6_a_module_that_fails_is_refused_on_all_ranks(world: World) -> None:
    found = world.run(_verified, 2, Narrowest, "dp2", None)
    assert (
        found == ["verify: the module fails in one process, in fp64, fp32, bf16: RuntimeError: no kernel for torch.bfloat16"] * 2
    )


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, intermediate_size=32, num_local_experts=4))


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, intermediate_size=32, head_dim=8))


SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "experts_implementation": "grouped_mm",
}


@pytest.mark.parametrize("build", fast(mixtral, of=[mixtral, qwen3_moe]))
def test_trials_d6_experts_with_grouped_products(build: Callable[[], nn.Module]) -> None:
    with pytest.warns(UserWarning, match="in fp32"):
        verify_layout(build, "tp2")


def test_trials_d6_batch_norm_has_its_statistics_in_the_format_of_its_inputs() -> None:
    tokens = torch.arange(24).view(4, 6) % 19
    model = parallelize(Batched, "1", compute="fp64", state="fp64")
    plain = Batched().double()
    plain.load_state_dict(model.state_dict(whole=True))
    assert torch.equal(model(tokens), plain(tokens))
    assert torch.equal(model.module.norm.inner.running_mean, plain.norm.inner.running_mean)  # type: ignore[union-attr]
    with pytest.raises(PlanError, match=r'norm\.inner \(BatchNorm1d\) keeps running statistics .*set compute = "fp32"'):
        parallelize(Batched, "1", compute="bf16")
