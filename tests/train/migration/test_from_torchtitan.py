"""torchtitan: TOML and Python, with values computed by hand from its documented formulas."""

import math
from typing import TYPE_CHECKING

import pytest

from forge_core.errors import ForgeError
from forge_train.migration.torchtitan_keys import KEYS
from forge_train.recipe.load import load_recipe

if TYPE_CHECKING:
    from train.migration.migrated import Migrate

LLAMA = """
[job]
dump_folder = "./out"
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/llama"
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 200
decay_ratio = 0.8
decay_type = "sqrt"
min_lr_factor = 0.1
[training]
dataset = "c4"
local_batch_size = 2
seq_len = 8192
max_norm = 1.0
steps = 1000
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
context_parallel_degree = 1
[checkpoint]
enable = true
interval = 100
keep_latest_k = 2
async_mode = "async"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = true
components = ["model", "loss"]
[metrics]
log_freq = 20
enable_tensorboard = true
[comm]
train_timeout_seconds = 50
[profiling]
enable_profiling = true
profile_freq = 100
[debug]
seed = 3
deterministic = true
"""


def test_a_llama_by_hand(migrated: "Migrate") -> None:
    """16 processes with tp = 2 are 8 data ranks of 2 sequences. Llama 3 8B: the published shape."""
    found = migrated("llama.toml", LLAMA, world=16)
    found.check()
    expected = {
        "model.dim": 4096,
        "model.layers": 32,
        "model.kv_heads": 8,
        "model.ffn_dim": 14336,
        "model.vocab_size": 128256,
        "model.max_length": 8192,
        "model.rope.scaling": "llama3",
        "model.rope.factor": 8.0,
        "train.global_batch": 16,
        "train.micro_batch": 2,
        "train.max_steps": 1000,
        "train.deterministic": True,
        "job.seed": 3,
        "parallel.tp": 2,
        "parallel.step_timeout": 50,
        "parameters.groups.0.match": "*",
        "parameters.groups.0.weight_decay": 0.1,
        "optimizer.betas": [0.9, 0.95],
        "schedule.name": "wsd",
        "schedule.shape": "one_minus_sqrt",
        "schedule.decay": 0.8,
        "data.documents": "ignore",
        "data.sources.0.path": "allenai/c4",
        "data.tokenizer.path": "./assets/llama/tokenizer.json",
        "checkpoint.every": 100,
        "checkpoint.keep": 2,
        "checkpoint.mode": "async",
        "transforms.recompute.policy": "selective",
        "transforms.compile.mode": "default",
        "hooks.0.every": 20,
        "trackers.0.name": "tensorboard",
    }
    assert {path: found.at(path) for path in expected} == expected
    profile = next(hook for hook in found.at("hooks") if hook["name"] == "profile")
    assert (profile["every"], profile["steps"], profile["warmup"]) == (100, 1, 3)
    assert found.kinds("job.dump_folder") == {"without"}
    assert "norms and embeddings" in found.note("optimizer.weight_decay") or found.kinds("optimizer.weight_decay") == {"default"}


def torchtitan_factor(step: int, steps: int, warmup: int, ratio: float | None, shape: str, least: float) -> float:
    """The documented schedule: counts steps from 1 in warm-up and decay, and adds a virtual last step."""
    decay = steps - warmup if ratio is None else min(round(steps * ratio), steps - warmup)
    stable = steps + 1 - warmup - decay
    if step < warmup:
        return (step + 1) / warmup
    if step < warmup + stable:
        return 1.0
    p = (step + 1 - warmup - stable) / decay
    curve = {"linear": 1 - p, "sqrt": 1 - math.sqrt(p), "cosine": 0.5 * (1 + math.cos(math.pi * p))}[shape]
    return least + (1 - least) * curve


