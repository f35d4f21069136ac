"""The keys of torchtitan's TOML files and of its `Trainer.Config`, with their defaults, and the shapes of its models."""

from collections.abc import Mapping
from typing import Any

from forge_train.migration.engine import Key, without

SCHEDULES: Mapping[str, str] = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "interleaved_zero_bubble",
    "zbvzerobubble": "zbv",
    "dualpipev": "dualpipev",
}
"""Pipeline schedules, in lower case as torch accepts them -> Forge's."""

_LLAMA3: dict[str, Any] = {
    "vocab_size": 128256,
    "rope.theta": 500000.0,
    "rope.scaling": "llama3",
    "rope.factor": 8.0,
    "rope.original_max_length": 8192,
}


def _llama3(dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int, vocab_size: int = 128256) -> dict[str, Any]:
    sizes = {"dim": dim, "layers": layers, "heads": heads, "kv_heads": kv_heads, "ffn_dim": ffn_dim}
    return {**sizes, **_LLAMA3, "vocab_size": vocab_size}


def _qwen3(dim: int, layers: int, heads: int, ffn_dim: int, tied: bool) -> dict[str, Any]:
    return {
        "dim": dim,
        "layers": layers,
        "heads": heads,
        "kv_heads": 8,
        "head_dim": 128,
        "ffn_dim": ffn_dim,
        "vocab_size": 151936,
        "tied_embeddings": tied,
        "rope.theta": 1000000.0,
        "attention.qk_norm": "head",
        "norm.eps": 1e-6,
    }


SHAPES: Mapping[tuple[str, str], dict[str, Any]] = {
    ("llama3", "debugmodel"): _llama3(256, 6, 16, 16, 768, 2048),
    ("llama3", "8B"): _llama3(4096, 32, 32, 8, 14336),
    ("llama3", "70B"): _llama3(8192, 80, 64, 8, 28672),
    ("llama3", "405B"): _llama3(16384, 126, 128, 8, 53248),
    ("qwen3", "0.6B"): _qwen3(1024, 28, 16, 3072, True),
    ("qwen3", "1.7B"): _qwen3(2048, 28, 16, 6144, True),
    ("qwen3", "4B"): _qwen3(2560, 36, 32, 9728, True),
    ("qwen3", "8B"): _qwen3(4096, 36, 32, 12288, False),
    ("qwen3", "14B"): _qwen3(5120, 40, 40, 17408, False),
    ("qwen3", "32B"): _qwen3(5120, 64, 64, 25600, False),
}
"""(model.name, model.flavor) -> keys of `[model]`: the published shapes of Llama 3 and Qwen3."""

_KERNEL = "a choice of kernels, which Forge makes itself"
_TORCHFT = "torchft is not used: a run goes on from its newest verified checkpoint, and launch restarts it"
_OWN_CODE = "code of your own is a plugin: name it by `./mine.py:Thing` in the recipe"
_ATTEMPT = "see `forge-train plan`, which needs no GPU"
_IN_RUN = "the files of a run are in its directory; set job.dir"
_LOAD = "convert the weights (forge-train convert), then set start.weights"
_EXPORT = "use forge-train convert on a checkpoint"
_PIPELINE = "parallel.pipeline.split says how many blocks each stage has"
_TRACES = "set parallel.patience: waiting ranks say for whom they wait"
_QUANTIZE = "Forge has float8 of torchao (transforms.float8), also for experts, but no MX formats"
_LOADING = "data.loader_workers and data.prefetch; batches for GPUs are always pinned"
_BATCH = "in sequences over all ranks"
_CONTEXT = "tokens there; a row of Forge has data.sequence_length tokens, and batches count rows"

