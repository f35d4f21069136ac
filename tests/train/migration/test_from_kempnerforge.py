"""KempnerForge: values computed by hand from its formulas, and all of its keys."""

import math
from typing import TYPE_CHECKING

import pytest

from forge_core.errors import ForgeError
from forge_train.migration.kempnerforge_keys import KEYS
from forge_train.recipe.load import load_recipe

if TYPE_CHECKING:
    from train.migration.migrated import Migrate

DENSE = """
[model]
dim = 4096
n_layers = 32
n_heads = 32
n_kv_heads = 8
vocab_size = 128256
ffn_dim_multiplier = 1.3
max_seq_len = 4096
rope_theta = 500000.0
qk_norm = true

[train]
batch_size = 8
seq_len = 4096
max_steps = 100000
grad_accum_steps = 4
grad_clip_norm = 0.5
seed = 7
data_seed = 11
activation_checkpointing = "full"

[optimizer]
lr = 3e-4
weight_decay = 0.05
betas = [0.9, 0.99]

[scheduler]
name = "cosine"
warmup_steps = 2000
min_lr_ratio = 0.05

[data]
dataset_path = "/data/tokens/"
file_pattern = "part_*.npy"

[distributed]
dp_shard = -1
nccl_timeout_sec = 900

[checkpoint]
interval = 250
async_mode = "async_with_pinned_mem"
keep_last_n = -1

[metrics]
log_interval = 5
enable_wandb = true
wandb_project = "scaling"
"""


def test_a_dense_run_by_hand(migrated: "Migrate") -> None:
    """The width is 8/3 * 4096 * 1.3 = 14,199, rounded up to a multiple of 256: 14,336. A step has 8 * 4 * 16 sequences."""
    found = migrated("dense.toml", DENSE, world=16)
    found.check()
    expected = {
        "job.name": "dense",
        "job.seed": 7,
        "model.ffn_dim": 14336,
        "model.kv_heads": 8,
        "model.rope.theta": 500000.0,
        "model.attention.qk_norm": "head",
        "model.mlp.name": "swiglu",
        "data.seed": 11,
        "data.sequence_length": 4096,
        "data.documents": "ignore",
        "data.sources.0.path": "/data/tokens/part_*.npy",
        "train.global_batch": 512,
        "train.micro_batch": 8,
        "train.grad_clip": 0.5,
        "optimizer.betas": [0.9, 0.99],
        "optimizer.weight_decay": 0.05,
        "parameters.groups.0.match": "embed.weight",
        "parameters.groups.0.weight_decay": 0.05,
        "schedule.name": "cosine",
        "schedule.warmup": 2000,
        "schedule.min_ratio": 0.05,
        "transforms.recompute.policy": "full",
        "transforms.compile.mode": "default",
        "precision.compute": "bf16",
        "parallel.timeout": 900,
        "checkpoint.every": 250,
        "checkpoint.mode": "async",
        "checkpoint.keep": 0,
        "hooks.0.every": 5,
        "trackers.0.project": "scaling",
    }
    assert {path: found.at(path) for path in expected} == expected
    assert found.kinds("train.grad_accum_steps") == {"converted"}
    assert "data ranks" in found.note("train.grad_accum_steps")


def test_without_a_number_of_processes_the_batch_is_to_be_filled_in(migrated: "Migrate") -> None:
    found = migrated("dense.toml", DENSE)
    found.check()
    assert found.at("train.global_batch") == 32
    assert "train.global_batch" in [blank.path for blank in found.migration.blanks]
    assert "FILL IN" in found.path.read_text()
    assert "train.global_batch" not in [blank.path for blank in migrated("dense.toml", DENSE, world=16).migration.blanks]


EXPERTS = """
[model]
dim = 1024
n_layers = 8
n_heads = 16
vocab_size = 32000
num_experts = 8
moe_top_k = 2
moe_frequency = 2
moe_router = "sigmoid_topk"
moe_shared_experts = 3
moe_aux_loss_weight = 0.5
moe_sequence_aux_loss_weight = 0.02
moe_bias_schedule = "linear_warmup"
moe_expert_ffn_multiplier = 0.5
moe_capacity_factor = 1.25
moe_router_z_loss_weight = 0.001
[train]
batch_size = 4
seq_len = 1024
max_steps = 1000
grad_accum_steps = 2
compile_model = false
[distributed]
dp_shard = 4
ep = 2
tp = 1
"""


