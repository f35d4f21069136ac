"""The fields of transformers' `TrainingArguments`, and arguments of its language-modeling script, with their counterparts."""

from forge_train.migration.engine import Key, without

_SCRIPT = "an argument of the script; the run's data and model are [data] and [model]"
_HUB = "Forge uploads nothing; forge-train convert writes a folder that can be uploaded"
_LABELS = "a batch has tokens, labels and positions"
_LOADER = "the loader decides; batches for GPUs are always pinned"
_EVALUATION = "an evaluation sums loss and tokens over the whole held-out set"
_DDP = "parallel.dp_replicate and transforms.shard decide how gradients are reduced"

KEYS: tuple[Key, ...] = (
    Key("output_dir", None, "job.name", "the last part of the path names the run; its files are in runs/NAME", rule=True),
    Key("run_name", None, "job.name", rule=True),
    Key("model_name_or_path", None, "model.from_hf", "a folder on this machine", rule=True),
    Key("config_name", None, "model", "write the keys of [model]", rule=True),
    Key("tokenizer_name", None, "data.tokenizer.path", "tokenizer.json in that folder", rule=True),
    Key("dataset_name", None, "data.sources.path", rule=True),
    Key("dataset_config_name", None, "data.sources.subset", rule=True),
    Key("train_file", None, "data.sources.path", rule=True),
    Key("validation_file", None, "data.evaluation.path", rule=True),
    Key("streaming", False, "data.sources.stream", rule=True),
    Key("block_size", None, "data.sequence_length", rule=True),
    Key("max_length", None, "data.sequence_length", rule=True),
    Key("max_seq_length", None, "data.sequence_length", rule=True),
    *without(
        "",
        "model_type config_overrides cache_dir use_fast_tokenizer model_revision token trust_remote_code torch_dtype dtype "
        "low_cpu_mem_usage max_train_samples max_eval_samples overwrite_cache validation_split_percentage "
        "preprocessing_num_workers keep_linebreaks overwrite_output_dir",
        _SCRIPT,
    ),
    Key("per_device_train_batch_size", 8, "train.micro_batch, train.global_batch", "times accumulation and processes", rule=True),
    Key("gradient_accumulation_steps", 1, "train.global_batch", "times batch and processes", rule=True),
    Key("num_train_epochs", 3.0, "train.max_steps", "a run has a number of steps", rule=True),
    Key("max_steps", -1, "train.max_steps", "-1: epochs count there", rule=True),
    Key("learning_rate", 5e-5, "optimizer.lr"),
    Key("lr_scheduler_type", "linear", "schedule.name", rule=True),
    Key("lr_scheduler_kwargs", None, "schedule.min_ratio", "min_lr is a share of the rate in Forge", rule=True, many=True),
    Key("warmup_steps", 0, "schedule.warmup", "below 1, a share of the run there", rule=True),
    Key("warmup_ratio", 0.0, "schedule.warmup", "a share of the run there", rule=True),
    Key("optim", "adamw_torch", "optimizer.name", rule=True),
    Key("weight_decay", 0.0, "optimizer.weight_decay, parameters.groups", "decays embeddings there", rule=True),
    Key("adam_beta1", 0.9, "optimizer.betas", rule=True),
    Key("adam_beta2", 0.999, "optimizer.betas", rule=True),
    Key("adam_epsilon", 1e-8, "optimizer.eps", rule=True),
    Key("optim_args", None, "", "write the keys of [optimizer]"),
    Key("optim_target_modules", None, "", "write [[parameters.groups]]"),
    Key("max_grad_norm", 1.0, "train.grad_clip", "0: none in Forge", rule=True),
    Key("label_smoothing_factor", 0.0, "objective.label_smoothing"),
    Key("bf16", False, "precision.compute", "without bf16 and fp16: fp32", rule=True),
    Key("fp16", False, "precision.compute", "fp16 needs a loss scaler, which Forge does not have", rule=True),
    *without(
        "",
        "bf16_full_eval fp16_full_eval fp16_opt_level fp16_backend half_precision_backend",
        "evaluations compute as training does",
    ),
    Key("tf32", None, "", "fp32 products are exact fp32"),
    Key("torch_compile", False, "transforms.compile", rule=True),
    Key("torch_compile_backend", None, "", "always inductor"),
    Key("torch_compile_mode", None, "", "set transforms.compile.mode"),
    Key("gradient_checkpointing", False, "transforms.recompute.policy", rule=True),
    Key("activation_checkpointing", None, "transforms.recompute.policy", rule=True),
    *without("", "gradient_checkpointing_kwargs activation_checkpointing_kwargs", "set the keys of transforms.recompute"),
    Key("seed", 42, "job.seed", rule=True),
    Key("data_seed", None, "data.seed", rule=True),
    Key("full_determinism", False, "train.deterministic", rule=True),
    Key("logging_strategy", "steps", "hooks (log) every", rule=True),
    Key("logging_steps", 500, "hooks (log) every", rule=True),
    Key("report_to", "none", "trackers", rule=True, many=True),
    Key("eval_strategy", "no", "hooks (evaluate)", rule=True),
    Key("evaluation_strategy", "no", "hooks (evaluate)", "the older name of eval_strategy", rule=True),
    Key("eval_steps", None, "hooks (evaluate) every", rule=True),
    Key("eval_on_start", False, "", "set at_start of hook evaluate"),
    Key("save_strategy", "steps", "hooks (save)", rule=True),
    Key("save_steps", 500, "checkpoint.every", rule=True),
    Key("save_total_limit", None, "checkpoint.keep", "unset: all, which is 0", rule=True),
    Key("load_best_model_at_end", False, "hooks (best)", "writes the file best; weights do not change at the end", rule=True),
    *without("", "metric_for_best_model greater_is_better", "set metric and mode of hook best"),
    Key("save_only_model", False, "", "checkpoints always allow a resume; forge-train convert writes weights only"),
    Key("resume_from_checkpoint", None, "", "a run resumes by itself; set start.weights for other weights"),
    Key("ignore_data_skip", False, "", "a resume reads exactly the next samples"),
    Key("dataloader_num_workers", 0, "data.loader_workers", rule=True),
    *without(
        "",
        "dataloader_drop_last dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order group_by_length train_sampling_strategy length_column_name "
        "accelerator_config split_batches dispatch_batches",
        _LOADER,
    ),
    *without("", "remove_unused_columns label_names include_num_input_tokens_seen include_tokens_per_second", _LABELS),
    *without(
        "",
        "logging_first_step logging_dir log_on_each_node logging_nan_inf_filter log_level log_level_replica disable_tqdm project "
        "trackio_space_id trackio_bucket_id trackio_static_space_id",
        "the hooks progress and log decide; metrics of a run are in its directory",
    ),
    *without(
        "",
        "eval_delay per_device_eval_batch_size prediction_loss_only eval_do_concat_batches eval_use_gather_object "
        "eval_accumulation_steps include_for_metrics include_inputs_for_metrics batch_eval_metrics",
        _EVALUATION,
    ),
    *without("", "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision", _HUB),
    *without(
        "",
        "use_liger_kernel liger_kernel_config use_cache torch_empty_cache_steps auto_find_batch_size use_cpu no_cuda use_ipex "
        "use_mps_device skip_memory_metrics debug jit_mode_eval",
        "Forge chooses kernels and device itself",
    ),
    Key("neftune_noise_alpha", None, "", "embeddings get no noise"),
    Key("average_tokens_across_devices", True, "", "the loss is always the mean over the tokens of all ranks"),
    Key("fsdp", None, "", "parameters are sharded over all data ranks; see parallel and transforms.shard"),
    Key("fsdp_config", None, "", "see transforms.shard"),
    Key("deepspeed", None, "", "parameters are sharded over all data ranks (as ZeRO 3); see parallel and transforms.shard"),
    Key("parallelism_config", None, "", "write [parallel]"),
    *without("", "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend", _DDP),
    Key("ddp_timeout", 1800, "parallel.timeout"),
    *without(
        "",
        "save_on_each_node enable_jit_checkpoint restore_callback_states_from_checkpoint save_safetensors",
        "checkpoints decide",
    ),
    *without("", "do_train do_eval do_predict local_rank", "commands say what is done: forge-train run, evaluate and generate"),
)
