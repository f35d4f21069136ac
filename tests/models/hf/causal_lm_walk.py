"""Compares every causal language model of transformers that can be made small with one process of transformers.

    PYTHONPATH=tests python -m models.hf.causal_lm_walk [CLASS ...]

A class is built from the default values of its configuration with small sizes, and its weights are numbers that follow from their
names. Then one step is compared: in one process with the class's own forward, its own loss and torch's backward; with several
documents in a row against the same documents in rows of their own; in layouts of two ranks against one process; and what it
writes as a folder against what `from_pretrained` loads. A later token may change nothing before it. The result is
`forge_models/hf/causal_lm_classes.json`, which `check` reads and docs/models/transformers.md shows.
"""

import hashlib
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from forge_core.batch import IGNORE, Batch
from forge_core.layout import Layout
from forge_core.protocols.weights import StoredTensor, WeightsInfo
from forge_models.components.transformers import TransformersConfig
from forge_models.hf import causal_lm, causal_lm_weights
from forge_models.hf.causal_lm_classes import PATH
from forge_models.objectives import CrossEntropy
from forge_parallel.launch.local_processes import fork_local
from forge_parallel.model.parallel_model import ParallelModel, gathered
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.pipeline.schedules import OneForwardOneBackward
from forge_parallel.placement.boxes import local_box
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step
from forge_parallel.transforms.expert import ExpertParallel
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel

VOCAB, LENGTH, ROWS, LAYERS = 96, 16, 4, 4
LIMIT = 7_000_000
"""Parameters of the largest model that counts as small."""
TOLERANCE = 5e-6
"""Largest accepted error relative to a tensor's largest gradient: many classes compute norms and routers in fp32 in any dtype."""
LAYOUTS = {"dp": "dp2", "pp": "pp2", "tp": "tp2", "ep": "dp2ep2"}
CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"
"""Has the version of transformers of the records."""

