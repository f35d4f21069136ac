"""transformers' Trainer: `TrainingArguments` as JSON, YAML, or a literal call in Python, which is read without running it."""

import ast
from collections.abc import Mapping
from math import ceil
from typing import Any

from forge_train.migration.concepts import Axes, RateCurve, decay_embeddings, write_batch, write_schedule, write_start
from forge_train.migration.engine import Framework, Migration, SourceSetting, Unread
from forge_train.migration.literals import NOT_LITERAL, NotLiteral, assignments, callee, unread, value_of
from forge_train.migration.nanogpt import plain_name, ratio
from forge_train.migration.trainer_keys import KEYS

WARMUP = "step s of the warm-up has the factor (s + 1) / warmup in Forge, s / warmup there: the first rate is not 0"
GLOBAL_BATCH = "in sequences: per_device_train_batch_size * gradient_accumulation_steps * processes"
NAMES = {key.name for key in KEYS}

_OPTIMIZERS: Mapping[str, str] = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw",
    "adamw_anyprecision": "adamw",
    "paged_adamw_32bit": "adamw",
    "paged_adamw": "adamw",
    "adamw_bnb_8bit": "adamw8bit",
    "adamw_8bit": "adamw8bit",
    "adamw_torch_8bit": "adamw8bit",
    "paged_adamw_8bit": "adamw8bit",
    "lion_32bit": "lion",
    "lion": "lion",
    "paged_lion_32bit": "lion",
    "schedule_free_adamw": "schedule_free_adamw",
}


def read_python(module: ast.Module) -> tuple[dict[str, SourceSetting], list[Unread]] | None:
    """Reads the arguments of the first call of `TrainingArguments` or one of its subclasses, or a literal dict `training_args`.

    Returns None if a file has neither.
    """
    names = {name: setting.value for name, setting in assignments(module)[0].items()}
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and callee(node).rpartition(".")[2] in _CALLS:
            settings: dict[str, SourceSetting] = {}
            rest = [unread(argument, NOT_LITERAL) for argument in node.args]
            for keyword in node.keywords:
                if keyword.arg is None:
                    rest.append(unread(keyword.value, NOT_LITERAL))
                    continue
                try:
                    settings[keyword.arg] = SourceSetting(value_of(keyword.value, names), keyword.value.lineno)
                except NotLiteral:
                    shown = unread(keyword.value, NOT_LITERAL)
                    rest.append(Unread(f"{keyword.arg} = {shown.text}", shown.line, NOT_LITERAL))
            return settings, rest
    found = names.get("training_args")
    return ({name: SourceSetting(value) for name, value in found.items()}, []) if isinstance(found, dict) else None


_CALLS = frozenset({"TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig"})


def translate(migration: Migration) -> None:
    """Translates the keys with a rule."""
    name = migration.get("run_name") or migration.get("output_dir")
    key = "run_name" if migration.get("run_name") else "output_dir"
    migration.write("job.name", plain_name(str(name).rstrip("/").rpartition("/")[2]) if name else migration.source.name, key)
    if key == "run_name":
        migration.drop("output_dir", "the files of a run are in runs/NAME; set job.dir for another directory")
    _model(migration)
    steps = _steps(migration)
    write_batch(
        migration,
        migration.positive("per_device_train_batch_size"),
        migration.positive("gradient_accumulation_steps"),
        Axes(),
        ("per_device_train_batch_size", "gradient_accumulation_steps"),
        "per_device_train_batch_size",
        GLOBAL_BATCH,
    )
    _optimizer(migration)
    _schedule(migration, steps)
    _precision(migration)
    _data(migration)
    _hooks(migration)


def _model(migration: Migration) -> None:
    migration.write("model.name", "decoder")
    if folder := migration.get("model_name_or_path"):
        migration.write("model.from_hf", folder, "model_name_or_path", note="a folder on this machine: Forge downloads nothing")
    elif folder := migration.get("config_name"):
        migration.cannot(
            "config_name", "write the keys of [model], such as dim, layers and heads; from_hf would also take the weights"
        )
    else:
        for name, what in (
            ("dim", "width"),
            ("layers", "number of blocks"),
            ("heads", "query heads"),
            ("vocab_size", "vocabulary"),
        ):
            migration.must_fill_in(f"model.{name}", f"{what}; or set from_hf to a folder of a model")