def test_experts_by_hand(migrated: "Migrate") -> None:
    """8/3 * 1024 = 2,730 -> 2,816, and half of it 1,408. Expert ranks are an axis of their own there: 4 data ranks."""
    found = migrated("experts.toml", EXPERTS)
    expected = {
        "model.ffn_dim": 2816,
        "model.moe.ffn_dim": 1408,
        "model.moe.every": 2,
        "model.moe.shared": 1,
        "model.moe.capacity": 1.25,
        "model.moe.losses.sequence": 0.01,
        "model.moe.losses.z": 0.001,
        "model.moe.router.name": "sigmoid_topk",
        "model.moe.router.bias_schedule": "warmup",
        "model.moe.router.bias_steps": 100,
        "parallel.dp_shard": 8,
        "parallel.ep": 2,
        "train.global_batch": 4 * 2 * 4,
        "train.micro_batch": 4,
    }
    assert {path: found.at(path) for path in expected} == expected
    assert "micro_batch" not in found.at("model.moe.losses") and "compile" not in found.recipe.get("transforms", {})
    found.check()


def test_a_micro_batch_that_does_not_divide_is_made_smaller(migrated: "Migrate") -> None:
    """Without accumulation, 8 data ranks share 16 sequences: 2 for each, and micro-batches of 4 do not fit."""
    found = migrated("experts.toml", EXPERTS.replace("grad_accum_steps = 2", "grad_accum_steps = 1"))
    assert (found.at("train.global_batch"), found.at("train.micro_batch")) == (16, 2)
    assert "converted" in found.kinds("train.batch_size")


def kempnerforge_factor(step: int, kind: str, warmup: int, stable: int, decay: int, least: float) -> float:
    """The published formulas, with the factor s / W in the warm-up."""
    if step < warmup:
        return step / warmup
    if step < warmup + stable:
        return 1.0
    p = min(1.0, (step - warmup - stable) / decay)
    shape = {"cosine": 0.5 * (1 + math.cos(math.pi * p)), "linear": 1 - p, "sqrt": math.sqrt(1 - p)}[kind]
    return least + (1 - least) * shape


@pytest.mark.parametrize(
    ("text", "shape", "stable", "decay"),
    [
        ('name = "cosine"', "cosine", 0, 90),
        ('name = "linear"', "linear", 0, 90),
        ('name = "rex"\nrex_alpha = 1.0', "linear", 0, 90),
        ('name = "wsd"', "cosine", 0, 90),
        ('name = "wsd"\nstable_steps = 60', "cosine", 60, 30),
        ('name = "wsd"\nstable_steps = 50\nwsd_decay_type = "sqrt"', "sqrt", 50, 40),
        ('name = "wsd"\nwsd_decay_type = "linear"\nstable_steps = 40\ndecay_steps = 50', "linear", 40, 50),
        ('name = "cosine"\ndecay_steps = 140', "cosine", 0, 140),
    ],
)
def test_schedules_agree_after_the_warmup(migrated: "Migrate", text: str, shape: str, stable: int, decay: int) -> None:
    least = 0.0 if "rex" in text else 0.1
    scheduler = f"[train]\nmax_steps = 100\n[scheduler]\nwarmup_steps = 10\nmin_lr_ratio = {least}\n{text}\n"
    found = migrated("schedule.toml", f"[model]\ndim = 64\nn_heads = 4\nvocab_size = 320\n{scheduler}")
    job = load_recipe(found.path).job
    assert (job.train.stop_at or job.train.max_steps) == 100
    factor = job.schedule.build(job.train.max_steps)
    for step in range(100):
        expected = kempnerforge_factor(step, shape, 10, stable, decay, least)
        assert factor(step) == pytest.approx((step + 1) / 10 if step < 10 else expected, abs=1e-12), step
    found.check()


def test_a_run_that_ends_in_its_warmup(migrated: "Migrate") -> None:
    text = "[model]\ndim = 64\nn_heads = 4\n[train]\nmax_steps = 20\n[scheduler]\nwarmup_steps = 50\n"
    found = migrated("short.toml", text)
    found.check()
    assert (found.at("train.stop_at"), found.at("schedule.warmup")) == (20, 50) and found.at("train.max_steps") > 50


