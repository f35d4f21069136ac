"""What attention keeps for its backward on a GPU, by a dry run: nothing that grows with T x T, or a closed form."""

from dataclasses import replace
from typing import Any

import pytest

from forge_core.layout import Layout
from forge_models.components.attentions import GQA, MLA, IndexedMLA
from forge_models.components.compressed import CompressedMQA
from forge_models.components.decoder import DecoderConfig
from forge_models.objectives import CrossEntropy
from forge_parallel.dryrun.estimate import Workload, dry_run
from forge_parallel.dryrun.fake_world import ACCELERATORS
from forge_parallel.model.plan import Plan
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.transforms.context.transform import ContextParallel
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard

H100 = ACCELERATORS["h100"]
LENGTH, HEADS, HEAD_DIM = 512, 4, 16
MODEL = DecoderConfig(dim=64, layers=2, heads=HEADS, kv_heads=HEADS, ffn_dim=64, vocab_size=61, max_length=1024)
SEEDS = MODEL.layers * 2 * 8
"""The kernel's seed and offset of dropout, of each block."""


def workload(model: DecoderConfig, compute: str = "bf16", length: int = LENGTH) -> Workload:
    objective = CrossEntropy().build()
    return Workload(model.build, objective, AdamWConfig().build, rows=1, length=length, compute=compute)


def kept(
    model: DecoderConfig, length: int, *transforms: object, gpu: bool = True, layout: str = "1", compute: str = "bf16"
) -> int:
    plan = Plan.of(transforms, Layout.parse(layout))  # type: ignore[arg-type]
    return dry_run(workload(model, compute, length), plan, accelerator=H100 if gpu else None).activations


WINDOWED = replace(MODEL, attention=GQA(window=100))
CAPPED = replace(MODEL, attention=GQA(soft_cap=3.0))
LATENT = replace(MODEL, kv_heads=None, attention=MLA(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16))


@pytest.mark.parametrize("model", [WINDOWED, CAPPED, LATENT], ids=["window", "soft cap", "latent"])
def test_attention_of_a_gpu_keeps_no_square(model: DecoderConfig) -> None:
    """Twice as long rows keep twice as much, but for numbers of dropout: nothing grows with T x T. On a CPU something does."""
    short, long = (kept(model, length) for length in (LENGTH, 2 * LENGTH))
    assert 2 * short - long == SEEDS
    assert kept(model, 2 * LENGTH, gpu=False) > 2 * kept(model, LENGTH, gpu=False) + LENGTH * LENGTH


INDEXED = IndexedMLA(
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    index_heads=16,
    index_dim=16,
    top_k=64,
)


def test_an_indexer_keeps_squares_but_not_one_for_each_head() -> None:
    """For each pair of positions: in fp32 the target and the logarithms of the indexer's softmax, in bf16 the mask as the kernel
    takes it, and two masks of booleans."""
    model = replace(MODEL, kv_heads=None, max_length=2 * LENGTH, attention=INDEXED)
    short, long = (kept(model, length) for length in (LENGTH, 2 * LENGTH))
    squares = model.layers * 2 * LENGTH * LENGTH * (4 + 4 + 2 + 1 + 1)
    assert abs(long - 2 * short - squares) < LENGTH * 4


COMPRESSED = CompressedMQA(
    window=64, q_lora_rank=24, o_groups=2, o_lora_rank=16, heavy_rate=16, sparse_rate=4, index_heads=4, index_dim=16, top_k=64
)


PAIRS = [("window", 2), ("heavy", 2 * (1 + 1 / 16)), ("sparse", 2 * (1 + 1 / 4) + (4 + 4 + 1 + 1) / 4)]
"""Bytes of a pair by kind of layer."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "bytes_of_a_pair"), PAIRS)
def test_compressed_keys_keep_squares_but_not_one_for_each_head(kind: Any, bytes_of_a_pair: float) -> None:
    """For each pair of a query and a key, compressed ones included, the mask in bf16 as the kernel takes it; and as above what an
    indexer keeps for each pair of a query and a compressed key."""
    model = replace(MODEL, kv_heads=None, max_length=2 * LENGTH, attention=replace(COMPRESSED, kinds=(kind, kind)))
    for gpu in (True, False):
        short, long = (kept(model, length, gpu=gpu) for length in (LENGTH, 2 * LENGTH))
        assert abs(long - 2 * short - model.layers * 2 * LENGTH * LENGTH * bytes_of_a_pair) < LENGTH * 4


def test_of_plain_attention_both_keep_output_and_log_sum_exp() -> None:
    assert kept(MODEL, LENGTH) == kept(MODEL, LENGTH, gpu=False) + SEEDS


def test_heads_that_share_keys_are_written_out_in_fp32() -> None:
    shared = replace(MODEL, kv_heads=2)
    scores = MODEL.layers * HEADS * LENGTH * LENGTH * 4
    assert kept(shared, LENGTH, compute="fp32") >= kept(shared, LENGTH, compute="fp32", gpu=False) + scores


def test_in_fp64_scores_are_written_out() -> None:
    """No fused kernel of CUDA takes it."""
    short, long = (
        dry_run(replace(workload(MODEL, "fp64", length), state="fp64"), Plan.of([], Layout()), accelerator=H100).activations
        for length in (LENGTH, 2 * LENGTH)
    )
    assert long - 2 * short >= MODEL.layers * HEADS * 2 * LENGTH * LENGTH * 8


def test_selective_recomputation_keeps_what_a_gpu_attended_to() -> None:
    """Output in bf16 and log-sum-exp in fp32, of each block."""
    full, selective = (kept(WINDOWED, LENGTH, Recompute(policy=policy, keep=["attention"])) for policy in ("full", "selective"))
    assert selective - full == MODEL.layers * LENGTH * HEADS * (HEAD_DIM * 2 + 4) + SEEDS


@pytest.mark.parametrize("kind", ["ulysses", "all_gather"])
def test_cut_rows_keep_no_square_either(kind: str) -> None:
    """Rows of several documents, which ranks tell each other."""
    transforms = ContextParallel(kind=kind), FullyShard()  # type: ignore[arg-type]
    plan = Plan.of(transforms, Layout.parse("cp2"))
    short, long = (
        dry_run(replace(workload(MODEL, length=length), documents=True), plan, accelerator=H100)
        for length in (LENGTH, 2 * LENGTH)
    )
    assert 2 * short.activations - long.activations == SEEDS


def test_the_first_step_has_rows_that_float8_takes() -> None:
    layout = Layout.parse("cp2tp2")
    assert workload(MODEL).shortened(layout).length % (16 * layout.cp * layout.tp) == 0