def _steps(migration: Migration) -> int | None:
    steps = migration.integer("max_steps")
    if steps > 0:
        migration.write("train.max_steps", steps, "max_steps")
        migration.unused("num_train_epochs", because="max_steps is set")
        return steps
    epochs = migration.number("num_train_epochs")
    if migration.has("num_train_epochs"):
        migration.cannot("num_train_epochs", "a run has train.max_steps: epochs * sequences / train.global_batch; fill it in")
    migration.must_fill_in("train.max_steps", f"{epochs:g} epochs * sequences of the data / train.global_batch")
    migration.write_nothing("max_steps", "-1: the number of epochs counts")
    return None


def _optimizer(migration: Migration) -> None:
    name = str(migration.get("optim"))
    ours = _OPTIMIZERS.get(name, "adamw")
    migration.write("optimizer.name", ours, *(["optim"] if name in _OPTIMIZERS else []))
    if name not in _OPTIMIZERS:
        migration.cannot("optim", "Forge has adamw, adamw8bit, lion, muon and schedule_free_adamw; adamw is written")
    migration.write(
        "optimizer.betas", [migration.number("adam_beta1"), migration.number("adam_beta2")], "adam_beta1", "adam_beta2"
    )
    if ours == "lion":
        migration.unused("adam_epsilon", because="Lion has no eps")
    else:
        migration.write("optimizer.eps", migration.number("adam_epsilon"), "adam_epsilon")
    decay_embeddings(migration, migration.number("weight_decay"), "weight_decay", "Trainer")
    clip = migration.number("max_grad_norm")
    migration.write(
        "train.grad_clip", clip if clip > 0 else "none", "max_grad_norm", note="" if clip > 0 else "0 switches clipping off there"
    )


def _schedule(migration: Migration, steps: int | None) -> None:
    key, kind = "lr_scheduler_type", str(migration.get("lr_scheduler_type"))
    options = migration.get("lr_scheduler_kwargs")
    options = options if isinstance(options, dict) else {}
    warmup_key = "warmup_ratio" if migration.get("warmup_ratio") and not migration.get("warmup_steps") else "warmup_steps"
    given = migration.number(warmup_key)
    is_share = warmup_key == "warmup_ratio" or 0 < given < 1
    if is_share and steps is None:
        migration.must_fill_in("schedule.warmup", f"{given:g} of train.max_steps")
        warmup = 0
        migration.cannot(warmup_key, "a share of the run; Forge counts steps: fill in schedule.warmup")
    else:
        warmup = ceil(steps * given) if is_share and steps is not None else int(given)
    note = f"{given:g} of {steps} steps, rounded up; {WARMUP}" if is_share and steps is not None else WARMUP
    if migration.recipe["optimizer"]["name"] == "schedule_free_adamw" and kind != "constant":
        migration.cannot(key, "an optimizer that averages weights needs a constant rate, which is written")
        kind = "constant_with_warmup"
    floor, names = 0.0, {"name": key, "warmup": warmup_key, "floor": "lr_scheduler_kwargs"}
    if kind == "constant":
        migration.write("schedule.name", "none", key)
        migration.unused(warmup_key, because=f'{key} is "constant"')
        migration.unused("lr_scheduler_kwargs", because=f'{key} is "constant"')
        return
    if kind == "constant_with_warmup":
        write_schedule(migration, RateCurve("constant", warmup, 0, 0), steps or 1, names, note)
        return
    if kind == "inverse_sqrt":
        migration.write("schedule.name", "inverse_sqrt", key)
        migration.write("schedule.warmup", warmup, warmup_key, note=note)
        if options:
            migration.cannot("lr_scheduler_kwargs", "set schedule.timescale")
        return
    shape = {"linear": "linear", "cosine": "cosine", "cosine_with_min_lr": "cosine", "cosine_warmup_with_min_lr": "cosine"}.get(
        kind
    )
    used: set[str] = set()
    if kind.endswith("with_min_lr"):
        used = {"min_lr", "min_lr_rate"}
        least = migration.entry("lr_scheduler_kwargs", options, "min_lr", (int, float), 0.0)
        share = migration.entry("lr_scheduler_kwargs", options, "min_lr_rate", (int, float), 0.0)
        floor = share or ratio(least, migration.number("learning_rate"))
    if kind == "polynomial" and options.get("power", 1.0) == 1.0:
        used, shape = {"power", "lr_end"}, "linear"
        least = migration.entry("lr_scheduler_kwargs", options, "lr_end", (int, float), 1e-7)
        floor = ratio(least, migration.number("learning_rate"))
    if shape is None:
        why = "linear is written: choose cosine, cosine_restarts, inverse_sqrt, linear, multi_step, rex or wsd"
        migration.cannot(key, why)
        shape = "linear"
    if rest := sorted(set(options) - used):
        migration.cannot("lr_scheduler_kwargs", f"{', '.join(rest)}: no such option of a schedule; set the keys of [schedule]")
        names.pop("floor")
    if steps is None:
        migration.write("schedule.name", shape, key)
        if not is_share:
            migration.write("schedule.warmup", warmup, warmup_key, note=note)
        migration.write("schedule.min_ratio", float(f"{floor:.12g}"), *([names["floor"]] if "floor" in names else []))
        return
    curve = RateCurve("cosine" if shape == "cosine" else "linear", warmup, warmup, steps, float(f"{floor:.12g}"))
    write_schedule(migration, curve, steps, names, note)


