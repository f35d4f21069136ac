"""A dry run in which equal blocks are left out gives the estimate of one in which every block runs, in every field."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from forge_core.layout import Layout
from forge_models.blocks.moe.routers import SigmoidTopK
from forge_models.components.attentions import GQA, MLA
from forge_models.components.compressed import CompressedMQA
from forge_models.components.decoder import DecoderConfig, MTPConfig
from forge_models.components.experts import HashConfig, MoEConfig, SigmoidTopKConfig
from forge_models.objectives import CrossEntropy
from forge_models.shape import Losses
from forge_parallel.dryrun import estimate
from forge_parallel.dryrun.attribution import Attribution, segments_of
from forge_parallel.dryrun.blocks import Repeats, runs, shorten
from forge_parallel.dryrun.estimate import Estimate, Workload, dry_runs
from forge_parallel.dryrun.fake_world import ACCELERATORS
from forge_parallel.dryrun.memory import Ledger
from forge_parallel.dryrun.record import WORK, Call, Irregular, StepEvent, StepRecord, Unit
from forge_parallel.dryrun.traffic import Flow
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint
from forge_parallel.optim.elementwise import AdamW
from forge_parallel.optim.groups import NO_SETTINGS, Setting, Settings
from forge_parallel.optim.optimizers import (
    AdamW8bitConfig,
    AdamWConfig,
    LionConfig,
    MuonConfig,
    ScheduleFreeAdamWConfig,
)
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.pipeline.schedules import (
    DualPipeV,
    GPipe,
    Interleaved,
    InterleavedZeroBubble,
    OneForwardOneBackward,
    ZeroBubbleV,
)
from forge_parallel.transforms.context.transform import ContextParallel
from forge_parallel.transforms.expert import ExpertParallel
from forge_parallel.transforms.float8.transform import Float8
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel

SHAPE = DecoderConfig(dim=32, layers=7, heads=4, kv_heads=2, ffn_dim=48, vocab_size=64, max_length=64)
MOE = MoEConfig(
    experts=4, top_k=2, shared=1, router=SigmoidTopKConfig(bias_rate=0.1), losses=Losses(global_batch=0.1, z=0.1), ffn_dim=16
)
MODELS: dict[str, DecoderConfig] = {
    "dense": SHAPE,
    "deep": replace(SHAPE, layers=20),
    "wide": replace(SHAPE, dim=64, ffn_dim=96),
    "tied": replace(SHAPE, tied_embeddings=True),
    "tied deep": replace(SHAPE, layers=14, tied_embeddings=True),
    "mtp": replace(SHAPE, mtp=MTPConfig(depth=2), tied_embeddings=True),
    "latent": replace(SHAPE, kv_heads=None, attention=MLA(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)),
    "windows": replace(SHAPE, layers=11, attention=GQA(window=8, global_every=2)),
    "windows of three": replace(SHAPE, layers=17, attention=GQA(window=8, global_every=3)),
    "compressed keys": replace(
        SHAPE,
        layers=14,
        kv_heads=None,
        attention=CompressedMQA(
            window=8,
            q_lora_rank=8,
            o_groups=2,
            o_lora_rank=8,
            heavy_rate=8,
            index_heads=3,
            index_dim=8,
            top_k=4,
        ),
    ),
    "experts": replace(SHAPE, moe=MOE),
    "experts in every second": replace(SHAPE, layers=12, moe=replace(MOE, every=2, first_dense=1)),
    "experts after dense": replace(SHAPE, layers=12, moe=replace(MOE, first_dense=5)),
    "experts by hash": replace(SHAPE, moe=replace(MOE, router=HashConfig(), losses=Losses())),
    "limited experts": replace(SHAPE, moe=replace(MOE, capacity=1.0)),
}


@dataclass(frozen=True)
class Case:
    """A model in a layout; `whole` says that every block runs, or None that it may: the two halves of a backward are not
    followed."""

    layout: str
    transforms: tuple[Any, ...] = ()
    model: str = "dense"
    schedule: Any = None
    split: str = "balanced"
    micro_batches: int = 1
    optimizer: Any = AdamWConfig()  # noqa: RUF009 (frozen)
    compute: str = "bf16"
    state: str = "fp32"
    documents: bool = False
    accelerator: str | None = None
    ranks: tuple[int, ...] = (0,)
    whole: bool | None = False
    length: int = 32


SHARD, FULL, TENSOR = FullyShard(), Recompute(policy="full"), TensorParallel()
CASES: dict[str, Case] = {
    "1": Case("1"),
    "1 fp32": Case("1", compute="fp32", micro_batches=8),
    "1 recompute": Case("1", (Recompute(),), documents=True, micro_batches=2),
    "1 recompute every second": Case("1", (Recompute(policy="full", every=2),), "deep"),
    "dp": Case("dp4", (SHARD,), ranks=(0, 3)),
    "dp3 with padding": Case("dp3", (SHARD, Recompute()), "latent", ranks=(2,), micro_batches=2),
    "dp each": Case("dp2", (FullyShard(reduce="each"),), micro_batches=8),
    "dp last": Case("dp2", (SHARD, FULL), micro_batches=8),
    "dp keep": Case("dp2", (FullyShard(reshard=False),), micro_batches=2),
    "hsdp": Case("hsdp2x2", (SHARD, Recompute(every=3)), "deep", micro_batches=2),
    "ddp": Case("hsdp4x1", (SHARD,)),
    "dp tied": Case("dp4", (SHARD,), "tied"),
    "dp mtp": Case("dp4", (SHARD, Recompute()), "mtp", micro_batches=2),
    "tp": Case("tp2", (TENSOR,)),
    "tp whole": Case("tp2", (TensorParallel(sequence_parallel=False), FULL), "tied"),
    "tp and dp": Case("dp2tp2", (TENSOR, SHARD, Recompute()), micro_batches=8, ranks=(0, 3)),
    "tp of keys": Case("dp2tp4", (TENSOR, SHARD), "mtp"),
    "cp all-gather": Case("cp2", (ContextParallel(kind="all_gather"), SHARD), documents=True),
    "cp ring": Case("dp2cp2", (ContextParallel(kind="ring"), SHARD, Recompute()), documents=True, micro_batches=2),
    "cp ulysses": Case("cp2", (ContextParallel(kind="ulysses"), SHARD), "windows"),
    "cp and tp": Case("dp2cp2tp2", (TENSOR, ContextParallel(kind="all_gather"), SHARD), accelerator="h100"),
    "windows": Case("dp2", (SHARD, Recompute()), "windows"),
    "windows of three": Case("dp2", (SHARD, Recompute(every=2)), "windows of three", whole=True),
    "windows of three, kept": Case("dp2", (SHARD,), "windows of three", accelerator="h100"),
    "compressed keys": Case("dp2", (SHARD, Recompute()), "compressed keys", documents=True),
    "experts": Case("dp4", (SHARD,), "experts"),
    "experts fp32": Case("1", (), "experts by hash", compute="fp32", micro_batches=2),
    "experts, limited": Case("dp2", (SHARD, Recompute()), "limited experts", documents=True),
    "experts in every second": Case("dp2tp2", (TENSOR, SHARD), "experts in every second"),
    "experts after dense": Case("dp2", (SHARD, Recompute()), "experts after dense", micro_batches=2),
    "ep": Case("dp4ep2", (ExpertParallel(), SHARD, Recompute()), "experts", micro_batches=2),
    "ep gathers": Case("dp4ep4", (ExpertParallel(dispatcher="all_gather"), SHARD), "experts"),
    "ep in nodes": Case("dp4ep4", (ExpertParallel(dispatcher="hierarchical", ranks_per_node=2), SHARD), "experts"),
    "ep etp": Case("dp2tp2ep2etp2", (ExpertParallel(overlap=False), TENSOR, SHARD), "experts", accelerator="h100"),
    "pp 1f1b": Case("pp2", schedule=OneForwardOneBackward(), model="deep", micro_batches=4, ranks=(0, 1)),
    "pp gpipe": Case("pp2dp2", (SHARD, FULL), "tied deep", GPipe(), "9,5", 8, ranks=(0, 2)),
    "pp uneven": Case("pp2dp2", (SHARD, Recompute()), "deep", OneForwardOneBackward(), "13,7", 2, ranks=(0, 2)),
    "pp interleaved": Case("pp2dp2", (SHARD,), "deep", Interleaved(), micro_batches=8, ranks=(0, 2)),
    "pp interleaved zero bubble": Case("pp2", (), "deep", InterleavedZeroBubble(), micro_batches=8, ranks=(0, 1), whole=None),
    "pp zero bubble": Case("pp2dp2", (SHARD,), "deep", ZeroBubbleV(), micro_batches=8, ranks=(0, 2), whole=None),
    "pp dual": Case("pp2", (), "deep", DualPipeV(), micro_batches=8, ranks=(0, 1), whole=None),
    "pp tp": Case("pp2dp2tp2", (TENSOR, SHARD, Recompute()), "deep", OneForwardOneBackward(), micro_batches=4, ranks=(0, 4)),
    "pp mtp": Case("pp2", (), "mtp", OneForwardOneBackward(), "6,1", 2, ranks=(0, 1)),
    "pp reshard": Case("pp2dp2", (FullyShard(reshard=True),), "deep", ZeroBubbleV(), micro_batches=4, ranks=(0, 2), whole=None),
    "pp one block in the second": Case("pp2", (), "dense", OneForwardOneBackward(), "6,1", 2, ranks=(0, 1)),
    "float8": Case("dp2", (Float8(emulate=True), SHARD, Recompute())),
    "float8 but the first": Case("dp2", (Float8(emulate=True, exclude=["blocks.0.*"]), SHARD), "deep"),
    "float8 rowwise": Case("dp2tp2", (Float8(emulate=True, recipe="rowwise"), TENSOR, SHARD), "wide"),
    "bf16 state": Case("dp2", (SHARD,), state="bf16"),
    "lion": Case("dp2", (SHARD,), optimizer=LionConfig(), compute="fp32"),
    "lion alone": Case("1", (), optimizer=LionConfig(), compute="fp32", micro_batches=2),
    "schedule free": Case("dp2tp2", (TENSOR, SHARD), optimizer=ScheduleFreeAdamWConfig()),
    "eight bits": Case("dp2", (SHARD,), optimizer=AdamW8bitConfig(block=4, smallest=0)),
    "muon": Case("dp2", (SHARD,), optimizer=MuonConfig(), whole=True),
    "a100": Case("dp2", (SHARD, Recompute(keep=["attention"])), accelerator="a100", compute="fp32"),
    "fp64": Case("dp2", (SHARD,), compute="fp64", state="fp64", accelerator="h100"),
    "few blocks": Case("dp2", (SHARD,), "few", whole=True),
}
MODELS["few"] = replace(SHAPE, layers=4)


def estimates(case: Case, **settings: Any) -> list[Estimate]:
    workload = Workload(
        MODELS[case.model].build,
        CrossEntropy().build(),
        case.optimizer.build,
        rows=2,
        length=case.length,
        micro_batches=case.micro_batches,
        compute=case.compute,
        state=case.state,
        documents=case.documents,
    )
    pipeline = Pipeline(case.schedule.build(), case.split) if case.schedule is not None else None
    plan = Plan.of(case.transforms, Layout.parse(case.layout), pipeline)
    accelerator = ACCELERATORS[case.accelerator] if case.accelerator else None
    return dry_runs(workload, plan, case.ranks, accelerator=accelerator, **settings)


@pytest.fixture
def left_out(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether blocks were left out, for each attempt."""
    attempts: list[bool] = []
    original = estimate._run_of

    def noted(workload: Any, blueprint: Any, plan: Any, repeats: Any, *others: Any) -> Any:
        attempts.append(bool(repeats.left_out))
        return original(workload, blueprint, plan, repeats, *others)

    monkeypatch.setattr(estimate, "_run_of", noted)
    return attempts


