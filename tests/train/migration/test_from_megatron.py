"""Megatron-LM: arguments of scripts and YAML, with values computed by hand from its documentation."""

import math
from typing import TYPE_CHECKING

import pytest

from forge_core.errors import ForgeError
from forge_train.migration.shell import read_arguments
from forge_train.recipe.load import load_recipe

if TYPE_CHECKING:
    from pathlib import Path

    from train.migration.migrated import Migrate

SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"2"}
MASTER_ADDR=${MASTER_ADDR:-"localhost"}
HIDDEN=1024
touch executed
DATA_PATH=$1

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --master_addr $MASTER_ADDR
)
MODEL_ARGS=(
    --num-layers 12     # a comment
    --hidden-size ${HIDDEN}
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 4
    --swiglu
    --normalization RMSNorm
    --position-embedding-type rope
    --rotary-base=500000
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --seq-length 2048
    --max-position-embeddings 4096
    --vocab-size 50257
)
TRAINING_ARGS="--micro-batch-size 2 --global-batch-size 64 --lr 6.0e-4"
TRAINING_ARGS+=" --min-lr 6.0e-5 --lr-decay-style cosine"
SCHEDULE_ARGS=(
    "--train-samples 64000"
    "--lr-warmup-fraction 0.1"
)
if [ -n "${WANDB_API_KEY}" ]; then
    SCHEDULE_ARGS+=(--wandb-project mine)
fi
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${MODEL_ARGS[@]} \\
    $TRAINING_ARGS \\
    "${SCHEDULE_ARGS[@]}" \\
    --tensor-model-parallel-size 2 \\
    --sequence-parallel \\
    --data-path $DATA_PATH \\
    --bf16 --clip-grad 0.7 --adam-beta2 0.95 --weight-decay 0.1 \\
    --save-interval 100 --seed 9 ${EXTRA[@]}
