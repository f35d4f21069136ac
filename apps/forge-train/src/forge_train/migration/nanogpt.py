"""nanoGPT: `config/*.py`, plain assignments over the defaults of its `train.py`, read without running them."""

from typing import Any

from forge_train.formats.converters import NANOGPT_FILE
from forge_train.migration.concepts import (
    RateCurve,
    decay_embeddings,
    learned_positions,
    write_micro_batch,
    write_schedule,
    write_start,
)
from forge_train.migration.engine import Framework, Key, Migration

POSITIONS = "positions are learned, and nothing is rotated"
GLOBAL_BATCH = "batch_size * gradient_accumulation_steps; the accumulation counts those of all GPUs"
WARMUP = "step s of W has the factor (s + 1) / W in Forge, (s + 1) / (W + 1) there"
WINDOWS = "nanoGPT reads windows at random positions, with replacement; Forge reads every token once per epoch"

KEYS = (
    Key("out_dir", "out", "job.name", "checkpoints are in the run's directory, runs/NAME", rule=True),
    Key("eval_interval", 2000, "hooks (evaluate) every, checkpoint.every", "there, an evaluation also saves", rule=True),
    Key("log_interval", 1, "hooks (log) every", rule=True),
    Key("eval_iters", 200, "", "a held-out set is evaluated as a whole"),
    Key("eval_only", False, "", "forge-train evaluate RUN"),
    Key("always_save_checkpoint", True, "hooks (best)", "false: a checkpoint at each new best evaluation", rule=True),
    Key("init_from", "scratch", "start.weights", "scratch and resume need nothing; GPT-2 as a folder", rule=True),
    Key("wandb_log", False, "trackers (wandb)", rule=True),
    Key("wandb_project", "owt", "trackers (wandb) project", rule=True),
    Key("wandb_run_name", "gpt2", "job.name", rule=True),
    Key("dataset", "openwebtext", "data.sources.path", "data/NAME/train.bin, and val.bin as the held-out set", rule=True),
    Key("gradient_accumulation_steps", 40, "train.global_batch", GLOBAL_BATCH, rule=True),
    Key("batch_size", 12, "train.micro_batch, train.global_batch", GLOBAL_BATCH, rule=True),
    Key("block_size", 1024, "data.sequence_length, model.max_length, model.learned_positions", POSITIONS, rule=True),
    Key("n_layer", 12, "model.layers"),
    Key("n_head", 12, "model.heads"),
    Key("n_embd", 768, "model.dim, model.ffn_dim", "ffn_dim is 4 * n_embd", rule=True),
    Key("dropout", 0.0, "", "Forge's models have no dropout", rule=True),
    Key("bias", False, "model.mlp.bias, model.norm.bias, model.attention", rule=True),
    Key("learning_rate", 6e-4, "optimizer.lr"),
    Key("max_iters", 600000, "train.max_steps", "nanoGPT takes one step more", rule=True),
    Key("weight_decay", 0.1, "optimizer.weight_decay, parameters.groups", "decays embeddings there", rule=True),
    Key("beta1", 0.9, "optimizer.betas", rule=True),
    Key("beta2", 0.95, "optimizer.betas", rule=True),
    Key("grad_clip", 1.0, "train.grad_clip", "0 means no clipping there, none in Forge", rule=True),
    Key("decay_lr", True, "schedule.name", "false: a constant rate without a warm-up", rule=True),
    Key("warmup_iters", 2000, "schedule.warmup", WARMUP, rule=True),
    Key("lr_decay_iters", 600000, "train.max_steps", "a decay ends at train.max_steps in Forge", rule=True),
    Key("min_lr", 6e-5, "schedule.min_ratio", "a share of the rate in Forge: min_lr / learning_rate", rule=True),
    Key("backend", "nccl", "", "follows from the device"),
    Key("device", None, "", "the accelerator that is visible, else the CPU"),
    Key("dtype", "bfloat16", "precision.compute", "float16 needs a loss scaler, which Forge does not have", rule=True),
    Key("compile", True, "transforms.compile", rule=True),
)