@pytest.mark.parametrize(
    ("text", "key", "part"),
    [
        ('[scheduler]\nname = "rex"\nrex_alpha = 3.0', "scheduler.rex_alpha", "no such curve"),
        ("[scheduler]\ndecay_steps = 300", "scheduler.decay_steps", "stays there"),
        ('[train]\nmixed_precision = "fp16"', "train.mixed_precision", "loss scaler"),
        ('[optimizer]\nname = "mine"', "optimizer.name", "plugin"),
        ('[model]\nmodel_type = "mine"', "model.model_type", "plugin"),
        ('[train]\nloss_fn = "mine"', "train.loss_fn", "plugin"),
        ('[model]\nsdpa_backend = "flash"', "model.sdpa_backend", "can express"),
        ('[data]\nhf_dataset_prompt_field = "question"', "data.hf_dataset_prompt_field", "messages"),
    ],
)
def test_values_that_forge_cannot_express_are_named(migrated: "Migrate", text: str, key: str, part: str) -> None:
    base = {"[model]": "dim = 64\nn_heads = 4\n", "[train]": "max_steps = 1000\n", "[scheduler]": "warmup_steps = 10\n"}
    section, _, rest = text.partition("\n")
    tables = {**base, section: f"{base.get(section, '')}{rest}\n"}
    found = migrated("values.toml", "".join(f"{name}\n{keys}" for name, keys in tables.items()))
    assert "cannot" in found.kinds(key) and part in found.note(key)
    found.check()


def test_muon_and_schedule_free(migrated: "Migrate") -> None:
    text = "[model]\ndim = 64\nn_heads = 4\n[optimizer]\nlr = 0.01\nbetas = [0.8, 0.9]\neps = 1e-7\n"
    muon = migrated("muon.toml", text + 'name = "muon"\nmuon_momentum = 0.9\nmuon_ns_steps = 6\n')
    expected = {"name": "muon", "lr": 0.01, "momentum": 0.9, "nesterov": False, "precision": "fp32", "newton_schulz_steps": 6}
    assert expected.items() <= muon.at("optimizer").items()
    assert (muon.at("optimizer.adamw_lr"), muon.at("optimizer.adamw_betas"), muon.at("optimizer.adamw_eps")) == (
        0.01,
        [0.8, 0.9],
        1e-7,
    )
    muon.check()
    free = migrated("free.toml", text + 'name = "schedule_free_adamw"\nschedule_free_warmup_steps = 30\n')
    assert (free.at("schedule.name"), free.at("schedule.warmup")) == ("constant", 30)
    assert free.kinds("optimizer.schedule_free_warmup_steps") == {"translated"}
    free.check()


def test_a_mixture_with_phases(migrated: "Migrate") -> None:
    text = """
[model]
dim = 64
n_heads = 4
[data]
mix_temperature = 2.0
datasets = [{path = "/a", weight = 0.7, name = "code"}, {hf_name = "org/web", weight = 0.3, name = "web"}]
phases = [{start_step = 100, dataset_weights = {code = 1.0, web = 0.0}, lr_scale = 0.5}]
tokenizer_path = "tok"
pack_sequences = true
"""
    found = migrated("mixture.toml", text)
    sources = found.at("data.sources")
    assert [(source["name"], source["path"], source["weight"], source["label"]) for source in sources] == [
        ("tokens", "/a/*.npy", 0.7, "code"),
        ("huggingface", "org/web", 0.3, "web"),
    ]
    assert found.at("data.phases") == [{"start": 100, "weights": {"code": 1.0, "web": 0.0}, "lr_scale": 0.5}]
    assert (found.at("data.temperature"), found.at("data.documents")) == (2.0, "mask")
    found.check()


