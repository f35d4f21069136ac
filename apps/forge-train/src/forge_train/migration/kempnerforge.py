"""KempnerForge: TOML with the sections of its `JobConfig`."""

from collections.abc import Mapping
from math import ceil
from typing import Any

from forge_train.migration.concepts import (
    Axes,
    RateCurve,
    decay_embeddings,
    write_axes,
    write_batch,
    write_schedule,
    write_start,
)
from forge_train.migration.engine import Framework, Migration
from forge_train.migration.kempnerforge_keys import GLOBAL_BATCH, KEYS, WARMUP
from forge_train.migration.kempnerforge_vlm import translate_vlm

TABLES = frozenset({"vlm.module_patterns", "vlm.moma_experts_per_modality", "data.anneal_weights"})
"""Keys whose value is a table."""


def translate(migration: Migration) -> None:
    """Translates the keys with a rule."""
    migration.write("job.name", migration.source.name)
    _model(migration)
    _experts(migration)
    _run(migration)
    _optimizer(migration)
    _schedule(migration)
    _precision(migration)
    if migration.has("vlm.arch"):
        translate_vlm(migration)
    else:
        migration.unused(
            *(key.name for key in KEYS if key.name.split(".")[0] in ("vlm", "adapter", "vision_encoder")),
            because="[vlm] has no arch",
        )
    _data(migration)
    _evaluation(migration)
    _metrics(migration)


def _model(migration: Migration) -> None:
    get = migration.get
    if get("model.model_type") == "transformer":
        migration.write("model.name", "vlm" if migration.has("vlm.arch") else "decoder", "model.model_type")
    else:
        migration.write("model.name", "decoder")
        migration.cannot("model.model_type", "a model of your own is a plugin in Forge, see docs/writing-a-plugin.md")
    width = ffn_width(migration)
    if get("model.ffn_hidden_dim") is not None:
        migration.write("model.ffn_dim", width, "model.ffn_hidden_dim")
        migration.unused("model.ffn_dim_multiplier", because="model.ffn_hidden_dim is set")
    else:
        migration.write(
            "model.ffn_dim", width, "model.ffn_dim_multiplier", note="the width itself: 8/3 * dim * multiplier, rounded up to 256"
        )
    activation = get("model.activation")
    if activation == "silu":
        migration.write("model.mlp.name", "swiglu", "model.activation")
    elif activation in ("gelu", "relu"):
        migration.write("model.mlp.name", activation, "model.activation")
        if activation == "gelu":
            migration.write("model.mlp.exact", True, "model.activation")
    else:
        migration.cannot("model.activation", "choose model.mlp.name: swiglu, geglu, gelu, relu or relu2")


def ffn_width(migration: Migration) -> int:
    """Returns the hidden width of the feed-forward layer: `computed_ffn_hidden_dim` of KempnerForge."""
    if migration.get("model.ffn_hidden_dim") is not None:
        return migration.integer("model.ffn_hidden_dim")
    raw = int(4 * migration.positive("model.dim") * (2 / 3) * migration.number("model.ffn_dim_multiplier"))
    return 256 * ceil(raw / 256)


def _experts(migration: Migration) -> None:
    experts = migration.integer("model.num_experts")
    moma = migration.get("vlm.arch") == "moma"
    keys = [key.name for key in KEYS if key.name.startswith("model.moe_")]
    if moma:
        groups: dict[str, Any] = migration.get("vlm.moma_experts_per_modality")
        counts = [migration.entry("vlm.moma_experts_per_modality", groups, name, int, 4) for name in groups]
        if len(set(counts)) == 1:
            migration.write("model.moe.experts", counts[0], "vlm.moma_experts_per_modality", note="experts of each modality")
        else:
            migration.cannot(
                "vlm.moma_experts_per_modality", "all modalities have the same number of experts; set model.moe.experts"
            )
        migration.write("model.moe.top_k", 1)
        migration.write("model.fusion.routing", "expert_choice")
    elif experts == 0:
        migration.write_nothing("model.num_experts", "a dense model: [model.moe] is absent")
        migration.unused(*keys, because="model.num_experts is 0")
        return
    else:
        migration.write("model.moe.experts", experts, "model.num_experts")
        migration.write("model.moe.top_k", migration.integer("model.moe_top_k"), "model.moe_top_k")
        migration.write("model.moe.every", migration.integer("model.moe_frequency"), "model.moe_frequency")
    width = max(16, 16 * round(int(ffn_width(migration) * migration.number("model.moe_expert_ffn_multiplier")) / 16))
    note = "the width itself: multiplier * ffn_dim, rounded to 16" if migration.has("model.moe_expert_ffn_multiplier") else ""
    migration.write("model.moe.ffn_dim", width, "model.moe_expert_ffn_multiplier", note=note)
    if moma:
        migration.unused(*keys, because='vlm.arch is "moma"')
        return
    _router(migration)


