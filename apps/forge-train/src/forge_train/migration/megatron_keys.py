"""The arguments of Megatron-LM's pretraining scripts, without dashes in front, with their defaults and counterparts."""

from forge_train.migration.engine import Key, without

_KERNEL = "a choice of kernels or their fusion, which Forge makes itself"
_OVERLAP = "Forge overlaps communication itself"
_SHARDED = "parameters, gradients and optimizer state are always sharded over parallel.dp_shard; see transforms.shard"
_LOAD = "convert the weights (forge-train convert), then set start.weights; a run resumes by itself"
_FORMAT = "Forge has its own checkpoint format, which every layout can read"
_LOGS = "metrics of a run are in metrics.jsonl of its directory; see the hooks log, norms and stragglers"
_INFERENCE = "an option of inference; see forge-train generate"
_TOKENS = "indexed data are token ids already; add [data.tokenizer] for hook sample"
_LAUNCH = "an option of the launcher; see forge-train launch"
_LAYOUT = "parallel.pipeline.split says how many blocks each stage has"
_STORAGE = "source megatron reads the files in place"
_SCALER = "fp16 needs a loss scaler, which Forge does not have"
_BATCHES = "write [[data.phases]] with start and global_batch"
_SAFETY = "Forge always checks losses and gradients; see train.max_skipped and train.rollback_after"
_FP8 = "transforms.float8 has the recipes of torchao"
_BIAS = "biases of all linear layers there"