@pytest.mark.parametrize("shape", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize("ratio", [None, 0.3, 0.9, 0.95])
def test_schedules_agree_at_every_step(migrated: "Migrate", shape: str, ratio: float | None) -> None:
    text = f'[training]\nsteps = 100\n[lr_scheduler]\nwarmup_steps = 10\nmin_lr_factor = 0.1\ndecay_type = "{shape}"\n'
    found = migrated("schedule.toml", text + ("" if ratio is None else f"decay_ratio = {ratio}\n"))
    found.check()
    factor = load_recipe(found.path).job.schedule.build(100)
    for step in range(100):
        assert factor(step) == pytest.approx(torchtitan_factor(step, 100, 10, ratio, shape, 0.1), abs=1e-12), step


def test_a_schedule_of_more_steps_than_the_run(migrated: "Migrate") -> None:
    found = migrated("total.toml", "[training]\nsteps = 50\n[lr_scheduler]\nwarmup_steps = 10\ntotal_steps = 100\n")
    assert (found.at("train.max_steps"), found.at("train.stop_at")) == (100, 50)
    factor = load_recipe(found.path).job.schedule.build(100)
    assert [factor(step) for step in (0, 49)] == pytest.approx(
        [torchtitan_factor(step, 100, 10, None, "linear", 0.0) for step in (0, 49)]
    )


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("[parallelism]\npipeline_parallel_degree = 2\n[training]\nlocal_batch_size = 8", "train.micro_batch", 1),
        ("[parallelism]\npipeline_parallel_degree = 2\n[training]\nlocal_batch_size = 8", "train.global_batch", 8),
        ("[training]\nlocal_batch_size = 2\nglobal_batch_size = 64", "train.global_batch", 64),
        ('[training]\ndtype = "bfloat16"', "precision.state", "bf16"),
        ('[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "3"', "transforms.recompute.every", 3),
        ('[activation_checkpoint]\nmode = "full"', "transforms.recompute.policy", "full"),
        ('[parallelism]\nfsdp_reshard_after_forward = "never"', "transforms.shard.reshard", False),
        ('[parallelism]\nfsdp_reshard_after_forward = "always"', "transforms.shard.reshard", True),
        ("[checkpoint]\nenable = true\nload_step = 40", "checkpoint.resume", 40),
        ('[model]\nflavor = "debugmodel_flex_attn"', "data.documents", "mask"),
        (
            '[model]\nconverters = ["float8"]\n[quantize.linear.float8]\nrecipe_name = "rowwise"',
            "transforms.float8.recipe",
            "rowwise",
        ),
        ("[validation]\nenable = true\nfreq = 30", "hooks.2.every", 30),
    ],
)
def test_single_values(migrated: "Migrate", text: str, path: str, value: object) -> None:
    assert migrated("single.toml", text).at(path) == value


def test_a_model_without_a_known_shape_is_refused_until_it_is_filled_in(migrated: "Migrate") -> None:
    found = migrated("other.toml", '[model]\nname = "deepseek_v3"\nflavor = "16B"\n[training]\nsteps = 10\n')
    assert found.kinds("model.flavor") == {"cannot"}
    assert {"model.dim", "model.layers"} <= {blank.path for blank in found.migration.blanks}
    with pytest.raises(ForgeError, match=r"model\.dim"):
        found.check()


PYTHON = """
from torchtitan.trainer import Trainer

from . import model_registry

raise RuntimeError("this file is never executed")


def small() -> Trainer.Config:
    spec = model_registry("8B")
    return Trainer.Config(
        hf_assets_path="./assets",
        model_spec=spec,
        optimizer=default_adamw(lr=2e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=5, decay_type="cosine", min_lr_factor=0.1),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=4 * 2048,
            num_tokens_per_train_step=64 * 2048,
            max_context_length=2048,
            steps=100,
        ),
        checkpoint=CheckpointManager.Config(enable=True, interval=50),
        activation_checkpoint=FullAC.Config(),
        dataloader=Loader.Config(dataset=DATASETS["c4"]),
        validator=Validator.Config(enable=True, freq=25),
    )


def large() -> Trainer.Config:
    config = small()
    config.training.steps = 200
    config.parallelism = ParallelismConfig(tensor_parallel_degree=2)
    config.metrics.log_freq = compute()
    if config.training.steps > 100:
        config.training.max_norm = 0.5
    return config
"""