def _router(migration: Migration) -> None:
    shared = migration.integer("model.moe_shared_experts")
    note = "KempnerForge builds one shared expert for any number above 0" if shared > 1 else ""
    migration.write("model.moe.shared", min(shared, 1), "model.moe_shared_experts", note=note)
    if (capacity := migration.number("model.moe_capacity_factor")) > 0:
        note = "Forge drops the slots with the smallest weights; KempnerForge drops the later tokens"
        migration.write("model.moe.capacity", capacity, "model.moe_capacity_factor", note=note)
    else:
        migration.write_nothing("model.moe_capacity_factor", "no limit: model.moe.capacity is absent")
    migration.write("model.moe.losses.z", migration.number("model.moe_router_z_loss_weight"), "model.moe_router_z_loss_weight")
    router, weight = migration.get("model.moe_router"), migration.number("model.moe_aux_loss_weight")
    sigmoid_keys = ("model.moe_sequence_aux_loss_weight", "model.moe_bias_schedule")
    if router == "softmax_topk":
        migration.write("model.moe.router.name", router, "model.moe_router")
        migration.write("model.moe.losses.micro_batch", weight, "model.moe_aux_loss_weight")
        migration.unused(*sigmoid_keys, because='model.moe_router is "softmax_topk"')
        return
    if router != "sigmoid_topk":
        migration.cannot(
            "model.moe_router", "a router of your own is a plugin in Forge; choose softmax_topk, sigmoid_topk or hash"
        )
        migration.unused("model.moe_aux_loss_weight", *sigmoid_keys, because="the router is not known")
        return
    note = "the bias follows the load of the whole batch of a step, not a running mean of micro-batches"
    migration.write("model.moe.router.name", router, "model.moe_router", note=note)
    sequence = migration.number("model.moe_sequence_aux_loss_weight")
    note = "moe_aux_loss_weight * moe_sequence_aux_loss_weight; each row by itself, and normalized scores (DeepSeek-V3)"
    migration.write("model.moe.losses.sequence", weight * sequence, "model.moe_aux_loss_weight", sigmoid_keys[0], note=note)
    schedule = migration.get("model.moe_bias_schedule")
    names = {"constant": "constant", "cosine_decay": "cosine", "linear_warmup": "warmup"}
    if schedule not in names:
        migration.cannot("model.moe_bias_schedule", f"choose model.moe.router.bias_schedule: {', '.join(names.values())}")
        return
    migration.write("model.moe.router.bias_schedule", names[schedule], "model.moe_bias_schedule")
    steps = migration.positive("train.max_steps")
    if schedule != "constant":
        length = steps if schedule == "cosine_decay" else max(1, steps // 10)
        migration.write("model.moe.router.bias_steps", length, "model.moe_bias_schedule")


def _run(migration: Migration) -> None:
    sizes = {axis: migration.positive(f"distributed.{axis}") for axis in ("dp_replicate", "tp", "cp", "pp", "ep")}
    sizes["dp_shard"] = migration.integer("distributed.dp_shard")
    axes = Axes(**sizes, ep_is_an_axis=True)
    write_axes(migration, axes, {axis: f"distributed.{axis}" for axis in sizes})
    keys = ("train.batch_size", "train.grad_accum_steps")
    migration.write("train.max_steps", migration.positive("train.max_steps"), "train.max_steps")
    accumulation = migration.positive("train.grad_accum_steps")
    write_batch(migration, migration.positive("train.batch_size"), accumulation, axes, keys, "train.batch_size", GLOBAL_BATCH)
    if axes.pp > 1:
        names = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved_1f1b": "interleaved"}
        name = migration.get("distributed.pp_schedule")
        if name in names:
            migration.write("parallel.pipeline.schedule.name", names[name], "distributed.pp_schedule")
        else:
            migration.cannot("distributed.pp_schedule", f"choose parallel.pipeline.schedule.name: {', '.join(names.values())}")
    else:
        migration.unused("distributed.pp_schedule", because="distributed.pp is 1")
    keep = migration.integer("checkpoint.keep_last_n")
    migration.write("checkpoint.keep", max(keep, 0), "checkpoint.keep_last_n", note="" if keep >= 0 else "0 keeps all")
    workers, ahead = migration.integer("data.num_workers"), migration.integer("data.prefetch_factor")
    note = "steps of all workers together: num_workers * prefetch_factor / grad_accum_steps, at least num_workers"
    if workers:
        migration.write("data.prefetch", max(workers, ceil(workers * ahead / accumulation)), "data.prefetch_factor", note=note)
    else:
        migration.unused("data.prefetch_factor", because="data.num_workers is 0")


def _optimizer(migration: Migration) -> None:
    get, name = migration.get, migration.get("optimizer.name")
    muon = [key.name for key in KEYS if key.name.startswith("optimizer.muon_")]
    decay = migration.number("optimizer.weight_decay")
    if name not in ("adamw", "lion", "schedule_free_adamw", "muon"):
        migration.cannot("optimizer.name", "an optimizer of your own is a plugin in Forge; AdamW is written")
        name = "adamw"
        migration.write("optimizer.name", name)
    else:
        migration.write("optimizer.name", name, "optimizer.name")
    if name == "muon":
        migration.write("optimizer.momentum", migration.number("optimizer.muon_momentum"), "optimizer.muon_momentum")
        migration.write("optimizer.nesterov", False)
        migration.remark("optimizer.nesterov", "KempnerForge has no Nesterov momentum")
        migration.write("optimizer.precision", "fp32")
        migration.remark("optimizer.precision", "KempnerForge orthogonalizes in fp32")
        migration.write("optimizer.newton_schulz_steps", migration.integer("optimizer.muon_ns_steps"), "optimizer.muon_ns_steps")
        rate = get("optimizer.muon_adam_lr")
        migration.write("optimizer.adamw_lr", get("optimizer.lr") if rate is None else rate, "optimizer.muon_adam_lr")
        migration.write("optimizer.adamw_betas", get("optimizer.betas"), "optimizer.betas")
        migration.write("optimizer.adamw_eps", get("optimizer.eps"), "optimizer.eps")
        note = "also decays the head, which KempnerForge's Muon does not unless the vocabulary is small"
        migration.write("optimizer.weight_decay", decay, "optimizer.weight_decay", note=note)
    else:
        migration.unused(*muon, because=f'optimizer.name is "{name}"')
        migration.write("optimizer.betas", get("optimizer.betas"), "optimizer.betas")
        if name == "lion":
            migration.unused("optimizer.eps", because="Lion has no eps")
        else:
            migration.write("optimizer.eps", get("optimizer.eps"), "optimizer.eps")
        decay_embeddings(migration, decay, "optimizer.weight_decay", "KempnerForge")
    if name != "schedule_free_adamw":
        migration.unused("optimizer.schedule_free_warmup_steps", because=f'optimizer.name is "{name}"')


def _schedule(migration: Migration) -> None:
    get, name, steps = migration.get, migration.get("scheduler.name"), migration.positive("train.max_steps")
    warmup = migration.integer("scheduler.warmup_steps")
    rest = [f"scheduler.{key}" for key in ("decay_steps", "min_lr_ratio", "stable_steps", "wsd_decay_type", "rex_alpha")]
    free = get("optimizer.name") == "schedule_free_adamw"
    keys = {
        "name": "scheduler.name",
        "warmup": "scheduler.warmup_steps",
        "end": "scheduler.decay_steps",
        "floor": "scheduler.min_lr_ratio",
    }
    if name in ("none", "constant") or free:
        if free:
            inner = migration.integer("optimizer.schedule_free_warmup_steps")
            migration.write("schedule.name", "constant")
            migration.write("schedule.warmup", inner, "optimizer.schedule_free_warmup_steps")
            if name not in ("none", "constant"):
                migration.cannot("scheduler.name", "an optimizer that averages weights needs a constant rate, which is written")
            else:
                migration.write("schedule.name", "constant", "scheduler.name")
            rest = [*rest, "scheduler.warmup_steps"]
        elif name == "constant":
            write_schedule(migration, RateCurve("constant", warmup, 0, 0), steps, keys, WARMUP)
        else:
            migration.write("schedule.name", "none", "scheduler.name")
            rest = [*rest, "scheduler.warmup_steps"]
        migration.unused(*rest, because=f'scheduler.name is "{name}"')
        return
    stable = migration.integer("scheduler.stable_steps") if get("scheduler.stable_steps") is not None else 0
    stable = stable if name == "wsd" else 0
    decay = get("scheduler.decay_steps")
    length = steps - warmup - stable if decay is None else migration.integer("scheduler.decay_steps")
    alpha, kind = migration.number("scheduler.rex_alpha"), get("scheduler.wsd_decay_type")
    curves: Mapping[Any, tuple[Any, list[str]]] = {
        "cosine": ("cosine", ["stable_steps", "wsd_decay_type", "rex_alpha"]),
        "linear": ("linear", ["stable_steps", "wsd_decay_type", "rex_alpha"]),
        "wsd": (kind if kind in ("cosine", "linear", "sqrt") else None, ["rex_alpha"]),
        "rex": ("linear" if alpha == 1 else "sqrt" if alpha == 0.5 else None, ["stable_steps", "wsd_decay_type"]),
    }
    shape, idle = curves.get(name, (None, []))
    migration.unused(*(f"scheduler.{key}" for key in idle), because=f'scheduler.name is "{name}"')
    if shape is None:
        key = {"rex": "scheduler.rex_alpha", "wsd": "scheduler.wsd_decay_type"}.get(name, "scheduler.name")
        migration.cannot(key, "Forge has no such curve; a cosine is written: choose [schedule] yourself, or write a plugin")
        shape = "cosine"
    if name == "wsd":
        keys["begin"] = "scheduler.stable_steps"
    curve = RateCurve(shape, warmup, warmup + stable, warmup + stable + length, migration.number("scheduler.min_lr_ratio"))
    write_schedule(migration, curve, steps, keys, WARMUP)
    if name == "wsd" and shape == kind:
        path = "schedule.shape" if migration.recipe["schedule"]["name"] == "wsd" else "schedule.name"
        migration.write(path, shape, "scheduler.wsd_decay_type")
    if name == "rex" and migration.get("scheduler.min_lr_ratio"):
        migration.write(
            "schedule.min_ratio",
            migration.get("scheduler.min_lr_ratio"),
            "scheduler.min_lr_ratio",
            note="the curve ends there in Forge; in KempnerForge it is cut off there",
        )
    if name != "wsd" and migration.recipe["schedule"]["name"] == "wsd":
        migration.remark("schedule.shape", f"scheduler.name = {name}")


def _precision(migration: Migration) -> None:
    kind = migration.get("train.mixed_precision")
    note = "KempnerForge keeps the parameters themselves in 16 bits; Forge keeps fp32 weights, and computes in bf16"
    if kind == "fp32":
        migration.write("precision.compute", "fp32", "train.mixed_precision")
    elif kind in ("bf16", "fp8"):
        migration.write("precision.compute", "bf16", "train.mixed_precision", note=note)
        if kind == "fp8":
            migration.write(
                "transforms.float8.recipe", "tensorwise", "train.mixed_precision", note="the output head stays in bf16"
            )
    else:
        migration.cannot("train.mixed_precision", "fp16 needs a loss scaler, which Forge does not have; bf16 is written")
        migration.write("precision.compute", "bf16")
    migration.write("precision.state", "fp32")
    if migration.flag("train.compile_model"):
        migration.write("transforms.compile.mode", "default", "train.compile_model")
    else:
        migration.write_nothing("train.compile_model", "[transforms.compile] is absent")
    policy = migration.get("train.activation_checkpointing")
    if policy == "full":
        migration.write("transforms.recompute.policy", "full", "train.activation_checkpointing")
    elif policy == "selective":
        note = (
            "recomputes all but matrix products and attention; KempnerForge recomputes attention: other memory, the same result"
        )
        migration.write("transforms.recompute.policy", "selective", "train.activation_checkpointing", note=note)
    elif policy == "none":
        migration.write_nothing("train.activation_checkpointing", "[transforms.recompute] is absent")
    else:
        migration.cannot("train.activation_checkpointing", "choose transforms.recompute.policy: full or selective")
    if migration.get("train.loss_fn") in ("cross_entropy", "chunked_cross_entropy"):
        migration.write("objective.name", "cross_entropy", "train.loss_fn")
    else:
        migration.cannot("train.loss_fn", "a loss of your own is a plugin of forge.objectives; cross_entropy is written")
        migration.write("objective.name", "cross_entropy")


def _source(migration: Migration, path: str, keys: Mapping[str, str], image: bool) -> None:
    """Writes the source at `path` from keys of a section: dataset_path and file_pattern, or hf_dataset_name."""
    directory, hub = migration.get(keys["path"]), migration.get(keys["hub"])
    hub_keys = [keys[name] for name in ("subset", "split", "text", "image", "size", "stream", "prompt") if name in keys]
    if hub:
        migration.write(f"{path}.name", "image_dataset" if image else "huggingface")
        migration.write(f"{path}.path", hub, keys["hub"])
        fields = {"subset": "subset", "split": "dataset_split", "text": "text"}
        fields |= {"image": "images", "size": "size"} if image else {"stream": "stream"}
        for name, field in fields.items():
            if name in keys and migration.get(keys[name]) is not None:
                migration.write(f"{path}.{field}", migration.get(keys[name]), keys[name])
        migration.unused(*(keys[name] for name in ("path", "pattern")), because=f"{keys['hub']} is set")
        return
    if directory:
        pattern = migration.get(keys["pattern"])
        migration.write(f"{path}.name", "tokens")
        migration.write(f"{path}.path", f"{str(directory).rstrip('/')}/{pattern}", keys["path"], keys["pattern"])
        if not str(pattern).endswith(".npy"):
            _raw_dtype(migration, path)
        migration.fill_in(f"{path}.eos", 2, "the id that ends a document; without it, each file is one document")
        migration.unused(keys["hub"], *hub_keys, because=f"{keys['hub']} is not set")
        return
    what = "a token store (python -m forge_data prepare); the file names no data"
    migration.write(f"{path}.name", "store")
    migration.fill_in(f"{path}.path", "corpus", what, active=True)
    migration.unused(keys["path"], keys["pattern"], keys["hub"], *hub_keys, because="no data is named")


def _raw_dtype(migration: Migration, path: str) -> None:
    dtype = "uint16" if migration.integer("model.vocab_size") <= 2**16 else "uint32"
    migration.fill_in(
        f"{path}.dtype", dtype, "the dtype of the .bin files, which KempnerForge guesses from their size", active=True
    )


_TRAINING = {
    "path": "data.dataset_path",
    "pattern": "data.file_pattern",
    "hub": "data.hf_dataset_name",
    "subset": "data.hf_dataset_config",
    "split": "data.hf_dataset_split",
    "text": "data.hf_dataset_text_field",
    "image": "data.hf_dataset_image_field",
    "size": "data.hf_image_size",
    "stream": "data.hf_streaming",
    "prompt": "data.hf_dataset_prompt_field",
}
_EVALUATION = {
    "path": "eval.dataset_path",
    "pattern": "eval.file_pattern",
    "hub": "eval.hf_dataset_name",
    "subset": "eval.hf_dataset_config",
    "split": "eval.hf_dataset_split",
}


def _data(migration: Migration) -> None:
    get, image = migration.get, migration.has("vlm.arch")
    packed = migration.flag("data.pack_sequences")
    note = "attention stops at document borders in both; positions restart as well in Forge" if packed else ""
    if image:
        migration.write("data.packing", "best_fit", "data.pack_sequences", note="documents with images are packed whole")
    else:
        migration.write("data.documents", "mask" if packed else "ignore", "data.pack_sequences", note=note)
    datasets = get("data.datasets")
    if get("video.data_root"):
        _video(migration)
    elif datasets:
        _mixture(migration)
    else:
        _source(migration, "data.sources.0", _TRAINING, image)
        if migration.has("data.datasets"):
            migration.write_nothing("data.datasets", "an empty list: one source")
    if get("data.hf_dataset_prompt_field"):
        migration.cannot(
            "data.hf_dataset_prompt_field",
            "store prompts and answers as messages, and name that column in data.sources.0.messages",
        )
    _phases(migration)
    tokenizer = get("data.tokenizer_path")
    if tokenizer:
        path = str(tokenizer) if str(tokenizer).endswith(".json") else f"{tokenizer}/tokenizer.json"
        migration.write("data.tokenizer.name", "bpe")
        migration.write(
            "data.tokenizer.path",
            path,
            "data.tokenizer_path",
            note="the file tokenizer.json of that tokenizer, which Forge does not download",
        )
    elif any("text" in source for source in migration.recipe["data"].get("sources", [])) or image:
        migration.write("data.tokenizer.name", "bpe")
        migration.fill_in("data.tokenizer.path", "tokenizer.json", "the tokenizer of the text", active=True)


def _video(migration: Migration) -> None:
    if migration.get("video.dataset_type") == "webvid":
        migration.write("data.sources.0.name", "video_csv", "video.dataset_type")
    else:
        migration.cannot("video.dataset_type", "choose video_csv or video_frames for data.sources.0.name")
        migration.write("data.sources.0.name", "video_csv")
    migration.write("data.sources.0.path", migration.get("video.data_root"), "video.data_root", note="name the CSV file below it")
    migration.write(
        "data.sources.0.frames", migration.integer("video.max_frames"), "video.max_frames", note="every clip has as many frames"
    )
    migration.write("data.sources.0.size", migration.integer("video.frame_size"), "video.frame_size")
    migration.unused(*_TRAINING.values(), "data.datasets", because="video.data_root is set")


def _mixture(migration: Migration) -> None:
    for index, entry in enumerate(migration.tables("data.datasets")):
        path = f"data.sources.{index}"
        if entry.get("hf_name"):
            migration.write(f"{path}.name", "huggingface")
            migration.write(f"{path}.path", entry["hf_name"], "data.datasets")
            if entry.get("hf_config"):
                migration.write(f"{path}.subset", entry["hf_config"], "data.datasets")
            migration.write(f"{path}.dataset_split", migration.get("data.hf_dataset_split"), "data.hf_dataset_split")
            migration.write(f"{path}.text", migration.get("data.hf_dataset_text_field"), "data.hf_dataset_text_field")
        else:
            pattern = str(migration.get("data.file_pattern"))
            migration.write(f"{path}.name", "tokens")
            migration.write(
                f"{path}.path", f"{str(entry.get('path', '')).rstrip('/')}/{pattern}", "data.datasets", "data.file_pattern"
            )
            if not pattern.endswith(".npy"):
                _raw_dtype(migration, path)
        migration.write(
            f"{path}.weight", float(migration.entry("data.datasets", entry, "weight", (int, float), 1.0)), "data.datasets"
        )
        if entry.get("name"):
            migration.write(f"{path}.label", entry["name"], "data.datasets")
        if unknown := sorted(set(entry) - {"path", "weight", "name", "hf_name", "hf_config"}):
            migration.cannot("data.datasets", f"entry {index} has unknown keys: {', '.join(unknown)}")
    single = [
        key
        for key in _TRAINING.values()
        if key not in ("data.file_pattern", "data.hf_dataset_split", "data.hf_dataset_text_field")
    ]
    migration.unused(*single, because="data.datasets replaces it")


def _phases(migration: Migration) -> None:
    phases = migration.tables("data.phases")
    start, weights = migration.integer("data.anneal_start_step"), migration.get("data.anneal_weights")
    entries: list[tuple[dict[str, Any], str]] = [(entry, "data.phases") for entry in phases]
    if start:
        entries.append(({"start_step": start, "dataset_weights": weights}, "data.anneal_start_step"))
    index = 0
    for entry, key in entries:
        if migration.entry(key, entry, "start_step", int, 0) < 1:
            migration.cannot(key, "a phase from step 0 on is the mixture itself: set the weights of [[data.sources]]")
            continue
        migration.write(f"data.phases.{index}.start", entry["start_step"], key)
        if entry.get("dataset_weights"):
            migration.write(
                f"data.phases.{index}.weights", entry["dataset_weights"], key if key == "data.phases" else "data.anneal_weights"
            )
        if entry.get("lr_scale") is not None:
            migration.write(f"data.phases.{index}.lr_scale", entry["lr_scale"], key)
        index += 1
    if not entries:
        migration.write_nothing("data.phases", "no phases")
        migration.unused("data.anneal_start_step", "data.anneal_weights", because="data.anneal_start_step is 0")


def _evaluation(migration: Migration) -> None:
    if not migration.flag("eval.enabled"):
        migration.write_nothing("eval.enabled", "no held-out set and no hook evaluate")
        migration.unused(*(key.name for key in KEYS if key.name.startswith("eval.")), because="eval.enabled is false")
        return
    _source(migration, "data.evaluation.validation", _EVALUATION, migration.has("vlm.arch"))
    migration.drop("eval.steps")
    migration.hook("evaluate", "eval.enabled", every=(migration.integer("eval.interval"), "eval.interval"))


def _metrics(migration: Migration) -> None:
    write_start(migration, migration.integer("metrics.log_interval"), "metrics.log_interval")
    if every := migration.integer("train.nccl_health_check_interval"):
        note = "also probes the device, disk and memory of every machine"
        migration.hook(
            "machine", "train.nccl_health_check_interval", note=note, every=(every, "train.nccl_health_check_interval")
        )
    else:
        migration.write_nothing("train.nccl_health_check_interval", "no hook machine")
    if migration.flag("profiling.enable"):
        first, last = migration.integer("profiling.start_step"), migration.integer("profiling.end_step")
        migration.hook(
            "profile",
            "profiling.enable",
            at=([max(first, 1)], "profiling.start_step"),
            steps=(max(last - first, 1), "profiling.end_step"),
        )
    else:
        migration.unused("profiling.start_step", "profiling.end_step", because="profiling.enable is false")
        migration.write_nothing("profiling.enable", "no hook profile")
    migration.hook("save")
    if migration.flag("metrics.enable_wandb"):
        migration.table(
            "trackers", "wandb", "metrics.enable_wandb", project=(migration.get("metrics.wandb_project"), "metrics.wandb_project")
        )
    else:
        migration.write_nothing("metrics.enable_wandb", "no tracker wandb")
        migration.unused("metrics.wandb_project", because="metrics.enable_wandb is false")
    if migration.flag("metrics.enable_tensorboard"):
        migration.table("trackers", "tensorboard", "metrics.enable_tensorboard")
    else:
        migration.write_nothing("metrics.enable_tensorboard", "no tracker tensorboard")
    if name := migration.get("metrics.wandb_run_name"):
        migration.write("job.name", str(name).replace("/", "-"), "metrics.wandb_run_name")


KEMPNERFORGE = Framework(
    "kempnerforge", "KempnerForge", "a TOML file with the sections [model], [train], [optimizer] and [scheduler]", KEYS, translate
)