KEYS: tuple[Key, ...] = (
    Key("num-layers", None, "model.layers", rule=True),
    Key("hidden-size", None, "model.dim", rule=True),
    Key(
        "ffn-hidden-size", None, "model.ffn_dim", "unset: 4 * hidden-size, or with swiglu 8/3 of it, a multiple of 64", rule=True
    ),
    Key("num-attention-heads", None, "model.heads", rule=True),
    Key("group-query-attention", False, "model.kv_heads", rule=True),
    Key("num-query-groups", 1, "model.kv_heads", rule=True),
    Key("kv-channels", None, "model.head_dim"),
    Key("max-position-embeddings", None, "model.max_length", rule=True),
    Key("seq-length", None, "data.sequence_length", rule=True),
    Key("encoder-seq-length", None, "data.sequence_length", "the older name of seq-length", rule=True),
    Key("vocab-size", None, "model.vocab_size", "padded there to a multiple of make-vocab-size-divisible-by * tp", rule=True),
    Key("padded-vocab-size", None, "model.vocab_size", rule=True),
    Key("make-vocab-size-divisible-by", 128, "model.vocab_size", rule=True),
    Key(
        "position-embedding-type",
        "learned_absolute",
        "model.rope, model.learned_positions, model.attention.nope_every",
        "rope, learned_absolute and none",
        rule=True,
    ),
    Key("use-rotary-position-embeddings", False, "model.rope", rule=True),
    Key("no-position-embedding", False, "", "an older flag: with rotary positions, no learned ones are added"),
    Key("rotary-base", 10000, "model.rope.theta"),
    Key("rotary-percent", 1.0, "model.rope.partial"),
    Key("rotary-interleaved", False, "", "Forge rotates halves of a head; convert permutes weights", rule=True),
    Key("use-rope-scaling", False, "model.rope.scaling", "llama3", rule=True),
    Key("rope-scaling-factor", 8.0, "model.rope.factor", rule=True),
    Key("rotary-seq-len-interpolation-factor", None, "model.rope.factor", "linear scaling", rule=True),
    Key("swiglu", False, "model.mlp.name", rule=True),
    Key("squared-relu", False, "model.mlp.name", "relu2", rule=True),
    Key("openai-gelu", False, "model.mlp.name", "gelu", rule=True),
    Key("quick-geglu", False, "", "Forge's geglu has another gelu", rule=True),
    Key("disable-bias-linear", False, "model.mlp.bias, model.attention", _BIAS, rule=True),
    Key("add-qkv-bias", False, "model.attention.qkv_bias", rule=True),
    Key("normalization", "LayerNorm", "model.norm.name", values={"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}),
    Key("norm-epsilon", 1e-5, "model.norm.eps"),
    Key("layernorm-epsilon", None, "model.norm.eps", "the older name of norm-epsilon"),
    Key("apply-layernorm-1p", False, "model.norm.offset", "of rmsnorm", rule=True),
    Key("untie-embeddings-and-output-weights", False, "model.tied_embeddings", "the opposite: tied without the flag", rule=True),
    Key("init-method-std", 0.02, "model.init_std", "Forge starts the head with at most 0.5 / sqrt(dim)"),
    Key("qk-layernorm", False, "model.attention.qk_norm", values={True: "head", False: "none"}),
    Key("hidden-dropout", 0.1, "", "Forge's models have no dropout; the default there is 0.1", rule=True),
    Key("attention-dropout", 0.1, "", "Forge's models have no dropout; the default there is 0.1", rule=True),
    Key(
        "window-size",
        None,
        "model.attention.window",
        "positions before the current one there; Forge counts it, too",
        rule=True,
        many=True,
    ),
    Key("softmax-scale", None, "model.attention.scale"),
    Key("num-experts", None, "model.moe.experts", rule=True),
    Key("moe-router-topk", 2, "model.moe.top_k", rule=True),
    Key("moe-ffn-hidden-size", None, "model.moe.ffn_dim", "unset: ffn-hidden-size", rule=True),
    Key(
        "moe-layer-freq",
        1,
        "model.moe.every, model.moe.first_dense",
        "n: layers 0, n, 2n there; n-1, 2n-1 in Forge",
        rule=True,
        many=True,
    ),
    Key("moe-shared-expert-intermediate-size", None, "model.moe.shared", "the width of all shared experts there", rule=True),
    Key("moe-router-load-balancing-type", "aux_loss", "model.moe.losses", rule=True, many=True),
    Key("moe-aux-loss-coeff", 0.0, "model.moe.losses", rule=True, many=True),
    Key("moe-z-loss-coeff", None, "model.moe.losses.z", rule=True),
    Key("moe-expert-capacity-factor", None, "model.moe.capacity", rule=True),
    Key("moe-token-drop-policy", "probs", "model.moe.capacity", "probs is what Forge does", rule=True),
    Key("moe-router-score-function", "softmax", "model.moe.router.name", rule=True),
    Key("moe-router-pre-softmax", False, "model.moe.router.normalize", "softmax before the choice: not normalized", rule=True),
    Key("moe-router-topk-scaling-factor", None, "model.moe.router.scaling", rule=True),
    Key("moe-router-enable-expert-bias", False, "model.moe.router.bias_rate", rule=True),
    Key("moe-router-bias-update-rate", 1e-3, "model.moe.router.bias_rate", rule=True),
    Key("moe-router-num-groups", None, "model.moe.router.n_group", rule=True),
    Key("moe-router-group-topk", None, "model.moe.router.topk_group", rule=True),
    Key("moe-token-dispatcher-type", "allgather", "transforms.expert.dispatcher", rule=True),
    Key("multi-latent-attention", False, "model.attention.name", "mla", rule=True),
    Key("q-lora-rank", None, "model.attention.q_lora_rank", rule=True),
    Key("kv-lora-rank", 32, "model.attention.kv_lora_rank", rule=True),
    Key("qk-head-dim", 128, "model.attention.qk_nope_head_dim", rule=True),
    Key("qk-pos-emb-head-dim", 64, "model.attention.qk_rope_head_dim", rule=True),
    Key("v-head-dim", 128, "model.attention.v_head_dim", rule=True),
    *without(
        "",
        "rope-type rotary-scaling-factor original-max-position-embeddings beta-fast beta-slow mscale mscale-all-dim",
        "set the keys of [model.rope]: scaling, factor, original_max_length, mscale",
    ),
    Key("mtp-num-layers", None, "model.mtp.depth", rule=True),
    Key("mtp-loss-scaling-factor", 0.1, "model.mtp.weight", rule=True),
    Key("micro-batch-size", None, "train.micro_batch", rule=True),
    Key("global-batch-size", None, "train.global_batch", "in sequences in both; unset: micro-batch-size * data ranks", rule=True),
    Key(
        "rampup-batch-size",
        None,
        "data.phases.global_batch",
        "start: the step at which a size begins there",
        rule=True,
        many=True,
    ),
    Key("step-batch-size-schedule", None, "data.phases.global_batch", _BATCHES, rule=True),
    Key("train-iters", None, "train.max_steps", rule=True),
    Key("train-samples", None, "train.max_steps", "divided by the global batch", rule=True),
    Key("exit-interval", None, "train.stop_at", "the run stops there with a checkpoint"),
    Key("lr", None, "optimizer.lr"),
    Key("min-lr", 0.0, "schedule.min_ratio", "a share of the rate in Forge: min-lr / lr", rule=True),
    Key("lr-decay-style", "linear", "schedule.name", rule=True),
    Key("lr-wsd-decay-style", "exponential", "schedule.shape", "minus_sqrt is one_minus_sqrt", rule=True),
    Key("lr-decay-iters", None, "train.max_steps", "a decay ends at train.max_steps in Forge", rule=True),
    Key("lr-decay-samples", None, "train.max_steps", "divided by the global batch", rule=True),
    Key("lr-wsd-decay-iters", None, "schedule.decay", "a share of the run in Forge", rule=True),
    Key("lr-wsd-decay-samples", None, "schedule.decay", "a share of the run in Forge", rule=True),
    Key("lr-warmup-iters", 0, "schedule.warmup", rule=True),
    Key("lr-warmup-samples", 0, "schedule.warmup", "divided by the global batch", rule=True),
    Key("lr-warmup-fraction", None, "schedule.warmup", "a share of lr-decay-iters there, steps in Forge", rule=True),
    Key("lr-warmup-init", 0.0, "", "a warm-up begins with 1 / warmup of the rate", rule=True),
    Key("decoupled-lr", None, "parameters.groups", "a factor of the rate for embedding and head", rule=True),
    Key("decoupled-min-lr", None, "", "a group's rate falls to the same share as all others"),
    Key("optimizer", "adam", "optimizer.name", rule=True),
    Key("weight-decay", 0.01, "optimizer.weight_decay, parameters.groups", "decays embeddings there", rule=True),
    *without("", "start-weight-decay end-weight-decay weight-decay-incr-style", "the decay is constant"),
    Key("adam-beta1", 0.9, "optimizer.betas", rule=True),
    Key("adam-beta2", 0.999, "optimizer.betas", rule=True),
    Key("adam-eps", 1e-8, "optimizer.eps", rule=True),
    Key("sgd-momentum", 0.9, "", "Forge has no SGD", rule=True),
    Key("muon-momentum", 0.95, "optimizer.momentum", rule=True),
    Key("muon-num-ns-steps", 5, "optimizer.newton_schulz_steps", rule=True),
    *without(
        "",
        "muon-scale-mode muon-extra-scale-factor muon-nesterov muon-fp32-matmul-prec muon-no-split-qkv",
        "set scale, nesterov and precision of [optimizer]",
    ),
    Key("clip-grad", 1.0, "train.grad_clip", "0 means no clipping there, none in Forge", rule=True),
    Key("seed", 1234, "job.seed", "the same seed gives other weights"),
    Key("bf16", False, "precision.compute", "without bf16 and fp16: fp32", rule=True),
    Key("fp16", False, "precision.compute", _SCALER, rule=True),
    *without("", "loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis fp16-lm-cross-entropy", _SCALER),
    Key("fp8-format", None, "transforms.float8", _FP8, rule=True),
    *without(
        "", "fp8-amax-history-len fp8-amax-compute-algo fp8-margin fp8-recipe fp8-param-gather first-last-layers-bf16", _FP8
    ),
    Key("recompute-granularity", None, "transforms.recompute.policy", rule=True),
    Key("recompute-activations", False, "transforms.recompute.policy", "selective", rule=True),
    *without(
        "",
        "recompute-method recompute-num-layers recompute-modules moe-layer-recompute",
        "set every or keep of transforms.recompute",
    ),
    Key("tensor-model-parallel-size", 1, "parallel.tp", rule=True),
    Key("pipeline-model-parallel-size", 1, "parallel.pp", rule=True),
    Key("context-parallel-size", 1, "parallel.cp", rule=True),
    Key("expert-model-parallel-size", 1, "parallel.ep", "borrows data ranks in both", rule=True),
    Key("expert-tensor-parallel-size", None, "parallel.etp", "unset: tensor-model-parallel-size there, 1 in Forge", rule=True),
    Key("sequence-parallel", False, "transforms.tensor.sequence_parallel", "off without the flag", rule=True),
    Key("num-layers-per-virtual-pipeline-stage", None, "parallel.pipeline.schedule.stages_per_rank", "interleaved", rule=True),
    Key("num-virtual-stages-per-pipeline-rank", None, "parallel.pipeline.schedule.stages_per_rank", "interleaved", rule=True),
    Key("cp-comm-type", "p2p", "transforms.context.kind", "p2p is ring, a2a is ulysses", rule=True),
    *without(
        "",
        "pipeline-model-parallel-layout decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers "
        "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split",
        _LAYOUT,
    ),
    *without(
        "",
        "use-distributed-optimizer use-megatron-fsdp use-torch-fsdp2 data-parallel-sharding-strategy "
        "num-distributed-optimizer-instances outer-dp-sharding-strategy use-precision-aware-optimizer "
        "main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype optimizer-cpu-offload",
        _SHARDED,
    ),
    *without(
        "",
        "overlap-grad-reduce overlap-param-gather overlap-param-gather-with-optimizer-step tp-comm-overlap "
        "overlap-moe-expert-parallel-comm moe-shared-expert-overlap no-overlap-p2p-communication "
        "overlap-p2p-communication-warmup-flush delay-wgrad-compute ddp-bucket-size ddp-num-buckets "
        "ddp-average-in-collective align-param-gather defer-embedding-wgrad-compute wgrad-deferral-limit "
        "microbatch-group-size-per-virtual-pipeline-stage",
        _OVERLAP,
    ),
    *without(
        "",
        "grad-reduce-in-bf16 accumulate-allreduce-grads-in-fp32",
        "gradients are reduced in fp32, unless precision.state is bf16",
    ),
    *without(
        "",
        "use-mcore-models use-legacy-models transformer-impl attention-backend use-flash-attn "
        "cross-entropy-loss-fusion cross-entropy-fusion-impl no-masked-softmax-fusion no-bias-gelu-fusion "
        "no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion no-persist-layer-norm "
        "no-gradient-accumulation-fusion attention-softmax-in-fp32 apply-query-key-layer-scaling moe-grouped-gemm "
        "moe-permute-fusion moe-router-fusion moe-router-dtype cuda-graph-impl enable-cuda-graph cuda-graph-modules "
        "cuda-graph-scope empty-unused-memory-level te-rng-tracker use-te use-cpu-initialization "
        "init-model-with-meta-device enable-experimental distributed-backend disable-gloo-process-groups "
        "use-tp-pp-dp-mapping",
        _KERNEL,
    ),
    Key("calculate-per-token-loss", False, "", "the loss is always the mean over the tokens of all ranks and micro-batches"),
    Key("manual-gc", False, "train.collect_every", rule=True),
    Key("manual-gc-interval", 0, "train.collect_every", rule=True),
    Key("deterministic-mode", False, "train.deterministic"),
    Key("distributed-timeout-minutes", 10, "parallel.timeout", "in seconds in Forge", rule=True),
    Key("data-path", None, "data.sources", "prefixes, with weights if there are several", rule=True, many=True),
    Key("train-data-path", None, "data.sources", rule=True, many=True),
    Key("valid-data-path", None, "data.evaluation", rule=True, many=True),
    Key("test-data-path", None, "", "evaluate a test set with forge-train evaluate"),
    Key(
        "split",
        None,
        "data.evaluation",
        "Forge splits no indexed data: write the held-out documents to a file of their own",
        rule=True,
    ),
    Key("mock-data", False, "data.sources", "source random", rule=True),
    Key("reset-position-ids", False, "data.documents", rule=True),
    Key("reset-attention-mask", False, "data.documents", rule=True),
    Key("eod-mask-loss", False, "", "labels never cross a document border"),
    Key("num-workers", 2, "data.loader_workers"),
    *without(
        "",
        "data-cache-path no-mmap-bin-files no-create-attention-mask-in-dataloader num-dataset-builder-threads "
        "data-args-path per-split-data-args-path dataloader-type dataloader-save object-storage-cache-path "
        "mid-level-dataset-surplus",
        _STORAGE,
    ),
    *without(
        "",
        "tokenizer-type tokenizer-model vocab-file merge-file vocab-extra-ids tiktoken-pattern "
        "tiktoken-num-special-tokens tokenizer-prompt-format legacy-tokenizer trust-remote-code",
        _TOKENS,
    ),
    Key("save", None, "hooks (save)", "checkpoints are in the run's directory, runs/NAME", rule=True),
    Key("save-interval", None, "checkpoint.every", rule=True),
    Key("async-save", False, "checkpoint.mode", values={True: "async", False: "sync"}),
    Key("most-recent-k", -1, "checkpoint.keep", "-1 keeps all there, 0 in Forge", rule=True),
    Key("save-retain-interval", None, "checkpoint.keep_every"),
    *without(
        "",
        "load pretrained-checkpoint finetune no-load-optim no-load-rng ckpt-step use-checkpoint-args "
        "use-checkpoint-opt_param-scheduler use-checkpoint-opt override-opt_param-scheduler "
        "exit-on-missing-checkpoint no-use-tokenizer-model-from-checkpoint-args",
        _LOAD,
    ),
    *without(
        "",
        "ckpt-format use-dist-ckpt auto-detect-ckpt-format dist-ckpt-strictness dist-ckpt-optim-fully-reshardable "
        "use-persistent-ckpt-worker async-strategy no-save-optim no-save-rng ckpt-fully-parallel-save "
        "ckpt-fully-parallel-load no-ckpt-fully-parallel-save ckpt-assume-constant-structure",
        _FORMAT,
    ),
    Key("eval-interval", 1000, "hooks (evaluate) every", rule=True),
    Key("eval-iters", 100, "", "a held-out set is evaluated as a whole"),
    Key("log-interval", 100, "hooks (log) every", rule=True),
    Key("tensorboard-dir", None, "trackers (tensorboard)", rule=True),
    Key("wandb-project", None, "trackers (wandb) project", rule=True),
    Key("wandb-entity", None, "trackers (wandb) entity", rule=True),
    Key("wandb-exp-name", None, "job.name", rule=True),
    Key("wandb-save-dir", None, "", "files of W&B are in the run's directory"),
    *without(
        "",
        "log-throughput log-progress log-params-norm log-num-zeros-in-grad log-timers-to-tensorboard "
        "log-memory-to-tensorboard log-validation-ppl-to-tensorboard log-loss-scale-to-tensorboard "
        "log-world-size-to-tensorboard log-batch-size-to-tensorboard tensorboard-log-interval tensorboard-queue-size "
        "timing-log-level timing-log-option logging-level log-straggler straggler-minmax-count barrier-with-L1-time "
        "no-one-logger",
        _LOGS,
    ),
    Key("profile", False, "hooks (profile)", rule=True),
    Key("use-pytorch-profiler", False, "", "hook profile always uses torch.profiler"),
    Key("profile-step-start", 10, "hooks (profile) at", rule=True),
    Key("profile-step-end", 12, "hooks (profile) steps", rule=True),
    Key("profile-ranks", None, "hooks (profile) ranks", rule=True, many=True),
    *without(
        "", "exit-duration-in-mins exit-signal-handler", "a run saves and ends when the scheduler says so; see checkpoint.grace"
    ),
    *without(
        "",
        "no-check-for-nan-in-loss-and-grad check-for-large-grads rerun-mode error-injection-rate "
        "error-injection-type check-weight-hash-across-dp-replicas-interval",
        _SAFETY,
    ),
    *without(
        "",
        "inference-max-seq-length inference-max-requests inference-dynamic-batching max-tokens-to-oom flash-decode",
        _INFERENCE,
    ),
    Key("nproc-per-node", None, "", "with nnodes, the number of processes: --world", rule=True),
    Key("nnodes", None, "", "with nproc-per-node, the number of processes: --world", rule=True),
    *without(
        "",
        "node-rank master-addr master-port rdzv-id rdzv-backend rdzv-endpoint tee log-dir redirects standalone "
        "max-restarts local-ranks-filter ntasks-per-node nodes gpus-per-node",
        _LAUNCH,
    ),
)
