"""torchtitan: TOML of its `JobConfig`, and Python functions that return a `Trainer.Config`, read without running them."""

from collections.abc import Mapping
from typing import Any

from forge_train.migration.concepts import (
    Axes,
    RateCurve,
    Shape,
    write_axes,
    write_batch,
    write_micro_batch,
    write_schedule,
    write_start,
)
from forge_train.migration.engine import Framework, Migration
from forge_train.migration.torchtitan_keys import KEYS, SCHEDULES, SHAPES

CONVERT = "convert the weights (forge-train convert), then set start.weights"


def translate(migration: Migration) -> None:
    """Translates the keys with a rule."""
    migration.write("job.name", migration.source.name)
    _model(migration)
    axes = _layout(migration)
    _batch(migration, axes)
    _schedule(migration)
    _optimizer(migration)
    _precision(migration)
    _recompute(migration)
    _data(migration)
    _checkpoint(migration)
    _hooks(migration)


def _model(migration: Migration) -> None:
    family, flavor = str(migration.get("model.name")), str(migration.get("model.flavor"))
    base = flavor.removesuffix("_flex").removesuffix("_varlen").removesuffix("_flex_attn").removesuffix("_varlen_attn")
    shape = SHAPES.get((family, base))
    length = _length(migration)
    migration.write("model.name", "decoder")
    if shape is None:
        for key in ("model.name", "model.flavor"):
            migration.cannot(key, f"the shape of {family} {flavor} is not known here; fill in [model]")
        for name, what in _SHAPE_BLANKS.items():
            migration.must_fill_in(f"model.{name}", f"{what} of {family} {flavor}")
    else:
        note = "the published shape; initial weights are Forge's"
        for name, value in shape.items():
            migration.write(f"model.{name}", value, "model.flavor", note=note)
            migration.remark(f"model.{name}", f"{family} {flavor}")
        if migration.has("model.name"):
            migration.write("model.vocab_size", shape["vocab_size"], "model.name", note=note)
            migration.remark("model.vocab_size", f"{family} {flavor}")
    migration.write("model.max_length", length)
    migration.remark("model.max_length", "torchtitan sets it to the sequence length")


_SHAPE_BLANKS = {
    "dim": "width",
    "layers": "number of blocks",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "ffn_dim": "width of the feed-forward layer",
    "vocab_size": "vocabulary",
}


def _length(migration: Migration) -> int:
    return migration.positive(
        "training.max_context_length" if migration.has("training.max_context_length") else "training.seq_len"
    )


def _layout(migration: Migration) -> Axes:
    names = {
        "dp_shard": "data_parallel_shard_degree",
        "dp_replicate": "data_parallel_replicate_degree",
        "tp": "tensor_parallel_degree",
        "cp": "context_parallel_degree",
        "pp": "pipeline_parallel_degree",
        "ep": "expert_parallel_degree",
    }
    keys = {axis: f"parallelism.{name}" for axis, name in names.items()}
    axes = Axes(
        **{axis: migration.integer(key) if axis == "dp_shard" else migration.positive(key) for axis, key in keys.items()},
        ep_is_an_axis=False,
    )
    write_axes(migration, axes, keys)
    key = "parallelism.pipeline_parallel_schedule"
    if axes.pp == 1:
        migration.unused(
            *(item.name for item in KEYS if item.name.startswith("parallelism.pipeline_parallel_")), because="there is one stage"
        )
    elif (name := str(migration.get(key)).lower()) in SCHEDULES:
        migration.write("parallel.pipeline.schedule.name", SCHEDULES[name], key)
    else:
        migration.cannot(key, f"choose parallel.pipeline.schedule.name: {', '.join(sorted(set(SCHEDULES.values())))}")
    if axes.cp > 1:
        rotate = "parallelism.context_parallel_rotate_method"
        note = "" if migration.get(rotate) == "allgather" else "blocks of keys travel around the ranks"
        migration.write("transforms.context.kind", "ring" if note else "all_gather", rotate, note=note)
    if axes.tp > 1:
        asynchronous = "parallelism.enable_async_tensor_parallel"
        if not migration.has(asynchronous):
            asynchronous = "compile.enable_async_tensor_parallel"
        if migration.flag(asynchronous):
            migration.write("transforms.tensor.asynchronous", True, asynchronous)
        if not migration.flag("parallelism.enable_sequence_parallel"):
            migration.write("transforms.tensor.sequence_parallel", False, "parallelism.enable_sequence_parallel")
    policy = migration.get("parallelism.fsdp_reshard_after_forward")
    if policy in ("always", "never"):
        migration.write("transforms.shard.reshard", policy == "always", "parallelism.fsdp_reshard_after_forward")
    else:
        migration.write_nothing(
            "parallelism.fsdp_reshard_after_forward", "transforms.shard.reshard is unset: Forge's default is the same"
        )
    if migration.flag("training.enable_cpu_offload"):
        migration.write("transforms.shard.offload", True, "training.enable_cpu_offload")
    return axes