set +x
"""


def test_a_script_by_hand(migrated: "Migrate", tmp_path: "Path") -> None:
    """64,000 samples of batches of 64 are 1,000 steps, a tenth of them warm-up. 50,257 ids are padded to a multiple of 128 * 2.
    Without --ffn-hidden-size, swiglu layers of Megatron have 1,024 * 8 / 3, rounded down to a multiple of 64: 2,688 + 0."""
    found = migrated("pretrain.sh", SCRIPT)
    assert not (tmp_path / "executed").exists()
    expected = {
        "job.name": "pretrain",
        "job.seed": 9,
        "model.dim": 1024,
        "model.layers": 12,
        "model.heads": 16,
        "model.kv_heads": 4,
        "model.ffn_dim": 2688,
        "model.vocab_size": 50432,
        "model.max_length": 4096,
        "model.tied_embeddings": False,
        "model.norm.name": "rmsnorm",
        "model.mlp.name": "swiglu",
        "model.mlp.bias": False,
        "model.attention.qkv_bias": False,
        "model.rope.theta": 500000,
        "data.sequence_length": 2048,
        "data.documents": "ignore",
        "train.global_batch": 64,
        "train.micro_batch": 2,
        "train.max_steps": 1000,
        "train.grad_clip": 0.7,
        "parallel.tp": 2,
        "transforms.tensor.sequence_parallel": True,
        "optimizer.lr": 6e-4,
        "optimizer.betas": [0.9, 0.95],
        "optimizer.weight_decay": 0.1,
        "parameters.groups.0.match": "embed.weight",
        "schedule.name": "cosine",
        "schedule.warmup": 100,
        "schedule.min_ratio": 0.1,
        "precision.compute": "bf16",
        "checkpoint.every": 100,
    }
    assert {path: found.at(path) for path in expected} == expected
    assert found.migration.world == 16
    unread = {outcome.key for outcome in found.migration.of("unread")}
    assert unread == {"--wandb-project", "--data-path $1", "${EXTRA[@]}"}
    assert "trackers" not in found.recipe
    found.check()


def test_defaults_of_megatron_that_forge_does_not_have_are_named(migrated: "Migrate") -> None:
    found = migrated(
        "args.txt",
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 300 "
        "--lr 1e-3 --train-iters 10 --micro-batch-size 4",
    )
    notes = {outcome.key: outcome.note for outcome in found.migration.of("default") if outcome.note}
    assert "dropout" in notes["hidden-dropout"]
    assert found.at("model.learned_positions") is True and found.at("model.attention.nope_every") == 1
    assert [group["match"] for group in found.at("parameters.groups")] == ["embed.weight", "positions.weight"]
    assert found.at("model.mlp.bias") is True and found.at("model.tied_embeddings") is True and found.at("model.ffn_dim") == 256
    assert (found.at("optimizer.weight_decay"), found.at("optimizer.betas"), found.at("job.seed")) == (0.01, [0.9, 0.999], 1234)
    found.check()


@pytest.mark.parametrize(
    ("kind", "learned", "every"),
    [("rope", None, None), ("none", None, 1), ("learned_absolute", True, 1), ("relative", None, None)],
)
def test_positions(migrated: "Migrate", kind: str, learned: bool | None, every: int | None) -> None:
    found = migrated("args.txt", f"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --position-embedding-type {kind}\n")
    model = found.recipe["model"]
    assert (model.get("learned_positions"), model["attention"].get("nope_every")) == (learned, every)
    assert ("cannot" in found.kinds("position-embedding-type")) == (kind == "relative")
    latent = migrated("args.txt", f"--num-layers 2 --multi-latent-attention --position-embedding-type {kind}\n")
    assert "learned_positions" not in latent.recipe["model"] and "nope_every" not in latent.recipe["model"]["attention"]
    assert ("cannot" in latent.kinds("position-embedding-type")) == (kind != "rope")


def test_expert_ranks_are_data_ranks_in_both(migrated: "Migrate") -> None:
    """Without a number of processes, the recipe is for the least one: 4, whose ranks are data and expert ranks."""
    found = migrated(
        "args.txt",
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 300 --lr 1e-3 --swiglu "
        "--train-iters 10 --micro-batch-size 1 --global-batch-size 8 --num-experts 8 --expert-model-parallel-size 4 --bf16 "
        "--disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights --position-embedding-type rope",
    )
    assert (found.at("parallel.ep"), found.at("parallel.etp"), found.at("train.global_batch")) == (4, 1, 8)
    found.check()


def megatron_factor(samples: float, warmup: float, decay: float, style: str, least: float, wsd: float = 0) -> float:
    """The documented schedule, relative to the peak; it counts samples."""
    if warmup > 0 and samples <= warmup:
        return samples / warmup
    p = (samples - warmup) / (decay - warmup)
    if style == "WSD":
        start = decay - wsd
        return 1.0 if samples <= start else least + (1 - least) * (1 - math.sqrt((samples - start) / wsd))
    return least + (1 - least) * {"linear": 1 - p, "cosine": 0.5 * (1 + math.cos(math.pi * p))}[style]


@pytest.mark.parametrize(
    ("text", "style", "wsd"),
    [
        ("--lr-decay-style cosine", "cosine", 0),
        ("--lr-decay-style linear --lr-decay-iters 100", "linear", 0),
        ("--lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-iters 30", "WSD", 30),
    ],
)
def test_schedules_agree_after_the_warmup(migrated: "Migrate", text: str, style: str, wsd: int) -> None:
    found = migrated("args.txt", f"--lr 1.0 --min-lr 0.1 --train-iters 100 --lr-warmup-iters 10 --global-batch-size 8 {text}\n")
    schedule = found.at("schedule")
    base = found.path.with_name("base.toml")
    base.write_text(
        'base = "debug"\n[train]\nmax_steps = 100\n[schedule]\n' + "".join(f"{k} = {v!r}\n" for k, v in schedule.items())
    )
    factor = load_recipe(base).job.schedule.build(100)
    for step in range(11, 100):
        assert factor(step) == pytest.approx(megatron_factor(step * 8, 80, 800, style, 0.1, wsd * 8), abs=1e-12), step


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        (
            "--num-experts 8 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01",
            "model.moe.losses.sequence",
            0.01,
        ),
        ("--num-experts 8 --moe-router-pre-softmax", "model.moe.router.normalize", False),
        (
            "--num-experts 8 --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
            "model.moe.router.bias_rate",
            1e-3,
        ),
        ("--num-experts 8 --moe-router-score-function sigmoid", "model.moe.router.bias_rate", 0.0),
        ("--num-experts 8 --moe-layer-freq ([0]*3+[1]*24)", "model.moe.first_dense", 3),
        ("--num-experts 8 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 1024", "model.moe.shared", 2),
        ("--rampup-batch-size 16 16 5000 --global-batch-size 64", "train.global_batch", 16),
        ("--step-batch-size-schedule 0:384 --step-batch-size-schedule 0:384,200B:768", "train.global_batch", 768),
        ("--data-path 0.3 a 0.7 b", "data.sources.1.weight", 0.7),
        ("--data-path a b", "data.sources.1.path", "b"),
        ("--reset-position-ids --reset-attention-mask", "data.documents", "mask"),
        ("--reset-position-ids", "data.documents", "ignore"),
        ("--distributed-timeout-minutes 5", "parallel.timeout", 300.0),
        ("--most-recent-k 2", "checkpoint.keep", 2),
        ("--recompute-granularity full", "transforms.recompute.policy", "full"),
        (
            "--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
            "parallel.pipeline.schedule.stages_per_rank",
            2,
        ),
        ("--context-parallel-size 2 --cp-comm-type a2a", "transforms.context.kind", "ulysses"),
        ("--lr 1e-3 --decoupled-lr 5e-4 --position-embedding-type rope", "parameters.groups.1.lr", 0.5),
        ("--clip-grad 0", "train.grad_clip", "none"),
        ("--padded-vocab-size 1000 --vocab-size 900", "model.vocab_size", 1000),
        ("--multi-latent-attention --kv-lora-rank 64", "model.attention.kv_lora_rank", 64),
        ("--mtp-num-layers 1", "model.mtp.weight", 0.1),
        ("--window-size 127,0", "model.attention.window", 128),
    ],
)
def test_single_values(migrated: "Migrate", text: str, path: str, value: object) -> None:
    assert migrated("args.txt", f"{text}\n", framework="megatron").at(path) == value


def megatron_batches(first: int, increment: int, samples: int, last: int, enough: int) -> list[int]:
    """Sizes of the steps that read `enough` sequences. Before each step, Megatron asks which share of the ramp has been read."""
    read, sizes = 0, []
    while read < enough:
        shares = (last - first) // increment
        done = shares if read > samples else int(read / (samples / shares))
        sizes.append(min(last, first + done * increment))
        read += sizes[-1]
    return sizes


@pytest.mark.parametrize(
    ("first", "increment", "samples", "last"),
    [(16, 16, 5000, 64), (32, 32, 96, 256), (8, 4, 64, 12), (256, 128, 50_000, 1024), (2, 2, 7, 16)],
)
def test_a_ramp_of_batches_has_the_sizes_of_megatron(
    migrated: "Migrate", first: int, increment: int, samples: int, last: int
) -> None:
    enough = 2 * samples + 3 * last
    ramp = f"--rampup-batch-size {first} {increment} {samples} --global-batch-size {last} --lr 1e-3"
    found = migrated("args.txt", f"{ramp} --train-samples {enough} --lr-warmup-samples {samples // 2} --lr-decay-style cosine\n")
    sizes = megatron_batches(first, increment, samples, last, enough)
    phases = found.at("data.phases")
    starts = {0: found.at("train.global_batch")} | {phase["start"]: phase["global_batch"] for phase in phases}
    assert [starts[max(start for start in starts if start <= step)] for step in range(len(sizes))] == sizes
    assert found.at("train.max_steps") == len(sizes)
    assert found.at("schedule.warmup") == len(megatron_batches(first, increment, samples, last, samples // 2))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("--rampup-batch-size 16 16 --global-batch-size 64", "needs three whole numbers"),
        ("--rampup-batch-size 16 20 5000 --global-batch-size 64", "20 does not lead from 16 to global-batch-size = 64"),
        ("--rampup-batch-size 64 16 5000 --global-batch-size 64", "16 does not lead from 64"),
        ("--rampup-batch-size 16 16 5000", "global-batch-size = absent"),
    ],
)
def test_a_ramp_that_cannot_be_read_is_named(migrated: "Migrate", text: str, why: str) -> None:
    found = migrated("args.txt", f"{text} --train-samples 10000 --lr 1e-3\n")
    (said,) = [outcome for outcome in found.migration.outcomes if outcome.key == "rampup-batch-size"]
    assert why in str(said) and "phases" not in found.migration.recipe.get("data", {})


YAML = """
ENV_VARS:
  NCCL_IB_SL: 1