def _precision(migration: Migration) -> None:
    if migration.flag("fp16"):
        migration.cannot("fp16", "fp16 needs a loss scaler, which Forge does not have; bf16 is written")
        migration.write("precision.compute", "bf16")
    elif migration.flag("bf16"):
        migration.write("precision.compute", "bf16", "bf16")
    else:
        migration.write("precision.compute", "fp32", "bf16", "fp16")
    migration.write_nothing("fp16", "precision.compute")
    migration.write("precision.state", "fp32")
    if migration.flag("torch_compile"):
        migration.write("transforms.compile.mode", "default", "torch_compile")
    else:
        migration.write_nothing("torch_compile", "[transforms.compile] is absent")
    checkpointing = [key for key in ("gradient_checkpointing", "activation_checkpointing") if migration.get(key)]
    if checkpointing:
        migration.write("transforms.recompute.policy", "full", *checkpointing)
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        if not migration.get(key):
            migration.write_nothing(key, "[transforms.recompute] is absent")
    seed = migration.integer("seed")
    migration.write("job.seed", seed, "seed", note="the same seed gives other weights and another order")
    if migration.get("data_seed") is not None:
        migration.write("data.seed", migration.integer("data_seed"), "data_seed")
    migration.write("train.deterministic", migration.flag("full_determinism"), "full_determinism")


def _data(migration: Migration) -> None:
    length = migration.get("block_size") or migration.get("max_length") or migration.get("max_seq_length")
    key = next((name for name in ("block_size", "max_length", "max_seq_length") if migration.get(name)), "")
    if length:
        migration.write("data.sequence_length", migration.integer(key), key)
    else:
        migration.must_fill_in("data.sequence_length", "the tokens of a row")
    if name := migration.get("dataset_name"):
        migration.write("data.sources.0.name", "huggingface")
        migration.write("data.sources.0.path", name, "dataset_name")
        if subset := migration.get("dataset_config_name"):
            migration.write("data.sources.0.subset", subset, "dataset_config_name")
        if migration.get("streaming"):
            migration.write("data.sources.0.stream", True, "streaming")
        migration.unused("train_file", because="dataset_name is set")
    elif file := migration.get("train_file"):
        kind = "jsonl" if str(file).endswith((".json", ".jsonl")) else "text"
        migration.write("data.sources.0.name", kind)
        migration.write("data.sources.0.path", file, "train_file")
    else:
        migration.write("data.sources.0.name", "store")
        migration.fill_in(
            "data.sources.0.path", "corpus", "a token store (python -m forge_data prepare); the file names no data", active=True
        )
    if file := migration.get("validation_file"):
        kind = "jsonl" if str(file).endswith((".json", ".jsonl")) else "text"
        migration.write("data.evaluation.validation.name", kind)
        migration.write("data.evaluation.validation.path", file, "validation_file")
    tokenizer = migration.get("tokenizer_name") or migration.get("model_name_or_path")
    if "path" in migration.recipe["data"]["sources"][0] and migration.recipe["data"]["sources"][0]["name"] != "store":
        migration.write("data.tokenizer.name", "bpe")
        if tokenizer:
            key = "tokenizer_name" if migration.get("tokenizer_name") else "model_name_or_path"
            migration.write(
                "data.tokenizer.path",
                f"{tokenizer}/tokenizer.json",
                key,
                note="the tokenizer.json in the folder of the tokenizer",
            )
        else:
            migration.fill_in("data.tokenizer.path", "tokenizer.json", "the tokenizer of the text", active=True)
    workers = migration.integer("dataloader_num_workers")
    migration.write("data.loader_workers", workers, "dataloader_num_workers")
    if workers > 2:
        migration.write("data.prefetch", workers)