FAST_CASES = ("dp",)


@pytest.mark.parametrize("name", [name if name in FAST_CASES else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_the_estimate_is_that_of_all_blocks(left_out: list[bool], name: str) -> None:
    case = CASES[name]
    quick = estimates(case)
    assert case.whole is None or (False in left_out) == case.whole
    assert quick == estimates(case, every_block=True)


class Careless(DecoderConfig):
    """Builds a decoder of a class that declares nothing."""

    def build(self) -> Any:
        module = super().build()
        module.__class__ = type("Other", (type(module),), {})
        return module


class OtherShard(FullyShard):
    """A transform that inherits its declaration."""


class OtherAdamW(AdamW):
    """An optimizer that inherits its declaration."""


@dataclass(frozen=True)
class Built:
    optimizer: Any

    def build(self, model: Any) -> Any:
        return self.optimizer(model, 1e-3, (0.9, 0.95), 1e-8, 0.1)


def test_what_declares_nothing_itself_runs_every_block(left_out: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("1")
    estimates(replace(case, optimizer=Built(AdamW)))
    assert left_out == [True]
    left_out.clear()
    estimates(replace(case, optimizer=Built(OtherAdamW)))
    assert left_out[-1] is False
    left_out.clear()
    estimates(replace(case, transforms=(OtherShard(),)))
    assert left_out == [False]
    left_out.clear()
    monkeypatch.setitem(MODELS, "careless", Careless(**vars(SHAPE)))
    estimates(replace(case, model="careless"))
    assert left_out == [False]


def test_periods_that_leave_out_most_are_found() -> None:
    assert runs("aaaaaaa", 4) == [(0, 1, 7)]
    assert runs("aaaa", 4) == []
    assert runs("xababababababy", 4) == [(1, 2, 6)]
    assert runs("aaaaaabbbbbb", 4) == [(0, 1, 6), (6, 1, 6)]
    assert runs("aabaabaabaabaab", 4) == [(0, 3, 5)]


def test_blocks_that_differ_are_no_repetitions() -> None:
    """Of 7 blocks, settings of the one in the middle leave 3 equal ones on each side."""
    blueprint = Blueprint.of(SHAPE.build)
    plan = Plan.of([], Layout())
    assert shorten(blueprint, plan, Settings(each={"blocks.3.mlp.up_proj.weight": Setting(lr=0.5)}), 4) is None
    assert shorten(blueprint, plan, Settings(frozen=frozenset({"blocks.3.mlp.up_proj.weight"})), 4) is None
    blueprint.module.get_submodule("blocks.3.mlp").activation_scale = 2  # type: ignore[assignment]
    assert shorten(blueprint, plan, NO_SETTINGS, 4) is None
    found = shorten(Blueprint.of(SHAPE.build), plan, NO_SETTINGS, 4)
    assert found is not None
    short, _, repeats = found
    assert short.specs.blocks == ("blocks.0", "blocks.1", "blocks.2", "blocks.6")
    assert repeats.left_out == {0: 3}
    assert repeats.unit_of("blocks.6.mlp.up_proj.weight") == Unit(0, 3)
    assert repeats.unit_of("norm.weight") is None


def test_blocks_that_share_a_module_are_no_repetitions() -> None:
    """Of 7 blocks, 2 and 3 share a projection, so there are not more than 3 equal ones in a row."""
    blueprint = Blueprint.of(SHAPE.build)
    blueprint.module.get_submodule("blocks.2.mlp").up_proj = blueprint.module.get_submodule("blocks.3.mlp.up_proj")
    assert shorten(blueprint, Plan.of([], Layout()), NO_SETTINGS, 4) is None


def test_a_block_with_a_hook_or_a_tensor_of_another_shape_is_no_repetition() -> None:
    plan = Plan.of([], Layout())
    blueprint = Blueprint.of(SHAPE.build)
    blueprint.module.get_submodule("blocks.3.mlp").register_forward_hook(lambda *_: None)
    assert shorten(blueprint, plan, NO_SETTINGS, 4) is None
    blueprint = Blueprint.of(SHAPE.build)
    wide = torch.nn.Parameter(torch.empty(96, 32, device="meta"))
    blueprint.module.get_submodule("blocks.3.mlp.up_proj").weight = wide  # type: ignore[assignment]
    assert shorten(blueprint, plan, NO_SETTINGS, 4) is None


def test_a_unit_with_other_bytes_than_the_next_stands_for_none() -> None:
    repeats, table = Repeats(left_out={0: 3}, kept={0: 4}), [(Unit(0, number), 8) for number in range(4)]
    assert repeats.standing_for_all([], [table]).missing == {Unit(0, 1): 3}
    with pytest.raises(Irregular, match="has 8 bytes or elements, and"):
        repeats.standing_for_all([], [table, [*table[:2], (Unit(0, 2), 9), table[3]]])


def test_a_block_with_an_observer_that_declares_nothing_is_no_repetition() -> None:
    plan = Plan.of([], Layout())
    assert shorten(Blueprint.of(MODELS["experts"].build), plan, NO_SETTINGS, 4) is not None
    blueprint = Blueprint.of(MODELS["experts"].build)
    observers = [module for module in blueprint.module.modules() if isinstance(module, SigmoidTopK)]
    other = type("Other", (SigmoidTopK,), {})
    for module in observers:
        module.__class__ = other
    assert len(observers) == 7
    assert shorten(blueprint, plan, NO_SETTINGS, 4) is None


def entry(number: int | None, size: int, what: Any = "work") -> StepEvent:
    return StepEvent(None if number is None else Unit(0, number), what, size)


def test_a_record_is_unrolled_where_units_repeat() -> None:
    """Forward, backward, and a loop with an entry of unknown owner; the total of all blocks is summed by hand."""
    flow = Flow("dp_shard", "all_gather", 1, 8, 4)
    forward = [entry(number, size) for number in range(4) for size in (10, 1)]
    backward = [entry(number, size) for number in (3, 2, 1, 0) for size in (-11, 5, -5)]
    loop = [item for number in range(4) for item in (entry(number, 8, Call(flow, 2)), entry(None, 2), entry(None, -2))]
    record = StepRecord([entry(None, 100), *forward, *backward, *loop])
    whole = record.unrolled({Unit(0, 1): 3})
    assert sum(record.peak().values()) == 100 + 4 * 11
    assert sum(whole.record.peak().values()) == 100 + 7 * 11
    assert whole.record.flows() == [flow * 7]
    assert whole.moved(1) == 1
    assert whole.moved(5) == 5 + 3 * 2  # where the next unit begins, behind the repeated ones
    assert whole.moved(1 + len(forward)) == 1 + len(forward) + 3 * 2
    assert len(whole.record.entries) == len(record.entries) + 3 * (2 + 3 + 3)


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([entry(1, 5), entry(2, 6)], "do not do the same"),
        ([entry(1, 5), entry(None, 1), entry(2, 5)], "do not do the same"),
        ([entry(1, 5)], "alone"),
        ([entry(1, 5), entry(2, 5), entry(2, 7)], "alone"),
        ([StepEvent(None, "work", 9, ((Unit(0, 1), 4), (Unit(0, 2), 5)))], "different shares"),
    ],
)
def test_what_does_not_repeat_is_irregular(entries: list[StepEvent], why: str) -> None:
    with pytest.raises(Irregular, match=why):
        StepRecord(entries).unrolled({Unit(0, 1): 3})


def test_runs_that_repeat_in_one_place_are_irregular() -> None:
    other = [StepEvent(Unit(1, number), "work", 5) for number in (1, 2)]
    with pytest.raises(Irregular, match="in the same place"):
        StepRecord([entry(1, 5), other[0], entry(2, 5), other[1], entry(None, 5)]).unrolled({Unit(0, 1): 3, Unit(1, 1): 3})


def test_shared_entries_grow() -> None:
    """An all-reduce over 3 ranks of 4 bytes per block: 2 blocks of 6 left out, 24 bytes, of which 2/3 go twice."""
    shares = tuple((Unit(0, number), 4) for number in range(4))
    call = Call(Flow("tp", "all_reduce", 1, 16, 22), 3)
    whole = StepRecord([StepEvent(None, call, 16, shares), StepEvent(None, "work", 16, shares)]).unrolled({Unit(0, 1): 2}).record
    assert whole.flows() == [Flow("tp", "all_reduce", 1, 24, 32)]
    assert whole.peak() == {"work": 24}


def test_owners_of_a_storage_follow_from_the_tensors_in_it() -> None:
    one, two = Unit(0, 1), Unit(0, 2)
    assert segments_of(64, [(0, 8, one), (8, 8, one)]) == ((one, 64),)
    assert segments_of(32, [(8, 8, two), (0, 8, one)]) == ((one, 8), (two, 8), (None, 16))
    ledger = Ledger(Attribution())
    tensors = torch.zeros(4), torch.zeros(2)
    ledger.own("state", zip((one, two), tensors, strict=True))
    with ledger.open():
        both = torch.cat(tensors)  # belongs to both
        doubled = both.double()
        each = torch._foreach_norm(list(tensors))
        alone = tensors[0] + 1
        part = both[4:] + 1
    entries = [item for item in ledger.record().entries if item.size and item.what == WORK]
    assert entries == [
        StepEvent(None, WORK, 24, ((one, 16), (two, 8))),
        StepEvent(None, WORK, 48, ((one, 32), (two, 16))),
        *(StepEvent(unit, WORK, 4) for unit in (one, two)),
        StepEvent(one, WORK, 16),
        StepEvent(two, WORK, 8),
    ]
    assert ledger.attribution is not None
    assert ledger.attribution.irregular is None
    with ledger.open():
        torch.outer(*tensors)
    assert "several blocks" in str(ledger.attribution.irregular)
    del doubled, each, alone, part


def test_a_buffer_of_unknown_size_that_blocks_fill_is_irregular() -> None:
    for whole in (False, True):
        ledger = Ledger(Attribution())
        tensor = torch.zeros(4)
        ledger.own("state", [(Unit(0, 1), tensor)])
        with ledger.open():
            buffer = torch.empty(4 if whole else 8)
            buffer[:4].copy_(tensor)
        assert ledger.attribution is not None
        assert (ledger.attribution.irregular is None) == whole
        del buffer