def test_python_is_read_without_running_it(migrated: "Migrate") -> None:
    """4 * 2,048 tokens are 4 sequences; 64 * 2,048 tokens of a step are 64."""
    found = migrated("llama3/config_registry.py", PYTHON, function="small")
    expected = {
        "model.dim": 4096,
        "model.max_length": 2048,
        "data.sequence_length": 2048,
        "train.micro_batch": 4,
        "train.global_batch": 64,
        "train.max_steps": 100,
        "optimizer.lr": 2e-4,
        "schedule.name": "cosine",
        "schedule.min_ratio": 0.1,
        "checkpoint.every": 50,
        "transforms.recompute.policy": "full",
        "data.tokenizer.path": "./assets/tokenizer.json",
        "job.name": "small",
    }
    assert {path: found.at(path) for path in expected} == expected
    assert any("dataloader" in outcome.key for outcome in found.migration.of("unread"))
    assert next(hook for hook in found.at("hooks") if hook["name"] == "evaluate")["every"] == 25
    found.check()


def test_a_function_that_changes_another_one(migrated: "Migrate") -> None:
    found = migrated("llama3/config_registry.py", PYTHON, function="large")
    assert (found.at("train.max_steps"), found.at("parallel.tp"), found.at("train.grad_clip")) == (200, 2, 1.0)
    unread = " | ".join(outcome.key for outcome in found.migration.of("unread"))
    assert "compute()" in unread and "if config.training.steps > 100" in unread


def test_a_file_of_several_configurations_needs_a_name(migrated: "Migrate") -> None:
    with pytest.raises(ForgeError, match=r"2 configurations; choose one with --function: small, large"):
        migrated("llama3/config_registry.py", PYTHON, framework="torchtitan")
    with pytest.raises(ForgeError, match="no function 'tiny'; its configurations are small, large"):
        migrated("llama3/config_registry.py", PYTHON, framework="torchtitan", function="tiny")


RELEASE = """
profiling: enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup enable_memory_snapshot
metrics: log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks enable_wandb
model: name flavor hf_assets_path tokenizer_path converters print_after_conversion
optimizer: name lr beta1 beta2 eps weight_decay implementation early_step_in_backward
lr_scheduler: warmup_steps total_steps decay_ratio decay_type min_lr_factor
training: dataset dataset_path local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload dtype
 mixed_precision_param mixed_precision_reduce gc_freq gc_debug
parallelism: data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward tensor_parallel_degree
 disable_loss_parallel enable_async_tensor_parallel pipeline_parallel_degree module_fqns_per_model_part pipeline_parallel_schedule
 pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage
 pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size pipeline_parallel_expert_parallel_overlap
 context_parallel_degree context_parallel_load_balancer context_parallel_rotate_method expert_parallel_degree
 expert_tensor_parallel_degree expert_parallel_comm_backend
checkpoint: enable enable_ft_dataloader_checkpoints folder interval initial_load_path initial_load_model_only initial_load_in_hf
 initial_load_in_hf_quantized last_save_model_only last_save_in_hf export_dtype async_mode keep_latest_k load_step
 exclude_from_loading enable_first_step_checkpoint create_seed_checkpoint load_only
activation_checkpoint: mode selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop memory_budget
 visualize_memory_budget_pareto preserve_rng_state determinism_check debug
compile: enable components backend
comm: init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder save_traces_file_prefix mode
validation: enable dataset dataset_path local_batch_size seq_len freq steps
debug: seed deterministic deterministic_warn_only moe_force_load_balance
"""
"""Keys of the last release with TOML files (0.2.2)."""


def test_every_key_of_the_release_is_in_the_table() -> None:
    names: set[str] = set()
    section = ""
    for line in RELEASE.strip().splitlines():
        head, colon, rest = line.partition(":")
        section = head if colon else section
        names |= {f"{section}.{name}" for name in (rest if colon else line).split()}
    assert len(names) == 112 and names - {key.name for key in KEYS} == set()