def _every(migration: Migration, key: str, steps: Any) -> int | None:
    """Returns an interval in steps; a share of the run needs the number of steps."""
    value = migration.number(key)
    if value >= 1:
        return int(value)
    length = migration.recipe["train"]["max_steps"]
    return max(1, ceil(value * length)) if steps and value > 0 else None


def _hooks(migration: Migration) -> None:
    known = migration.get("max_steps") > 0
    every = _every(migration, "logging_steps", known) if migration.get("logging_strategy") == "steps" else None
    write_start(migration, every, "logging_steps" if every else "")
    migration.write_nothing("logging_strategy", "hook log counts steps" if every else "the default of hook log")
    strategy = "eval_strategy" if migration.has("eval_strategy") else "evaluation_strategy"
    if migration.get(strategy) == "no":
        migration.write_nothing(strategy, "no hook evaluate")
    elif "evaluation" not in migration.recipe["data"]:
        migration.cannot(strategy, 'name a held-out set in [data.evaluation.NAME], and add [[hooks]] name = "evaluate"')
    else:
        interval = migration.get("eval_steps") and _every(migration, "eval_steps", known)
        migration.hook("evaluate", strategy, more={"every": (interval, "eval_steps")} if interval else None)
        if migration.get(strategy) == "epoch":
            migration.cannot(strategy, "hook evaluate counts steps; set its every")
    saving = migration.get("save_strategy")
    if saving == "no":
        migration.write_nothing("save_strategy", "no hook save")
    else:
        interval = _every(migration, "save_steps", known)
        if saving == "steps" and interval:
            migration.write("checkpoint.every", interval, "save_steps")
        else:
            migration.cannot("save_strategy" if saving != "steps" else "save_steps", "checkpoint.every counts steps; fill it in")
        limit = migration.get("save_total_limit")
        migration.write("checkpoint.keep", limit or 0, "save_total_limit", note="" if limit else "all are kept: 0")
        if (
            migration.get("load_best_model_at_end")
            and "evaluation" in migration.recipe["data"]
            and migration.get(strategy) != "no"
        ):
            migration.hook("best", "load_best_model_at_end", metric=("evaluation/validation/loss", "load_best_model_at_end"))
        migration.hook("save", "save_strategy")
    reports = migration.get("report_to")
    reports = reports if isinstance(reports, list) else [reports]
    for name in reports:
        if name in ("mlflow", "tensorboard", "wandb"):
            migration.table("trackers", name, "report_to")
        elif name in ("all", "none", None):
            migration.write_nothing("report_to", "no tracker; metrics are in metrics.jsonl of the run's directory")
        else:
            migration.cannot("report_to", f"Forge has mlflow, tensorboard and wandb; {name} needs a plugin of forge.trackers")


TRAINER = Framework(
    "trainer",
    "transformers' Trainer",
    "JSON or YAML with TrainingArguments, or a Python file that calls TrainingArguments with literal values",
    KEYS,
    translate,
)