def translate(migration: Migration) -> None:
    """Translates the keys with a rule."""
    _model(migration)
    _batch(migration)
    _optimizer(migration)
    _data(migration)
    _run(migration)


def _model(migration: Migration) -> None:
    bias = migration.flag("bias")
    width = migration.positive("n_embd")
    migration.write("model.name", "decoder")
    migration.write("model.dim", width, "n_embd")
    migration.write("model.ffn_dim", 4 * width, "n_embd")
    migration.remark("model.ffn_dim", "4 * n_embd")
    migration.write("model.vocab_size", 50304)
    migration.remark(
        "model.vocab_size", "GPT-2's 50,257 ids, padded as in nanoGPT; with a data/NAME/meta.pkl, the size that it states"
    )
    migration.write("model.tied_embeddings", True)
    migration.remark("model.tied_embeddings", "as in nanoGPT's model.py, like the lines on norms and the feed-forward layer")
    migration.write("model.norm.name", "layernorm")
    migration.write("model.norm.bias", bias, "bias")
    migration.write("model.mlp.name", "gelu")
    migration.write("model.mlp.exact", True)
    migration.write("model.mlp.bias", bias, "bias")
    migration.write("model.attention.qkv_bias", bias, "bias")
    migration.write("model.attention.output_bias", bias, "bias")
    length = migration.positive("block_size")
    migration.write("data.sequence_length", length, "block_size")
    migration.write("model.max_length", length, "block_size")
    learned_positions(migration)
    if migration.number("dropout") > 0:
        migration.cannot("dropout", "Forge's models have no dropout; train fewer epochs, or decay more")
    else:
        migration.write_nothing("dropout", "no dropout in both")


def _batch(migration: Migration) -> None:
    micro, parts = migration.positive("batch_size"), migration.positive("gradient_accumulation_steps")
    migration.write("train.global_batch", micro * parts, "batch_size", "gradient_accumulation_steps", note=GLOBAL_BATCH)
    migration.remark("train.global_batch", f"{micro} sequences * {parts} micro-batches of all GPUs together")
    write_micro_batch(migration, micro, micro * parts, migration.world or 1, "batch_size")
    clip = migration.number("grad_clip")
    migration.write(
        "train.grad_clip", clip if clip > 0 else "none", "grad_clip", note="" if clip > 0 else "0 switches clipping off there"
    )


def _optimizer(migration: Migration) -> None:
    migration.write("optimizer.name", "adamw")
    migration.write("optimizer.betas", [migration.number("beta1"), migration.number("beta2")], "beta1", "beta2")
    decay_embeddings(migration, migration.number("weight_decay"), "weight_decay", "nanoGPT")
    steps = migration.positive("max_iters")
    note = "nanoGPT takes max_iters + 1 steps" if migration.has("max_iters") else ""
    migration.write("train.max_steps", steps, "max_iters", note=note)
    keys = {"name": "decay_lr", "warmup": "warmup_iters", "end": "lr_decay_iters", "floor": "min_lr"}
    if not migration.flag("decay_lr"):
        migration.write("schedule.name", "none", "decay_lr")
        migration.unused("warmup_iters", "lr_decay_iters", "min_lr", because="decay_lr is false")
        return
    warmup, end = migration.integer("warmup_iters"), migration.integer("lr_decay_iters")
    rate, least = migration.number("learning_rate"), migration.number("min_lr")
    write_schedule(migration, RateCurve("cosine", warmup, warmup, end, ratio(least, rate)), steps, keys, WARMUP)
    migration.write("schedule.min_ratio", ratio(least, rate), "min_lr", note=f"{least} / {rate}")


def ratio(least: float, rate: float) -> float:
    """Returns `least / rate`, rounded to 12 digits, so that 6e-5 / 6e-4 is 0.1."""
    return float(f"{least / rate:.12g}") if rate else 0.0