SMALL = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "attention_hidden_size", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "qk_rope_head_dim", "rotary_dim", "mamba_chunk_size"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "index_topk"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "linear_num_value_heads"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_topk", "moe_k", "num_key_value_heads", "linear_num_key_heads", "index_n_heads"), 2
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "mamba_n_groups", "bos_token_id"), 1),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "v_head_dim", "mamba_d_state", "mamba_n_heads", "mamba_d_head"), 8),
    **dict.fromkeys(
        ("state_size", "linear_key_head_dim", "linear_value_head_dim", "index_head_dim", "hidden_size_per_layer_input"), 8
    ),
    "encoder_layers": 2,
    "eos_token_id": 2,
    "mamba_expand": 2,
    "sliding_window": 6,
    "qk_head_dim": 12,
    "conv_L_cache": 3,
    "pad_token_id": 0,
    "num_nextn_predict_layers": 0,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 16,
    "emb_dim": 32,
    "dim_head": 8,
    "dim_ff": 48,
    "prompt_length": 4,
    "embedding_dim": 32,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
}
"""Sizes by key of config.json."""
SET_IF_NULL = ("num_key_value_heads", "head_dim", "pad_token_id")
INKLING2 = {
    "unpadded_vocab_size": 96,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 6,
    "d_rel": 4,
    "rel_extent": 16,
}
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 2, "num_experts_per_token": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {
        "head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "num_key_value_heads": 1,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "dory": {  # whose configuration counts attention and feed-forward as two layers
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 2,
        "num_hidden_layers": 8,
        "n_input_layers": 2,
        "n_recurrent_layers": 4,
        "n_output_layers": 2,
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 2, "laurel_rank": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "attention_layers": ["global", "local"] * 2},
    "inkling2_loop_text": {
        **INKLING2,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_gate_rank": 4,
    },
    "inkling2_text": INKLING2,
    "kimi_linear": {"num_experts_per_token": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "qwen4_exp_text": {
        "hc_lowrank": 8,
        "ple_embed_dim": 8,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 1,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "output_gate_type": "sigmoid",
    },
    "reformer": {
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [16, 16],
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "hash_seed": 0,
        "attn_layers": ["local", "lsh"] * 2,
    },
    "roc_bert": {
        "pronunciation_embed_dim": 8,
        "pronunciation_vocab_size": 96,
        "shape_embed_dim": 8,
        "shape_vocab_size": 96,
    },
    "xglm": {"attention_heads": 4},
    "xlnet": {"d_head": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layer_types": ["mamba", "hybrid"] * 2,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_dt_rank": 2,
    },
    "zamba2": {
        "layer_types": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "n_mamba_heads": 2,
        "mamba_headdim": 32,
        "chunk_size": 4,
        "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Keys that have to fit the small sizes of one kind of model."""


def small(config: type) -> dict[str, Any]:
    """Returns the keys of a small configuration of a class of configurations."""
    values = _shrunk(config().to_dict())
    for key, value in values.items():
        if key.endswith("_config") and isinstance(value, dict) and "model_type" in value:
            values[key] = _shrunk(value)
    values.pop("transformers_version", None)
    values |= SPECIAL.get(values.get("model_type", ""), {})
    return json.loads(json.dumps(config.from_dict(values).to_dict(), default=str))  # type: ignore[attr-defined]


def _shrunk(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key in SMALL and not isinstance(value, dict | list) and (value is not None or key in SET_IF_NULL):
            found[key] = SMALL[key]
        elif ("drop" in key or "jitter" in key) and isinstance(value, float):
            found[key] = 0.0
        elif key in ("layer_types", "mlp_layer_types") and isinstance(value, list):
            found[key] = (list(dict.fromkeys(value)) * LAYERS)[:LAYERS]
        elif key == "per_layer_config":
            found[key] = {}
        elif key == "num_attention_heads_per_layer":
            found[key] = [4] * LAYERS
        elif key in ("intermediate_size", "activation_sparsity_pattern") and isinstance(value, list):
            found[key] = [48 if key == "intermediate_size" else 0.0] * LAYERS
        elif key == "is_decoder":
            found[key] = True
        else:
            found[key] = value
    if "qk_rope_head_dim" in found and "head_dim" in found:
        found["head_dim"] = found["qk_rope_head_dim"]  # the rotary part, where keys are compressed
    if "kv_lora_rank" in found and "num_key_value_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]  # each query head has its own keys there
    return found


def value_of(name: str, shape: tuple[int, ...], ones: bool) -> Tensor:
    """Returns numbers that follow from a tensor's name, around 1 for tensors that a class starts at 1."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.1
    return drawn + 1 if ones else drawn


@torch.no_grad()
def _fill(model: ParallelModel) -> None:
    for name, tensor in model.tensors():
        box = local_box(tensor)
        whole = value_of(name, tuple(box.shape), model.specs.tensors[name].init.kind == "ones")
        box.local.copy_(box.within(whole if tensor.is_floating_point() else torch.zeros(box.shape)))


def batches(packed: bool) -> list[Batch]:
    """Returns one batch per row, with labels on some tokens; `packed`: rows have several documents."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=generator)
    labels[torch.rand((ROWS, LENGTH), generator=generator) < 0.3] = IGNORE
    starts = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    starts[:, 5] = starts[1, 9] = starts[2, 2] = True
    index = torch.arange(LENGTH).expand(ROWS, LENGTH)
    documents, first = starts.cumsum(1).to(torch.int32), starts.clone()
    first[:, 0] = True
    positions = (index - index.where(first, 0).cummax(1).values).to(torch.int32)
    return [
        Batch(
            tokens[row : row + 1],
            labels[row : row + 1],
            positions=positions[row : row + 1] if packed else None,
            documents=documents[row : row + 1] if packed else None,
        )
        for row in range(ROWS)
    ]


Found = tuple[float, dict[str, Tensor]]
"""Mean loss, and gradients by name."""


DType = Literal["fp64", "fp32", "bf16"]


def realized(config: str, layout: str, dtype: DType = "fp64", device: str = "cpu") -> ParallelModel:
    """Collective: returns the model of a configuration in a layout."""
    at = Layout.parse(layout)
    transforms: list[Any] = [FullyShard()] if at.dp_shard * at.ep > 1 else []
    transforms += [ExpertParallel()] if at.ep > 1 else []
    transforms += [TensorParallel(sequence_parallel=False)] if at.tp > 1 else []
    plan = Plan.of(transforms, at, Pipeline(OneForwardOneBackward().build()) if at.pp > 1 else None)
    blueprint = Blueprint.of(lambda: causal_lm.causal_lm(config, {}, packs=True))
    return realize(blueprint, plan, Topology.of(at, torch.device(device)), _fill, dtype, dtype)


def step_of(config: str, layout: str, packed: bool = False, dtype: DType = "fp64", device: str = "cpu") -> Found:
    """Collective: returns loss and gradients of one step in a layout."""
    model = realized(config, layout, dtype, device)
    share = ROWS // model.topology.data_size
    mine = batches(packed)[model.topology.data_rank * share :][:share]
    result = Step(model, CrossEntropy())([batch.to(device) for batch in mine])
    gradients = gathered(model, {name: tensor.grad for name, tensor, _ in model.trainable()})
    return result.numbers()["loss"], gradients


def step_of_transformers(config: str, packed: bool = False) -> Found:
    """Returns loss and gradients of the class's own forward, each document in a row of its own."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    hollow = Blueprint.of(lambda: causal_lm.causal_lm(config, {}))
    values = json.loads(config)
    known = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    model: Any = AutoModelForCausalLM.from_config(known, attn_implementation=hollow.module.config._attn_implementation).train()
    for part in model.modules():
        if getattr(part, "config", None) is not None:
            part.config._experts_implementation = "eager"
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in hollow.specs.tensors:
            ones = hollow.specs.tensors[name].init.kind == "ones"
            tensor.data = value_of(name, tuple(tensor.shape), ones) if tensor.is_floating_point() else torch.zeros_like(tensor)
    every = batches(packed)
    count = sum(int((batch.labels != IGNORE).sum()) for batch in every)
    total = 0.0
    for batch in every:
        for tokens, labels in _documents(batch):
            if (labels != IGNORE).any():
                logits = model(input_ids=tokens[None], use_cache=False).logits[0].double()
                loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") / count
                loss.backward()
                total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _documents(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    tokens, labels = batch.tokens[0], batch.labels[0]
    if batch.documents is None:
        yield tokens, labels
        return
    for document in batch.documents[0].unique():
        here = batch.documents[0] == document
        yield tokens[here], labels[here]


def error(one: Found, other: Found) -> float:
    """Returns the largest difference of losses and gradients, relative to a tensor's largest gradient, or to a thousandth of the
    largest of all for tensors whose gradients are nearly 0; a gradient that one side lacks counts as 0."""
    (loss, ours), (other_loss, theirs) = one, other
    errors = [abs(loss - other_loss) / max(abs(loss), 1e-9)]
    floor = 1e-3 * max(float(gradient.abs().max()) for gradient in ours.values())
    for name in {*ours, *theirs}:
        a, b = ours.get(name), theirs.get(name)
        a, b = (torch.zeros_like(b) if a is None else a), (torch.zeros_like(a) if b is None else b)  # type: ignore[arg-type]
        errors.append(float((a.double() - b.double()).abs().max()) / max(float(a.abs().max()), floor))
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def influence_of_later_tokens(config: str) -> float:
    """Returns how much logits change if only a later token changes."""
    model = realized(config, "dp1")
    tokens = torch.cat([batch.tokens for batch in batches(False)])
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] - 2) % (VOCAB - 3) + 3
    with model.inference():
        one, other = model.part(tokens), model.part(changed)
    if torch.equal(one[:, 9:], other[:, 9:]):
        raise AssertionError("a token has no influence at all")
    return float((one - other)[:, :9].abs().max() / one.abs().max())


class Memory:
    """`Weights` in memory, of a class with numbers that follow from names."""

    def __init__(self, config: str) -> None:
        self.model = TransformersConfig(config=config, weights_from="draw")
        self._model = realized(config, "dp1")
        self._values = {name: tensor.detach() for name, tensor in self._model.tensors()}
        self.tensors = {
            name: StoredTensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._values.items()
        }
        self.facts = WeightsInfo(origin="the walk")

    def read(self, names: Any) -> dict[str, Tensor]:
        return {name: self._values[name] for name in names}

    def box(self, name: str, offset: Any, extent: Any) -> Tensor:
        return self._values[name][tuple(slice(a, a + n) for a, n in zip(offset, extent, strict=True))]

    def logits(self) -> Tensor:
        with self._model.inference():
            return self._model.part(batches(False)[0].tokens)


def error_of_a_folder(config: str) -> float:
    """Writes a folder; returns the largest difference of logits after `from_pretrained`, and 1 if reading it back differs."""
    from transformers import AutoModelForCausalLM

    weights = Memory(config)
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "folder"
        causal_lm_weights.write(path, weights, tokenizer=None, max_shard_bytes=10**9)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, local_files_only=True, use_safetensors=True)
        for part in model.modules():
            if getattr(part, "config", None) is not None:
                part.config._experts_implementation = "eager"
        folder = causal_lm_weights.CausalLMFolder(path, weights.model)
        back = folder.read(list(folder.tensors))
        ours = weights.read(list(weights.tensors))
        if back.keys() != ours.keys() or any(not torch.equal(back[name], ours[name]) for name in ours):
            return 1.0
        with torch.no_grad():
            theirs = model.eval()(input_ids=batches(False)[0].tokens, use_cache=False).logits
    ours_logits = weights.logits()
    return float((theirs - ours_logits).abs().max() / ours_logits.abs().max())


def classes() -> dict[str, list[type]]:
    """Returns the configurations of every class of causal language models, by class; its own one first."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    found: dict[str, list[type]] = {}
    for config, model in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        if not model.__module__.startswith("transformers."):  # which somebody has registered
            continue
        found.setdefault(model.__name__, []).insert(0 if config is model.config_class else 99, config)
    return dict(sorted(found.items()))


def record_of(config: type) -> dict[str, Any]:
    """Returns what holds for a class: True, or a text that says why not."""
    try:
        text = json.dumps(small(config))
        module: Any = Blueprint.of(lambda: causal_lm.causal_lm(text, {})).module
        size = sum(parameter.numel() for parameter in module.parameters())
    except Exception as cause:
        return {"alone": _said(cause)}
    if size > LIMIT:
        return {"alone": "it cannot be made small from its default configuration"}
    record: dict[str, Any] = {"alone": _holds(lambda: error(step_of_transformers(text), step_of(text, "dp1")))}
    if record["alone"] is True:
        record["alone"] = _holds(lambda: influence_of_later_tokens(text), why="a later token changes what is before it")
    if record["alone"] is not True:
        return record
    packed = "documents in one row see each other"
    record["packed"] = _holds(lambda: error(step_of_transformers(text, True), step_of(text, "dp1", True)), why=packed)
    record["folder"] = _holds(lambda: error_of_a_folder(text))
    record["loss"] = module.anatomy.why_whole or True
    alone = step_of(text, "dp1")
    for name, layout in LAYOUTS.items():
        record[name] = _holds(lambda layout=layout: fork_local(2, lambda: error(alone, step_of(text, layout)), 120.0)[0])
    return record


def _holds(measure: Callable[[], float], limit: float = TOLERANCE, why: str = "it differs from one process") -> bool | str:
    try:
        found = measure()
    except Exception as cause:
        return _said(cause)
    return True if found <= limit else f"{why} (by {found:.1e})"


def _said(cause: Exception) -> str:
    text = re.sub(r" \(/[^)\s]*(\)|$)", "", " ".join(str(cause).split()))  # without lines of files
    for mark in ("PlanError: ", "Unsupported: "):  # of a rank
        text = text.rpartition(mark)[2]
    return text[:160] if "Traceback" not in text else f"{type(cause).__name__}: {text[-160:]}"


class Book:
    """The records of a walk in their file, and the version of transformers that each of them ran under.

    `earlier` of the document has the names of the records that ran under another version than `transformers`, by version.
    """

    def __init__(self, path: Path, key: str, names: Sequence[str]) -> None:
        """
        Args:
            path: the file.
            key: key of the records in it.
            names: what the installed version of transformers has, in order; records of anything else are dropped.
        """
        import transformers

        self._path, self._key, self._names = path, key, names
        document = json.loads(path.read_text()) if path.exists() else {}
        self._records: dict[str, Any] = document.get(key, {})
        self._version = transformers.__version__
        then = document.get("transformers", self._version)
        self._ran = dict.fromkeys(self._records, then)
        for version, earlier in document.get("earlier", {}).items():
            self._ran |= dict.fromkeys(earlier, version)

    def keep(self, name: str, record: Mapping[str, Any]) -> None:
        """Writes a record that ran under the installed version."""
        self._records[name], self._ran[name] = dict(record), self._version
        earlier: dict[str, list[str]] = {}
        for each in self._names:
            if self._ran.get(each, self._version) != self._version:
                earlier.setdefault(self._ran[each], []).append(each)
        document = {self._key: {each: self._records[each] for each in self._names if each in self._records}}
        document |= {"transformers": self._version, **({"earlier": earlier} if earlier else {})}
        self._path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    """Writes the records of the named classes, by default of all."""
    found = classes()
    book = Book(PATH, "classes", list(found))
    for name, configs in found.items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            kinds = [config.model_type for config in configs]  # type: ignore[attr-defined]
            record = {"model_types": kinds, **record_of(configs[0])}
            book.keep(name, record)
            print(name, record, flush=True)


if __name__ == "__main__":
    main()