def _batch(migration: Migration, axes: Axes) -> None:
    steps = migration.positive("training.steps")
    migration.write("train.max_steps", steps, "training.steps")
    tokens_key, step_key = "training.num_tokens_per_microbatch_per_dp_rank", "training.num_tokens_per_train_step"
    if migration.has("training.max_context_length") or migration.has(tokens_key):
        length = _length(migration)
        migration.write("data.sequence_length", length, "training.max_context_length")
        micro, rest = divmod(migration.positive(tokens_key), length)
        if rest or micro == 0:
            migration.cannot(tokens_key, f"is not a multiple of the {length} tokens of a sequence; fill in train.micro_batch")
            micro = max(micro, 1)
        note = f"in sequences of {length} tokens"
        total = migration.integer(step_key)
        if total > 0 and total % length == 0:
            migration.write("train.global_batch", total // length, step_key, note=note)
            _known_micro_batch(migration, micro, total // length, axes, tokens_key)
            return
        if total > 0:
            migration.cannot(step_key, f"is not a multiple of the {length} tokens of a sequence; fill in train.global_batch")
        parts = migration.positive("parallelism.num_pp_microbatches") if axes.pp > 1 else 1
        write_batch(migration, micro, parts, axes, (tokens_key, "parallelism.num_pp_microbatches"), tokens_key, note)
        return
    migration.write("data.sequence_length", migration.positive("training.seq_len"), "training.seq_len")
    local, key = migration.positive("training.local_batch_size"), "training.local_batch_size"
    micro, parts = local, 1
    if axes.pp > 1:
        key = "parallelism.pipeline_parallel_microbatch_size"
        micro = min(local, migration.positive(key))
        parts = local // micro
    total = migration.integer("training.global_batch_size")
    if total > 0:
        migration.write("train.global_batch", total, "training.global_batch_size")
        _known_micro_batch(migration, micro, total, axes, key)
        if key != "training.local_batch_size":
            migration.drop("training.local_batch_size", "a pipeline's micro-batches are train.micro_batch")
        return
    write_batch(
        migration,
        micro,
        parts,
        axes,
        ("training.local_batch_size", "training.global_batch_size"),
        key,
        "local_batch_size * data ranks",
    )


def _known_micro_batch(migration: Migration, micro: int, total: int, axes: Axes, key: str) -> None:
    ranks = axes.data_ranks(migration.world)
    if ranks is None:
        migration.write("train.micro_batch", micro, key)
    else:
        write_micro_batch(migration, micro, total, ranks, key)


def _schedule(migration: Migration) -> None:
    steps = migration.positive("training.steps")
    total = steps if migration.get("lr_scheduler.total_steps") is None else migration.positive("lr_scheduler.total_steps")
    warmup = min(migration.integer("lr_scheduler.warmup_steps"), total)
    ratio = migration.get("lr_scheduler.decay_ratio")
    decay = total - warmup if ratio is None else min(round(total * migration.number("lr_scheduler.decay_ratio")), total - warmup)
    shapes: Mapping[Any, Shape] = {"linear": "linear", "cosine": "cosine", "sqrt": "one_minus_sqrt"}
    shape = shapes.get(migration.get("lr_scheduler.decay_type"))
    if shape is None:
        migration.cannot(
            "lr_scheduler.decay_type", "choose schedule.shape: linear, cosine, sqrt or one_minus_sqrt; linear is written"
        )
        shape = "linear"
    names = {"name": "lr_scheduler.decay_type", "warmup": "lr_scheduler.warmup_steps", "floor": "lr_scheduler.min_lr_factor"}
    if migration.has("lr_scheduler.total_steps"):
        names["end"] = "lr_scheduler.total_steps"
    if decay < 1:
        write_schedule(migration, RateCurve("constant", warmup, 0, 0), steps, names)
        return
    curve = RateCurve(shape, warmup, total - decay, total, migration.number("lr_scheduler.min_lr_factor"))
    write_schedule(migration, curve, steps, names)
    if ratio is not None:
        if migration.recipe["schedule"]["name"] == "wsd":
            migration.write("schedule.decay", decay / max(total, steps), "lr_scheduler.decay_ratio")
        else:
            migration.write_nothing("lr_scheduler.decay_ratio", "the decay begins after the warm-up")


def _optimizer(migration: Migration) -> None:
    name = migration.get("optimizer.name")
    migration.write("optimizer.name", "adamw", *(["optimizer.name"] if name == "AdamW" else []))
    if name != "AdamW":
        migration.cannot("optimizer.name", "Forge has adamw, adamw8bit, lion, muon and schedule_free_adamw; adamw is written")
    betas = [migration.number("optimizer.beta1"), migration.number("optimizer.beta2")]
    migration.write("optimizer.betas", betas, "optimizer.beta1", "optimizer.beta2")
    decay = migration.number("optimizer.weight_decay")
    note = "torchtitan decays all parameters, also norms and embeddings; [[parameters.groups]] does the same" if decay else ""
    migration.write("optimizer.weight_decay", decay, "optimizer.weight_decay", note=note)
    if decay:
        migration.write("parameters.groups.0.match", "*")
        migration.write("parameters.groups.0.weight_decay", decay)
        migration.remark(
            "parameters.groups.0.match", "torchtitan decays all parameters; without this group, norms and embeddings are not"
        )


def _precision(migration: Migration) -> None:
    state, compute = migration.get("training.dtype"), migration.get("training.mixed_precision_param")
    formats = {"bfloat16": "bf16", "float32": "fp32"}
    if state == "bfloat16":
        migration.write("precision.compute", "bf16", "training.mixed_precision_param")
        migration.write("precision.state", "bf16", "training.dtype", note="with stochastic rounding in Forge")
    else:
        migration.write("precision.compute", formats.get(compute, "bf16"), "training.mixed_precision_param")
        migration.write("precision.state", "fp32", "training.dtype")
    converters = migration.get("model.converters")
    if not isinstance(converters, list):
        converters = [converters]
    if any("float8" in str(item) for item in converters):
        recipe = migration.get("quantize.linear.float8.recipe_name") or "tensorwise"
        if recipe in ("tensorwise", "rowwise"):
            migration.write("transforms.float8.recipe", recipe, "quantize.linear.float8.recipe_name", "model.converters")
        else:
            migration.cannot("quantize.linear.float8.recipe_name", "choose transforms.float8.recipe: tensorwise or rowwise")
            migration.write("transforms.float8.recipe", "rowwise", "model.converters")
        if migration.get("quantize.linear.float8.filter_fqns"):
            migration.cannot(
                "quantize.linear.float8.filter_fqns", "names of layers differ; list Forge's in transforms.float8.exclude"
            )
    others = [item for item in converters if "float8" not in str(item)]
    if others:
        migration.cannot("model.converters", f"Forge has float8, but not {', '.join(map(str, others))}")


def _recompute(migration: Migration) -> None:
    mode, option = migration.get("activation_checkpoint.mode"), str(migration.get("activation_checkpoint.selective_ac_option"))
    key, options = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    if mode == "full":
        migration.write("transforms.recompute.policy", "full", key)
    elif mode == "selective" and option.isdigit():
        migration.write("transforms.recompute.policy", "full", key, note=f"every {option}. block is recomputed as a whole")
        migration.write("transforms.recompute.every", int(option), options)
    elif mode == "selective":
        migration.write("transforms.recompute.policy", "selective", key)
        note = "Forge keeps the results of all matrix products and attention; torchtitan those of every second product"
        migration.write("transforms.recompute.keep", ["matmul", "attention"], options, note=note)
    elif mode == "memory_budget":
        migration.write(
            "transforms.compile.budget",
            migration.number("activation_checkpoint.memory_budget"),
            "activation_checkpoint.memory_budget",
        )
        migration.write_nothing(key, "transforms.compile.budget")
    else:
        migration.write_nothing(key, "[transforms.recompute] is absent")
    components = migration.get("compile.components")
    if migration.flag("compile.enable") and isinstance(components, list) and "model" in components:
        migration.write("transforms.compile.mode", "default", "compile.enable", "compile.components")
    else:
        migration.write_nothing("compile.enable", "[transforms.compile] is absent")


def _data(migration: Migration) -> None:
    flavor, dataset = str(migration.get("model.flavor")), str(migration.get("training.dataset"))
    mask = "flex" in flavor or "varlen" in flavor
    migration.write("data.documents", "mask" if mask else "ignore")
    migration.remark(
        "data.documents", "attention stops at document borders" if mask else "attention crosses document borders in torchtitan"
    )
    _source(migration, "data.sources.0", dataset, "training")
    assets = str(
        migration.get("model.hf_assets_path")
        if not migration.has("model.tokenizer_path")
        else migration.get("model.tokenizer_path")
    )
    key = "model.tokenizer_path" if migration.has("model.tokenizer_path") else "model.hf_assets_path"
    migration.write("data.tokenizer.name", "bpe")
    path = assets if assets.endswith(".json") else f"{assets.rstrip('/')}/tokenizer.json"
    migration.write("data.tokenizer.path", path, key)
    if migration.flag("validation.enable"):
        _source(migration, "data.evaluation.validation", str(migration.get("validation.dataset")), "validation")
    else:
        migration.write_nothing("validation.enable", "no held-out set and no hook evaluate")
        migration.unused(
            *(item.name for item in KEYS if item.name.startswith("validation.")), because="validation.enable is false"
        )


def _source(migration: Migration, path: str, dataset: str, section: str) -> None:
    migration.write(f"{path}.name", "huggingface")
    local = migration.get(f"{section}.dataset_path")
    if local:
        migration.write(f"{path}.path", local, f"{section}.dataset_path")
        migration.drop(f"{section}.dataset", f"{section}.dataset_path is set; set the column in {path}.text")
        return
    if dataset in ("c4", "c4_validation"):
        note = "the corpus of that name"
        migration.write(f"{path}.path", "allenai/c4", f"{section}.dataset", note=note)
        migration.write(f"{path}.subset", "en", f"{section}.dataset", note=note)
        migration.write(
            f"{path}.dataset_split", "validation" if dataset == "c4_validation" else "train", f"{section}.dataset", note=note
        )
        migration.write(f"{path}.stream", True, f"{section}.dataset", note=note)
        return
    migration.cannot(f"{section}.dataset", f"{dataset!r} is a name of torchtitan's; name the dataset in {path}.path")
    migration.fill_in(f"{path}.path", dataset, "the data set, or its directory", active=True)


def _checkpoint(migration: Migration) -> None:
    if not migration.flag("checkpoint.enable"):
        migration.write_nothing("checkpoint.enable", "no hook save: nothing is saved")
        migration.unused(
            *(item.name for item in KEYS if item.name.startswith("checkpoint.")), because="checkpoint.enable is false"
        )
        return
    migration.write("checkpoint.every", migration.integer("checkpoint.interval"), "checkpoint.interval")
    migration.write("checkpoint.keep", migration.integer("checkpoint.keep_latest_k"), "checkpoint.keep_latest_k")
    modes = {"disabled": "sync", "async": "async", "async_with_pinned_mem": "async"}
    mode = migration.get("checkpoint.async_mode")
    if mode in modes:
        migration.write("checkpoint.mode", modes[mode], "checkpoint.async_mode")
    else:
        migration.cannot("checkpoint.async_mode", "choose checkpoint.mode: sync or async")
    if migration.flag("checkpoint.enable_first_step_checkpoint"):
        note = "Forge saves step 0; torchtitan saves after the first step"
        migration.write("checkpoint.first", True, "checkpoint.enable_first_step_checkpoint", note=note)
    step = migration.integer("checkpoint.load_step")
    migration.write("checkpoint.resume", "auto" if step < 0 else step, "checkpoint.load_step")
    migration.drop("checkpoint.initial_load_path", CONVERT)


def _hooks(migration: Migration) -> None:
    write_start(migration, migration.integer("metrics.log_freq"), "metrics.log_freq")
    if migration.flag("validation.enable"):
        migration.hook("evaluate", "validation.enable", every=(migration.integer("validation.freq"), "validation.freq"))
        migration.drop("validation.steps")
    profiles, snapshots = migration.flag("profiling.enable_profiling"), migration.flag("profiling.enable_memory_snapshot")
    if profiles or snapshots:
        migration.hook(
            "profile",
            "profiling.enable_profiling",
            every=(migration.integer("profiling.profile_freq"), "profiling.profile_freq"),
            steps=(migration.integer("profiling.profiler_active"), "profiling.profiler_active"),
            warmup=(migration.integer("profiling.profiler_warmup"), "profiling.profiler_warmup"),
            memory=(snapshots, "profiling.enable_memory_snapshot"),
        )
    else:
        migration.write_nothing("profiling.enable_profiling", "no hook profile")
        migration.unused(*(item.name for item in KEYS if item.name.startswith("profiling.")), because="profiling is off")
    if migration.flag("checkpoint.enable"):
        migration.hook("save", "checkpoint.enable")
    for key, tracker in (("metrics.enable_wandb", "wandb"), ("metrics.enable_tensorboard", "tensorboard")):
        if migration.flag(key):
            migration.table("trackers", tracker, key)
        else:
            migration.write_nothing(key, f"no tracker {tracker}")


TORCHTITAN = Framework(
    "torchtitan",
    "torchtitan",
    "a TOML file with the sections [training] and [parallelism], or a Python file with functions that return a Trainer.Config",
    KEYS,
    translate,
)