def _data(migration: Migration) -> None:
    name = str(migration.get("dataset"))
    migration.write("data.documents", "ignore")
    migration.remark("data.documents", "attention crosses document borders in nanoGPT")
    for path, file in (("data.sources.0", "train.bin"), ("data.evaluation.validation", "val.bin")):
        migration.write(f"{path}.name", "tokens")
        migration.write(f"{path}.path", f"data/{name}/{file}", "dataset", note=WINDOWS)
        migration.write(f"{path}.dtype", "uint16")
    if name in ("openwebtext", "shakespeare"):
        migration.write("data.sources.0.vocab_size", 50257)
    else:
        migration.fill_in("data.sources.0.vocab_size", 65, "the vocabulary of these tokens, if it is known")
    if name == "openwebtext":
        for path in ("data.sources.0", "data.evaluation.validation"):
            migration.write(f"{path}.eos", 50256)
            migration.remark(f"{path}.eos", "GPT-2's end of text, which data/openwebtext/prepare.py appends to each document")


def _run(migration: Migration) -> None:
    name = migration.get("wandb_run_name") if migration.has("wandb_run_name") else migration.get("out_dir")
    key = "wandb_run_name" if migration.has("wandb_run_name") else "out_dir"
    migration.write("job.name", plain_name(str(name)) if migration.has(key) else migration.source.name, key)
    if key == "wandb_run_name":
        migration.drop("out_dir", "checkpoints are in the run's directory, runs/NAME; set job.dir for another one")
    migration.write("job.seed", 1337)
    migration.remark("job.seed", "the seed in nanoGPT's train.py; the same seed gives other weights")
    dtype = migration.get("dtype")
    if dtype == "float16":
        migration.cannot("dtype", "fp16 needs a loss scaler, which Forge does not have; bf16 is written")
        migration.write("precision.compute", "bf16")
    elif dtype in ("bfloat16", "float32"):
        migration.write("precision.compute", {"bfloat16": "bf16", "float32": "fp32"}[dtype], "dtype")
    else:
        migration.cannot("dtype", "choose precision.compute: bf16 or fp32")
    migration.write("precision.state", "fp32")
    if migration.flag("compile"):
        migration.write("transforms.compile.mode", "default", "compile")
    else:
        migration.write_nothing("compile", "[transforms.compile] is absent")
    start: Any = migration.get("init_from")
    if start in ("scratch", "resume"):
        migration.write_nothing("init_from", "a run resumes by itself; a new one starts from random weights")
    else:
        migration.cannot(
            "init_from",
            f"set model.from_hf and start.weights to a folder with {start} of Hugging Face, and remove the other keys of "
            f"[model]; of a {NANOGPT_FILE}, start.weights takes what forge-train convert --names nanogpt writes",
        )
    every = migration.integer("eval_interval")
    write_start(migration, migration.integer("log_interval"), "log_interval")
    migration.hook("evaluate", every=(every, "eval_interval"))
    if not migration.flag("always_save_checkpoint"):
        migration.hook("best", "always_save_checkpoint", metric=("evaluation/validation/loss", "always_save_checkpoint"))
    else:
        migration.write_nothing("always_save_checkpoint", "no hook best: a checkpoint every checkpoint.every steps")
    migration.hook("save")
    migration.write("checkpoint.every", every, "eval_interval", note="nanoGPT saves at each evaluation")
    if migration.flag("wandb_log"):
        migration.table("trackers", "wandb", "wandb_log", project=(migration.get("wandb_project"), "wandb_project"))
    else:
        migration.write_nothing("wandb_log", "no tracker wandb")
        migration.unused("wandb_project", because="wandb_log is false")


def plain_name(name: str) -> str:
    """Returns text as the name of a run: one path component."""
    text = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name).strip(".-")
    return text[:100] or "migrated"


NANOGPT = Framework("nanogpt", "nanoGPT", "a Python file of plain assignments, such as config/train_gpt2.py", KEYS, translate)
