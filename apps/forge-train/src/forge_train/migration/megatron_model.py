"""The model of Megatron-LM: sizes, layers, positions and experts."""

import re

from forge_train.migration.concepts import learned_positions
from forge_train.migration.engine import Migration
from forge_train.migration.megatron_keys import KEYS


def _given(migration: Migration, key: str, path: str, what: str) -> int | None:
    if migration.get(key) is None:
        migration.must_fill_in(path, f"{what}: the file has no readable --{key}")
        return None
    migration.write(path, migration.integer(key), key)
    return migration.integer(key)


def translate_model(migration: Migration) -> None:
    """Translates the shape of the model."""
    get = migration.get
    migration.write("model.name", "decoder")
    width = _given(migration, "hidden-size", "model.dim", "width")
    _given(migration, "num-layers", "model.layers", "number of blocks")
    heads = _given(migration, "num-attention-heads", "model.heads", "query heads")
    if migration.flag("group-query-attention") and heads is not None:
        migration.write("model.kv_heads", migration.integer("num-query-groups"), "group-query-attention", "num-query-groups")
    else:
        migration.unused("num-query-groups", because="group-query-attention is not set")
    _vocabulary(migration)
    ffn = get("ffn-hidden-size")
    if ffn is not None:
        migration.write("model.ffn_dim", migration.integer("ffn-hidden-size"), "ffn-hidden-size")
    elif width is not None:
        wide = int(4 * width * 2 / 3) // 64 * 64 if migration.flag("swiglu") else 4 * width
        migration.write("model.ffn_dim", wide)
        migration.remark("model.ffn_dim", "Megatron's default for this width")
    _activation(migration)
    bias = not migration.flag("disable-bias-linear")
    migration.write("model.mlp.bias", bias, "disable-bias-linear")
    if not migration.flag("multi-latent-attention"):
        migration.write("model.attention.qkv_bias", bias or migration.flag("add-qkv-bias"), "disable-bias-linear", "add-qkv-bias")
        migration.write("model.attention.output_bias", bias, "disable-bias-linear")
    if migration.flag("apply-layernorm-1p"):
        if get("normalization") == "RMSNorm":
            migration.write("model.norm.offset", 1, "apply-layernorm-1p")
        else:
            migration.cannot(
                "apply-layernorm-1p", "layernorm has no offset; without decay of its weights the function is the same"
            )
    tied = not migration.flag("untie-embeddings-and-output-weights")
    migration.write("model.tied_embeddings", tied, "untie-embeddings-and-output-weights")
    for key in ("hidden-dropout", "attention-dropout"):
        if migration.number(key) > 0:
            migration.cannot(
                key, "Forge's models have no dropout, which is 0.1 by default in Megatron: the recipe trains without"
            )
        else:
            migration.write_nothing(key, "no dropout in both")
    _positions(migration)
    _latent_attention(migration)