MODEL_ARGS:
  --num-layers: 4
  --hidden-size: 64
  --num-attention-heads: 4
  --position-embedding-type: rope
  --swiglu: true
  --bf16: true
  --micro-batch-size: 2
  --train-iters: 20
  --seq-length: 64
  --lr: 1.0e-3
  --vocab-size: 320
  --data-path: ${DATA}
  --my-own-flag: 3
"""


def test_yaml(migrated: "Migrate") -> None:
    found = migrated("model_config.yaml", YAML)
    assert (found.at("model.dim"), found.at("optimizer.lr"), found.at("train.global_batch")) == (64, 1e-3, 2)
    assert {outcome.key for outcome in found.migration.of("unread")} == {"ENV_VARS", "--data-path: ${DATA}"}
    assert [outcome.key for outcome in found.migration.of("unknown")] == ["my-own-flag"]
    assert "train.global_batch" in {blank.path for blank in found.migration.blanks}


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("--a 1 --b=2 --c", {"a": 1, "b": 2, "c": True}),
        ("--x -1 --y 1e-3 | tee log", {"x": -1, "y": 0.001}),
        ("A=(--x 1)\nA+=(--y 2)\nrun ${A[@]}", {"x": 1, "y": 2}),
        ("A=(--x 1)\n", {"x": 1}),
        ("N=4\nrun --x $((N*2)) --y $((N/2))", {"x": 8, "y": 2}),
        ("run --split '99,1,0' --z", {"split": "99,1,0", "z": True}),
        ("run --x 1 a.py --y 2 > out.txt", {"x": 1, "y": 2}),
        ("run --x 1\nother\nrun2 --y", {"x": 1, "y": True}),
        ("run --x_y 1", {"x-y": 1}),
        ('O="--x 1 \\\n --y 2"\nrun $O', {"x": 1, "y": 2}),
        ("run --x `rm -rf /`", {}),
        ("run --x $(whoami)", {}),
        ("for i in 1 2; do\n run --x $i\ndone\nrun --y 3", {"y": 3}),
    ],
)
def test_arguments(text: str, settings: dict[str, object]) -> None:
    assert {name: setting.value for name, setting in read_arguments(text)[0].items()} == settings


def test_an_open_quote_is_refused_with_its_line() -> None:
    with pytest.raises(ForgeError, match="line 2 opens a quote or a parenthesis"):
        read_arguments("run --x 1\nA=(--y 2\n")


def test_a_number_of_processes_that_does_not_fit_is_left_open(migrated: "Migrate") -> None:
    text = "run --nproc_per_node 8 --nnodes 1 x.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --lr 1"
    found = migrated("args.txt", text)
    assert found.migration.world is None and "give --world" in found.note("nproc-per-node")
    with pytest.raises(ForgeError, match="multiple of 32 processes"):
        migrated("args.txt", text, world=16)