def test_a_vision_language_model(migrated: "Migrate") -> None:
    text = """
[model]
dim = 64
n_layers = 4
n_heads = 4
max_seq_len = 1024
[train]
seq_len = 512
max_steps = 100
[scheduler]
warmup_steps = 5
[vision_encoder]
type = "random"
[adapter]
type = "avgpool"
pool_window = 3
[vlm]
arch = "cross_attention"
cross_attention_every_n_layers = 2
freeze = [{module = "vision_encoder"}, {module = "transformer"}]
freeze_schedule = [{start_step = 40, specs = [{module = "transformer", frozen = false}]}]
[data]
hf_dataset_name = "org/captions"
hf_dataset_text_field = "caption"
hf_image_size = 128
tokenizer_path = "tok"
"""
    found = migrated("vlm.toml", text)
    assert found.at("model.name") == "vlm" and found.at("model.fusion") == {"name": "cross_attention", "every": 2}
    assert found.at("model.adapter") == {"name": "average_pool", "window": 3}
    assert found.at("train.stages") == [
        {"train": ["adapter", "fusion"], "until": 40},
        {"train": ["decoder", "adapter", "fusion"]},
    ]
    source = found.at("data.sources.0")
    assert (source["name"], source["text"], source["size"]) == ("image_dataset", "caption", 128)
    assert found.kinds("vision_encoder.type") == {"cannot"}
    found.check()


def test_a_number_of_processes_that_does_not_fit_is_refused(migrated: "Migrate") -> None:
    with pytest.raises(ForgeError, match="need 8 processes"):
        migrated("experts.toml", EXPERTS, world=16)


INVENTORY = """
model: dim n_layers n_heads n_kv_heads vocab_size ffn_dim_multiplier ffn_hidden_dim norm_type norm_eps activation max_seq_len
 rope_theta tie_embeddings qk_norm init_std model_type sdpa_backend num_experts moe_top_k moe_frequency moe_router
 moe_shared_experts moe_aux_loss_weight moe_capacity_factor moe_sequence_aux_loss_weight moe_gradient_scale moe_bias_schedule
 moe_packed_experts moe_expert_ffn_multiplier moe_router_z_loss_weight
train: batch_size seq_len max_steps grad_accum_steps grad_clip_norm seed data_seed compile_model mixed_precision
 activation_checkpointing loss_fn z_loss_weight ce_chunk_size shutdown_timeout_sec nccl_health_check_interval
optimizer: name lr weight_decay betas eps fused muon_momentum muon_ns_steps muon_adam_lr schedule_free_warmup_steps
scheduler: name warmup_steps decay_steps min_lr_ratio stable_steps wsd_decay_type rex_alpha
data: dataset_path file_pattern tokenizer_path num_workers pin_memory prefetch_factor hf_dataset_name hf_dataset_config
 hf_dataset_split hf_dataset_text_field hf_dataset_image_field hf_dataset_prompt_field hf_image_size hf_streaming pack_sequences
 datasets mix_temperature phases anneal_start_step anneal_weights
eval: enabled interval steps dataset_path file_pattern hf_dataset_name hf_dataset_config hf_dataset_split
distributed: dp_shard dp_replicate tp pp cp ep pp_schedule nccl_timeout_sec backend
checkpoint: dir interval dyn_ckpt_window async_mode keep_last_n load_path export_dtype exclude_from_loading ignore_freeze_mismatch
metrics: log_interval enable_wandb enable_tensorboard wandb_project wandb_run_name wandb_run_id tensorboard_dir
profiling: enable start_step end_step trace_dir
vision_encoder: type path feature_dim num_tokens
adapter: type hidden_dim activation pool_window pool_heads
vlm: arch max_text_len freeze freeze_schedule module_patterns cross_attention_every_n_layers cross_attention_n_heads
 cross_attention_n_kv_heads mot_modalities mot_image_n_heads mot_image_n_kv_heads mot_warm_start_from_text mot_warm_start_path
 moma_modalities moma_experts_per_modality moma_capacity_factor moma_gumbel_noise
video: data_root dataset_type dataset_name sampling_policy split max_samples max_frames min_frames fps frame_size prompt
"""
"""Every key of the release of 2026-06-30, by section."""


def inventory() -> set[str]:
    names: set[str] = set()
    section = ""
    for line in INVENTORY.strip().splitlines():
        head, colon, rest = line.partition(":")
        section = head if colon else section
        names |= {f"{section}.{name}" for name in (rest if colon else line).split()}
    return names


def test_every_key_of_the_release_is_in_the_table() -> None:
    assert {key.name for key in KEYS} == inventory()
    assert len(inventory()) == 156