def _vocabulary(migration: Migration) -> None:
    if migration.get("padded-vocab-size") is not None:
        migration.write("model.vocab_size", migration.integer("padded-vocab-size"), "padded-vocab-size")
        return
    if migration.get("vocab-size") is None:
        migration.must_fill_in("model.vocab_size", "the vocabulary of the tokenizer, padded as Megatron does")
        return
    multiple = migration.positive("make-vocab-size-divisible-by") * migration.positive("tensor-model-parallel-size")
    size = migration.integer("vocab-size")
    note = f"padded to a multiple of {multiple}, as Megatron does"
    migration.write("model.vocab_size", -(-size // multiple) * multiple, "vocab-size", "make-vocab-size-divisible-by", note=note)


def _activation(migration: Migration) -> None:
    names = {"swiglu": "swiglu", "squared-relu": "relu2", "openai-gelu": "gelu"}
    for key, name in names.items():
        if migration.flag(key):
            migration.write("model.mlp.name", name, key)
            return
    if migration.flag("quick-geglu"):
        migration.cannot("quick-geglu", "Forge's geglu uses gelu, not its quick approximation; geglu is written")
        migration.write("model.mlp.name", "geglu")
        return
    migration.write("model.mlp.name", "gelu")
    migration.remark("model.mlp.name", "Megatron's default; its fused kernel has the tanh approximation as well")


def _positions(migration: Migration) -> None:
    kind = migration.get("position-embedding-type")
    rotary = kind == "rope" or migration.flag("use-rotary-position-embeddings")
    if rotary:
        migration.write_nothing("position-embedding-type", "[model.rope]: rotary positions")
        migration.write_nothing("use-rotary-position-embeddings", "[model.rope]: rotary positions")
    elif kind == "learned_absolute" and not migration.flag("multi-latent-attention"):
        learned_positions(migration, "position-embedding-type")
        if not migration.has("position-embedding-type"):
            migration.remark("model.learned_positions", "the default of Megatron, without --position-embedding-type")
    elif kind == "none" and not migration.flag("multi-latent-attention"):
        migration.write("model.attention.nope_every", 1, "position-embedding-type")
    else:
        migration.cannot("position-embedding-type", f"{kind}: Forge's decoder has rotary positions, learned ones or none")
    if migration.flag("rotary-interleaved"):
        migration.cannot("rotary-interleaved", "Forge rotates the halves of a head: the same function for permuted weights")
    if migration.flag("use-rope-scaling"):
        migration.write("model.rope.scaling", "llama3", "use-rope-scaling")
        migration.write("model.rope.factor", migration.number("rope-scaling-factor"), "rope-scaling-factor")
        migration.write("model.rope.original_max_length", 8192)
        migration.remark("model.rope.original_max_length", "Megatron's constant")
    elif migration.get("rotary-seq-len-interpolation-factor") is not None:
        migration.write("model.rope.scaling", "linear", "rotary-seq-len-interpolation-factor")
        migration.write(
            "model.rope.factor", migration.number("rotary-seq-len-interpolation-factor"), "rotary-seq-len-interpolation-factor"
        )
    key = "seq-length" if migration.get("seq-length") is not None else "encoder-seq-length"
    if migration.get(key) is None:
        migration.must_fill_in("data.sequence_length", "tokens of a row: the file has no readable --seq-length")
    else:
        migration.write("data.sequence_length", migration.integer(key), key)
    lengths = (migration.get("max-position-embeddings"), migration.get(key))
    if known := [length for length in lengths if isinstance(length, int)]:
        migration.write("model.max_length", max(known), "max-position-embeddings")
    window = migration.get("window-size")
    if isinstance(window, str):
        window = [int(part) for part in re.findall(r"-?\d+", window)]
    if window:
        if isinstance(window, list) and len(window) == 2 and window[0] >= 0 and window[1] in (0, -1):
            note = "Forge counts the position itself as well"
            migration.write("model.attention.window", window[0] + 1, "window-size", note=note)
        else:
            migration.cannot("window-size", "set model.attention.window: the number of positions with the current one")


def _latent_attention(migration: Migration) -> None:
    keys = {
        "q-lora-rank": "q_lora_rank",
        "kv-lora-rank": "kv_lora_rank",
        "qk-head-dim": "qk_nope_head_dim",
        "qk-pos-emb-head-dim": "qk_rope_head_dim",
        "v-head-dim": "v_head_dim",
    }
    if migration.flag("multi-latent-attention"):
        migration.write("model.attention.name", "mla", "multi-latent-attention")
        for key, name in keys.items():
            if migration.get(key) is not None:
                migration.write(f"model.attention.{name}", migration.integer(key), key)
    else:
        migration.unused(*keys, because="multi-latent-attention is not set")
    depth = migration.get("mtp-num-layers")
    if depth:
        migration.write("model.mtp.depth", migration.integer("mtp-num-layers"), "mtp-num-layers")
        migration.write("model.mtp.weight", migration.number("mtp-loss-scaling-factor"), "mtp-loss-scaling-factor")


def translate_experts(migration: Migration) -> None:
    """Translates experts, their router and its losses."""
    moe = [key.name for key in KEYS if key.name.startswith("moe-")]
    if not migration.get("num-experts"):
        migration.unused(*moe, because="num-experts is not set")
        return
    migration.write("model.moe.experts", migration.integer("num-experts"), "num-experts")
    migration.write("model.moe.top_k", migration.integer("moe-router-topk"), "moe-router-topk")
    width = migration.recipe["model"].get("ffn_dim")
    if migration.get("moe-ffn-hidden-size") is not None:
        width = migration.integer("moe-ffn-hidden-size")
        migration.write("model.moe.ffn_dim", width, "moe-ffn-hidden-size")
    if migration.get("moe-shared-expert-intermediate-size"):
        shared = migration.integer("moe-shared-expert-intermediate-size")
        if width and shared % width == 0:
            note = f"experts of {width} each"
            migration.write("model.moe.shared", shared // width, "moe-shared-expert-intermediate-size", note=note)
        else:
            migration.cannot(
                "moe-shared-expert-intermediate-size",
                f"shared experts have the width of the others ({width}); set model.moe.shared",
            )
    _expert_layers(migration)
    _balance(migration)
    score = migration.get("moe-router-score-function")
    if score == "softmax":
        migration.write("model.moe.router.name", "softmax_topk", "moe-router-score-function")
        migration.write("model.moe.router.normalize", not migration.flag("moe-router-pre-softmax"), "moe-router-pre-softmax")
        if migration.flag("moe-router-enable-expert-bias"):
            migration.cannot("moe-router-enable-expert-bias", "only router sigmoid_topk has a bias")
        for key in ("moe-router-topk-scaling-factor", "moe-router-num-groups", "moe-router-group-topk"):
            if migration.get(key) is not None:
                migration.cannot(key, "router softmax_topk has no such key; sigmoid_topk has")
    elif score == "sigmoid":
        migration.write("model.moe.router.name", "sigmoid_topk", "moe-router-score-function")
        bias = migration.flag("moe-router-enable-expert-bias")
        rate = migration.number("moe-router-bias-update-rate") if bias else 0.0
        migration.write("model.moe.router.bias_rate", rate, "moe-router-enable-expert-bias", "moe-router-bias-update-rate")
        pairs = {"topk-scaling-factor": "scaling", "num-groups": "n_group", "group-topk": "topk_group"}
        for key, name in pairs.items():
            if migration.get(f"moe-router-{key}") is not None:
                migration.write(f"model.moe.router.{name}", migration.get(f"moe-router-{key}"), f"moe-router-{key}")
    else:
        migration.cannot("moe-router-score-function", "choose model.moe.router.name: softmax_topk, sigmoid_topk or hash")
    if migration.get("moe-expert-capacity-factor") is not None:
        migration.write("model.moe.capacity", migration.number("moe-expert-capacity-factor"), "moe-expert-capacity-factor")
        if migration.get("moe-token-drop-policy") == "probs":
            migration.write_nothing("moe-token-drop-policy", "Forge drops the slots with the smallest weights")
        else:
            migration.cannot("moe-token-drop-policy", "Forge drops the slots with the smallest weights, not the last ones")


def _expert_layers(migration: Migration) -> None:
    frequency = migration.get("moe-layer-freq")
    if frequency == 1:
        migration.write("model.moe.every", 1, "moe-layer-freq")
        return
    dense = re.fullmatch(r"\(?\[0\]\*(\d+)\+\[1\]\*(\d+)\)?", str(frequency).replace(" ", ""))
    if dense:
        note = "the first layers are dense"
        migration.write("model.moe.first_dense", int(dense[1]), "moe-layer-freq", note=note)
    else:
        why = "layers n, 2n, ... have experts in Forge (model.moe.every) after model.moe.first_dense dense ones; set both"
        migration.cannot("moe-layer-freq", why)


def _balance(migration: Migration) -> None:
    kind, weight = migration.get("moe-router-load-balancing-type"), migration.get("moe-aux-loss-coeff")
    losses = {"aux_loss": "micro_batch", "seq_aux_loss": "sequence", "global_aux_loss": "global_batch"}
    if kind in losses and not isinstance(weight, list):
        weight = migration.number("moe-aux-loss-coeff")
        migration.write(f"model.moe.losses.{losses[kind]}", weight, "moe-router-load-balancing-type", "moe-aux-loss-coeff")
    elif kind == "none":
        migration.write_nothing("moe-router-load-balancing-type", "no loss")
        migration.unused("moe-aux-loss-coeff", because="there is no loss")
    else:
        migration.cannot("moe-router-load-balancing-type", "set model.moe.losses: micro_batch, sequence and global_batch")
        migration.unused("moe-aux-loss-coeff", because="the kind of loss is not known")
    if migration.get("moe-z-loss-coeff") is not None:
        migration.write("model.moe.losses.z", migration.number("moe-z-loss-coeff"), "moe-z-loss-coeff")