KEYS: tuple[Key, ...] = (
    Key("job.dump_folder", "./outputs", "", _IN_RUN),
    Key("job.description", "default job", "", "write a comment into the recipe; job.name names the run"),
    *without(
        "job.",
        "config_file print_config save_config_file",
        "the resolved recipe is in the run's directory and in every checkpoint",
    ),
    Key("job.custom_config_module", None, "", _OWN_CODE),
    Key("profiling.enable_profiling", False, "hooks (profile)", rule=True),
    *without("profiling.", "save_traces_folder save_memory_snapshot_folder", _IN_RUN),
    Key("profiling.profile_freq", 10, "hooks (profile) every", rule=True),
    Key("profiling.profiler_active", 1, "hooks (profile) steps", rule=True),
    Key("profiling.profiler_warmup", 3, "hooks (profile) warmup", rule=True),
    Key("profiling.enable_memory_snapshot", False, "hooks (profile) memory", rule=True),
    *without(
        "profiling.", "profiler_repeat profiler_skip_first profiler_skip_first_wait", "list the steps in `at` of hook profile"
    ),
    *without("profiling.", "memory_snapshot_freq memory_snapshot_max_entries trace_post_processor", "hook profile decides"),
    Key("metrics.log_freq", 10, "hooks (log) every", rule=True),
    Key("metrics.enable_tensorboard", False, "trackers (tensorboard)", rule=True),
    Key("metrics.enable_wandb", False, "trackers (wandb)", rule=True),
    Key("metrics.disable_color_printing", False, "", "set NO_COLOR=1"),
    Key("metrics.save_tb_folder", "tb", "", _IN_RUN),
    Key("metrics.save_for_all_ranks", False, "", "metrics are sums over all ranks; hook stragglers compares ranks"),
    Key("model.name", "llama3", "model.dim, ...", "with model.flavor: the shape", rule=True),
    Key(
        "model.flavor",
        "debugmodel",
        "model.dim, ...",
        "the shapes of llama3 and qwen3 are known; initial weights are Forge's",
        rule=True,
    ),
    Key("model.hf_assets_path", "./tests/assets/tokenizer", "data.tokenizer.path", "tokenizer.json in that folder", rule=True),
    Key("model.tokenizer_path", None, "data.tokenizer.path", "tokenizer.json in that folder", rule=True),
    Key("model.converters", [], "transforms.float8", rule=True),
    Key("model.print_after_conversion", False, "", "forge-train plan --modules shows all parameters"),
    Key("model_spec", None, "", "code builds the model there; fill in [model]"),
    Key("optimizer.name", "AdamW", "optimizer.name", rule=True),
    Key("optimizer.lr", 8e-4, "optimizer.lr"),
    Key("optimizer.beta1", 0.9, "optimizer.betas", rule=True),
    Key("optimizer.beta2", 0.95, "optimizer.betas", rule=True),
    Key("optimizer.eps", 1e-8, "optimizer.eps"),
    Key("optimizer.weight_decay", 0.1, "optimizer.weight_decay, parameters.groups", "decays all parameters there", rule=True),
    Key("optimizer.implementation", "fused", "", _KERNEL),
    Key(
        "optimizer.early_step_in_backward",
        False,
        "",
        "would step before the norm of all gradients is known, which clipping needs",
    ),
    Key("optimizer.param_groups", None, "", "write [[parameters.groups]]: patterns of names with a rate factor or weight decay"),
    Key("optimizer.optimizer_factory_kwargs_by_name", None, "", "write the keys of [optimizer]"),
    Key("lr_scheduler.warmup_steps", 200, "schedule.warmup", rule=True),
    Key("lr_scheduler.total_steps", None, "train.max_steps, train.stop_at", "the schedule follows train.max_steps", rule=True),
    Key("lr_scheduler.decay_ratio", None, "schedule.decay", "a share of the run in both; unset: after the warm-up", rule=True),
    Key("lr_scheduler.decay_type", "linear", "schedule.name, schedule.shape", "sqrt is one_minus_sqrt", rule=True),
    Key("lr_scheduler.min_lr_factor", 0.0, "schedule.min_ratio", rule=True),
    Key("training.dataset", "c4_test", "data.sources.path", "names of torchtitan's own list there", rule=True),
    Key("training.dataset_path", None, "data.sources.path", rule=True),
    Key("training.local_batch_size", 8, "train.micro_batch, train.global_batch", _BATCH, rule=True),
    Key("training.global_batch_size", -1, "train.global_batch", "-1 is local_batch_size * data ranks there", rule=True),
    Key("training.seq_len", 2048, "data.sequence_length, model.max_length", rule=True),
    Key("training.num_tokens_per_microbatch_per_dp_rank", 16384, "train.micro_batch", _CONTEXT, rule=True),
    Key("training.num_tokens_per_train_step", -1, "train.global_batch", _CONTEXT, rule=True),
    Key("training.max_context_length", 2048, "data.sequence_length, model.max_length", rule=True),
    Key("training.max_norm", 1.0, "train.grad_clip"),
    Key("training.steps", 10000, "train.max_steps", rule=True),
    Key("training.enable_cpu_offload", False, "transforms.shard.offload", rule=True),
    Key("training.disable_cuda_graphs", False, "", "Forge captures no graphs"),
    Key("training.dtype", "float32", "precision.state", rule=True),
    Key("training.mixed_precision_param", "bfloat16", "precision.compute", rule=True),
    Key("training.mixed_precision_reduce", "float32", "", "gradients are always reduced in fp32, unless precision.state is bf16"),
    Key("training.gc_freq", 50, "train.collect_every"),
    Key("training.gc_debug", False, "", "a debugging aid"),
    *without("training.dataloader.", "num_workers persistent_workers pin_memory prefetch_factor", _LOADING),
    *without(
        "dataloader.",
        "dataset collator seed shuffle repeat streaming_shuffle_buffer_size read_options num_prefetch_batches",
        "write [data]",
    ),
    Key("parallelism.data_parallel_replicate_degree", 1, "parallel.dp_replicate", rule=True),
    Key("parallelism.data_parallel_shard_degree", -1, "parallel.dp_shard", rule=True),
    Key("parallelism.fsdp_reshard_after_forward", "default", "transforms.shard.reshard", "always: true, never: false", rule=True),
    Key("parallelism.enable_fsdp_symm_mem", False, "", _KERNEL),
    Key("parallelism.tensor_parallel_degree", 1, "parallel.tp", rule=True),
    Key("parallelism.enable_sequence_parallel", True, "transforms.tensor.sequence_parallel", rule=True),
    Key("parallelism.disable_loss_parallel", False, "", "with parallel.tp, the vocabulary is always split"),
    Key("parallelism.enable_async_tensor_parallel", False, "transforms.tensor.asynchronous", rule=True),
    Key("parallelism.spmd_backend", "spmd_types", "", _KERNEL),
    Key("parallelism.pipeline_parallel_degree", 1, "parallel.pp", rule=True),
    *without(
        "parallelism.",
        "module_fqns_per_model_part pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers "
        "pipeline_parallel_layers_per_stage pipeline_parallel_schedule_csv",
        _PIPELINE,
    ),
    Key("parallelism.pipeline_parallel_schedule", "1F1B", "parallel.pipeline.schedule.name", rule=True),
    Key("parallelism.pipeline_parallel_microbatch_size", 1, "train.micro_batch", "of a pipeline", rule=True),
    Key("parallelism.num_pp_microbatches", 1, "train.global_batch", rule=True),
    Key("parallelism.pipeline_parallel_expert_parallel_overlap", True, "", _KERNEL),
    Key("parallelism.context_parallel_degree", 1, "parallel.cp", rule=True),
    *without(
        "parallelism.", "context_parallel_load_balancer context_parallel_ptrr_mask_key", "Forge balances causal attention itself"
    ),
    Key("parallelism.context_parallel_rotate_method", "allgather", "transforms.context.kind", rule=True),
    Key("parallelism.expert_parallel_degree", 1, "parallel.ep", "borrows data ranks in both", rule=True),
    Key("parallelism.expert_tensor_parallel_degree", 1, "parallel.etp"),
    Key("parallelism.expert_parallel_comm_backend", "standard", "", "transforms.expert.dispatcher chooses the exchange"),
    Key("checkpoint.enable", False, "hooks (save)", rule=True),
    Key("checkpoint.interval", 500, "checkpoint.every", rule=True),
    Key("checkpoint.keep_latest_k", 10, "checkpoint.keep", "0 keeps all in both", rule=True),
    Key(
        "checkpoint.async_mode",
        "disabled",
        "checkpoint.mode",
        values={"disabled": "sync", "async": "async", "async_with_pinned_mem": "async"},
        rule=True,
    ),
    Key("checkpoint.load_step", -1, "checkpoint.resume", "-1 is auto", rule=True),
    Key("checkpoint.enable_first_step_checkpoint", False, "checkpoint.first", "Forge saves step 0", rule=True),
    Key("checkpoint.folder", "checkpoint", "", _IN_RUN),
    *without(
        "checkpoint.",
        "initial_load_path initial_load_model_only initial_load_in_hf initial_load_in_hf_quantized exclude_from_loading "
        "create_seed_checkpoint load_only",
        _LOAD,
    ),
    *without("checkpoint.", "last_save_model_only last_save_in_hf export_dtype", _EXPORT),
    Key("checkpoint.enable_ft_dataloader_checkpoints", True, "", _TORCHFT),
    Key("activation_checkpoint.mode", "selective", "transforms.recompute.policy", rule=True),
    Key(
        "activation_checkpoint.selective_ac_option",
        "2",
        "transforms.recompute.every",
        "a number: every n-th block; op: keep",
        rule=True,
    ),
    Key("activation_checkpoint.memory_budget", 0.5, "transforms.compile.budget", rule=True),
    *without(
        "activation_checkpoint.",
        "per_op_sac_force_recompute_mm_shapes_by_fqns force_recompute_mm_shapes_by_fqns early_stop preserve_rng_state "
        "determinism_check debug visualize_memory_budget_pareto",
        "routers' choices are made once and kept; there is no dropout",
    ),
    Key("compile.enable", False, "transforms.compile", rule=True),
    Key("compile.components", ["model", "loss"], "transforms.compile", "the loss head is not compiled", rule=True),
    Key("compile.enable_async_tensor_parallel", False, "transforms.tensor.asynchronous", rule=True),
    Key("compile.backend", "inductor", "", "always inductor"),
    Key("quantize.linear.float8.recipe_name", None, "transforms.float8.recipe", "tensorwise if unset", rule=True),
    Key("quantize.linear.float8.filter_fqns", [], "transforms.float8.exclude", "names of layers differ", rule=True),
    Key(
        "quantize.linear.float8.enable_fsdp_float8_all_gather",
        False,
        "",
        "see transforms.float8.all_gather, which is on by itself",
    ),
    *without(
        "quantize.linear.float8.", "precompute_float8_dynamic_scale_for_fsdp emulate", "transforms.float8 decides; see emulate"
    ),
    *without("quantize.linear.mx.", "mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns", _QUANTIZE),
    *without("quantize.grouped_mm.", "float8.fqns mx.recipe_name mx.fqns", _QUANTIZE),
    Key("comm.init_timeout_seconds", 300, "parallel.timeout"),
    Key("comm.train_timeout_seconds", 100, "parallel.step_timeout", "must cover evaluations and saves as well"),
    *without("comm.", "trace_buf_size save_traces_folder save_traces_file_prefix mode", _TRACES),
    *without("memory_estimation.", "enable disable_fake_mode", _ATTEMPT),
    *without(
        "fault_tolerance.",
        "enable process_group process_group_timeout_ms replica_id group_size min_replica_size semi_sync_method sync_steps "
        "should_quantize fragment_sync_delay fragment_update_alpha module_fqns_per_model_fragment num_fragments",
        _TORCHFT,
    ),
    *without("experimental.", "custom_import custom_args_module", _OWN_CODE),
    Key("validation.enable", False, "data.evaluation, hooks (evaluate)", rule=True),
    Key("validation.dataset", "c4_validation", "data.evaluation.path", "names of torchtitan's own list there", rule=True),
    Key("validation.dataset_path", None, "data.evaluation.path", rule=True),
    Key("validation.freq", 10, "hooks (evaluate) every", rule=True),
    Key("validation.steps", -1, "", "a held-out set is evaluated as a whole; make it as large as you need"),
    *without("validation.", "local_batch_size seq_len", "an evaluation has the batches of training"),
    *without("validation.dataloader.", "num_workers persistent_workers pin_memory prefetch_factor", _LOADING),
    Key("debug.seed", None, "job.seed", "random if unset there; 0 in Forge"),
    Key("debug.deterministic", False, "train.deterministic"),
    *without(
        "debug.",
        "deterministic_warn_only moe_force_load_balance spmd_typechecking detect_anomaly batch_invariant print_config "
        "save_config_file enable_structured_logging",
        "a debugging aid",
    ),
    Key("tokenizer", None, "", "code builds the tokenizer there; set data.tokenizer"),
    Key("loss", None, "", "cross-entropy; the loss head never makes full logits"),
    Key("override", None, "", _OWN_CODE),
)
