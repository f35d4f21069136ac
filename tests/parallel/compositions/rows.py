"""From the features of a row to what runs: the model, the transforms, the schedule, and the recipe that says the same."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any, get_args

import torch

from forge_core.component import fields_of
from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_models.components.attentions import GQA, IndexedMLA
from forge_models.components.compressed import CompressedMQA
from forge_models.components.decoder import DecoderConfig, LayerInputsConfig, MTPConfig
from forge_models.components.experts import MoEConfig, SigmoidTopKConfig, SoftmaxTopKConfig
from forge_models.components.layers import RMSNormConfig, SwiGLU
from forge_models.components.lora import LoRAConfig
from forge_models.components.transformers import TransformersConfig
from forge_models.objectives import DPO, Classification, CrossEntropy, Distillation, MaskedDiffusion, MaskedLM
from forge_models.shape import Losses, Streams, ValueEmbeddings
from forge_parallel.model.plan import Plan
from forge_parallel.optim import optimizers
from forge_parallel.optim.groups import ParameterGroup, Parameters
from forge_parallel.optim.optimizers import AdamW8bitConfig, AdamWConfig, MuonConfig
from forge_parallel.sections import Parallel, PipelineConfig, Precision
from forge_parallel.transforms.compile import Compile
from forge_parallel.transforms.context.transform import ContextParallel, Kind
from forge_parallel.transforms.expert import ExpertParallel
from forge_parallel.transforms.expert import Kind as Dispatcher
from forge_parallel.transforms.float8.transform import Float8
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel
from forge_parallel.verify.parity import Case, Measurement, measure
from forge_parallel.verify.proofs import features
from forge_vlm.components.adapters import LinearConfig
from forge_vlm.components.encoders import ViT
from forge_vlm.components.fusions import CrossAttention, JointDecoder, MixtureOfTransformers, MoMa
from forge_vlm.components.image_text import ImageTextConfig
from forge_vlm.components.model import VLM, FrameTimeConfig

CPU = torch.device("cpu")
VOCAB = 61
LENGTH = 16
SIZES = {"heads": 4, "kv_heads": 2, "layers": 4, "vocab_size": VOCAB, "max_length": 32}
PARTS = {"attention": GQA(), "mlp": SwiGLU(), "norm": RMSNormConfig()}
DECODER = DecoderConfig(dim=16, ffn_dim=24, **SIZES, **PARTS)
WIDE = DecoderConfig(dim=64, ffn_dim=64, **SIZES, **PARTS)
"""Float8 takes dimensions in sixteens, on every rank. Where a compiler rounds, more numbers make a steadier sum."""

EXPERTS = MoEConfig(
    experts=8,
    top_k=2,
    shared=1,
    ffn_dim=16,
    first_dense=1,
    router=SigmoidTopKConfig(bias_rate=0.01),
    losses=Losses(global_batch=0.1, z=0.01),
)

ALL_CHOSEN = replace(EXPERTS, experts=4, top_k=4, ffn_dim=32)
"""For low precision: rounding of a score may choose another expert, which changes the result by more than rounding. Here all are
chosen."""

INDEXED = IndexedMLA(
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    index_heads=16,
    index_dim=16,
    top_k=4,
)
"""In low precision rounding may choose another key, so that all are chosen."""

COMPRESSED = CompressedMQA(
    window=5,
    q_lora_rank=16,
    o_groups=2,
    o_lora_rank=16,
    sparse_rate=3,
    heavy_rate=4,
    index_heads=16,
    index_dim=16,
    top_k=2,
)
KINDS = ("heavy", "sparse", "sparse", "window")
"""Of compressed keys, by layer, in turn."""

LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
}
WIDE_LLAMA = {"hidden_size": 64, "intermediate_size": 64}
"""Sizes of which every rank holds a multiple of 16."""
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
"""Classes of transformers: dense, and with experts."""

LLAVA = {
    "model_type": "llava",
    "image_token_id": VOCAB - 1,
    "text_config": {**LLAMA, "initializer_range": 0.2},
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    },
}
"""A class with images: four placeholders each, from the last block but one."""

LORA = LoRAConfig(rank=8, alpha=24.0)
"""Every matrix has an adapter. Compiled experts take rows of eight numbers."""

ENCODER = ViT(size=8, patch=4, channels=1, dim=16, layers=1, heads=2)
FUSIONS = MappingProxyType(
    {
        "fusion_joint": JointDecoder(),
        "fusion_cross": CrossAttention(every=2),
        "fusion_mot": MixtureOfTransformers(),
        "fusion_moma": MoMa(),
        "fusion_moma_choice": MoMa(routing="expert_choice"),
        "fusion_moma_threshold": MoMa(routing="threshold"),
    }
)
"""By feature; an image is four placeholders, for the cross blocks one."""

LOW = frozenset({"bf16", "bf16_state", "float8", "float8_rowwise", "float8_wide_gather", "float8_experts"})
"""Features of runs that fp64 cannot be compared in."""

AXES = frozenset({"dp_shard", "dp_replicate", "tp", "cp", "pp"})


def layout_of(row: frozenset[str]) -> Layout:
    """Two ranks on every axis that a row names, four of ep where they are in nodes; `cp_ring` is of the axis cp."""
    named = {feature if feature in AXES else feature.partition("_")[0] for feature in row}
    ep = 4 if "ep_hierarchical" in row else 2 if "ep" in named else 1
    return Layout(**dict.fromkeys(named & AXES, 2), ep=ep, etp=2 if "etp" in row else 1)


def names(job: Any, layout: Layout) -> set[str]:
    """Of the features that a job uses."""
    return {use.name for use in features(job, layout)}


def decoder_of(row: frozenset[str]) -> Any:
    """Grouped-query attention, tiny; as many blocks as its stages need."""
    if "transformers_image_text" in row:
        return ImageTextConfig(config=json.dumps(LLAVA), weights_from="draw", lora=LORA if "lora" in row else None)
    if "transformers" in row:
        experts = any(feature.startswith("ep_") for feature in row)
        keys = {**LLAMA, **(MIXTRAL if experts else {}), "tie_word_embeddings": "tied" in row}
        keys |= WIDE_LLAMA if "float8" in row else {}
        return TransformersConfig(config=json.dumps(keys), weights_from="draw", lora=LORA if "lora" in row else None)
    depth = 1 if row & {"pp_interleaved_zero_bubble", "pp_zbv", "pp_dualpipev"} else 2
    mtp = MTPConfig(depth=depth) if "mtp" in row else None
    experts = None if "experts" not in row else EXPERTS if row.isdisjoint(LOW) else ALL_CHOSEN
    wide = "float8" in row or row >= {"compile", "experts"}
    layers = 6 if "more_stages" in row else 4
    if experts is not None and row & {"fusion_moma_choice", "fusion_moma_threshold"}:
        experts = replace(experts, losses=Losses(), router=SoftmaxTopKConfig())
    if "latent_experts" in row and experts is not None:
        experts = replace(experts, latent_dim=32 if wide else 12)
    if "hash_layers" in row and experts is not None:
        experts = replace(experts, router=replace(experts.router, hash_layers=(1, layers - 1)))
    lora = LORA if "lora" in row else None
    model = replace(WIDE if wide else DECODER, tied_embeddings="tied" in row, mtp=mtp, moe=experts, layers=layers, lora=lora)
    if "classification" in row:
        model = replace(model, labels=("no", "yes", "perhaps"))
    if "bidirectional" in row:
        model = replace(model, attention=GQA(causal=False))
    if "indexer" in row:
        model = replace(model, attention=replace(INDEXED, keys="chosen" if row.isdisjoint(LOW) else "all"), kv_heads=None)
    if "compressed_keys" in row:
        if model.attention != GQA():
            raise ValueError("compressed keys are an attention of their own")
        attention = replace(COMPRESSED, kinds=(KINDS * layers)[:layers], top_k=2 if row.isdisjoint(LOW) else 10)
        model = replace(model, attention=attention, kv_heads=None)
    if "value_embeddings" in row:
        if not isinstance(model.attention, GQA):
            raise ValueError("attention with an indexer has no tables of values")
        tables = ValueEmbeddings(layers=(0, layers - 1), gate_channels=5)
        model = replace(model, attention=replace(model.attention, value_embeddings=tables))
    if row & {"shared_kv", "attention_chunk"}:
        if not isinstance(model.attention, GQA):
            raise ValueError("attention with an indexer has neither chunks nor shared keys and values")
        shared = {"shared_kv_layers": 2, "shared_kv_ffn_factor": 1 if "experts" in row else 2} if "shared_kv" in row else {}
        local = {"chunk": 5} if "attention_chunk" in row else {"window": 5}
        model = replace(model, attention=replace(model.attention, **shared, **local, global_every=2))
    if "layer_inputs" in row:
        model = replace(model, layer_inputs=LayerInputsConfig(dim=16 if wide else 6))
    if "streams" in row:
        model = replace(model, streams=Streams(count=3, sinkhorn=5))
    for feature in row & FUSIONS.keys():
        keys = {info.name: getattr(model, info.name) for info in fields_of(DecoderConfig)}
        time = FrameTimeConfig(features=4) if "frame_time" in row else None
        model = VLM(**keys, encoder=ENCODER, adapter=LinearConfig(), fusion=FUSIONS[feature], frame_time=time)
    return model


def transforms_of(row: frozenset[str]) -> Mapping[str, Any]:
    """By name; those of axes that the row does not have find nothing to do."""
    reshard = True if "reshard" in row else False if "keep_gathered" in row else None
    found: dict[str, Any] = {
        "shard": FullyShard(reshard=reshard, reduce="each" if "reduce_each" in row else "last", offload="offload" in row),
        "tensor": TensorParallel(sequence_parallel="tp_whole" not in row, asynchronous="tp_asynchronous" in row),
        "expert": ExpertParallel(overlap="ep_in_turn" not in row),
    }
    for dispatcher in get_args(Dispatcher):
        if f"ep_{dispatcher}" in row:
            nodes = 2 if dispatcher == "hierarchical" else None
            found["expert"] = replace(found["expert"], dispatcher=dispatcher, ranks_per_node=nodes)
    for kind in get_args(Kind):
        if f"cp_{kind}" in row:
            found["context"] = ContextParallel(kind=kind)
    if "recompute" in row:
        found["recompute"] = Recompute(policy="full" if "recompute_full" in row else "selective")
    if "compile" in row:
        found["compile"] = Compile(budget=0.5 if "compile_budget" in row else 1.0)
    if "float8" in row:
        found["float8"] = Float8(
            recipe="rowwise" if "float8_rowwise" in row else "tensorwise",
            all_gather=False if "float8_wide_gather" in row else None,
            experts="float8_experts" in row,
        )
    return found


def schedule_of(row: frozenset[str]) -> Any:
    """The schedule's component; None without a pipeline."""
    names = [feature.removeprefix("pp_") for feature in row if feature.startswith("pp_")]
    if not names:
        return None
    return schedule_class(*names)(**({"stages_per_rank": 3} if "more_stages" in row else {}))


@cache
def schedule_class(name: str) -> Any:
    """The component of a schedule's name."""
    return Registry().load("forge.pipeline_schedules", name)


def precision_of(row: frozenset[str]) -> Precision:
    """fp64 wherever the row allows it."""
    if "bf16" in row:
        return Precision(compute="bf16", state="bf16" if "bf16_state" in row else "fp32")
    return Precision(compute="fp64", state="fp64") if row.isdisjoint(LOW) else Precision(compute="fp32")


def rows_of(row: frozenset[str]) -> tuple[int, int]:
    """Sequences of a global batch, and of a micro-batch."""
    return 4 * layout_of(row).data, 1 if "accumulate" in row else 4


def objective_of(row: frozenset[str]) -> Any:
    """With a z term, which no layout is told of."""
    if "dpo" in row:
        return DPO(beta=0.5, nll=0.2)
    if "distillation" in row:
        return Distillation(teacher="of the checks", weight=0.7, temperature=1.5)
    if "classification" in row:
        return Classification(class_weights=(0.5, 2.0, 1.0))
    if "masked_lm" in row:
        return MaskedLM(mask_id=VOCAB - 1, ratio=0.5, vocab_size=VOCAB)
    if "masked_diffusion" in row:
        return MaskedDiffusion(mask_id=VOCAB - 1)
    return CrossEntropy(z_loss=1e-2, label_smoothing=0.1 if "label_smoothing" in row else 0.0)


def groups_of(row: frozenset[str]) -> tuple[ParameterGroup, ...]:
    """What is frozen: a block, experts included; a part of a block; a table, but not a tied one, whose two gradients count."""
    if "transformers_image_text" in row:
        patterns = ("model.vision_tower.*", "model.language_model.layers.1.*") if "frozen" in row else ()
        return tuple(ParameterGroup(match=pattern, frozen=True) for pattern in patterns)
    if "transformers" in row:
        patterns = ("model.layers.1.*", "model.layers.2.self_attn.k_proj.*") if "frozen" in row else ()
        return tuple(ParameterGroup(match=pattern, frozen=True) for pattern in patterns)
    part = "indexer" if row & {"indexer", "compressed_keys"} else "q_proj" if "shared_kv" in row else "k_proj"
    patterns = ("blocks.1.*", f"blocks.2.attention.{part}.*", *(() if "tied" in row else ("embed.weight",)))
    patterns = patterns if "frozen" in row else ()
    return tuple(ParameterGroup(match=pattern, frozen=True) for pattern in patterns)


def optimizer_of(row: frozenset[str]) -> Any:
    """The component. Blocks of four columns are what every layout of tiny matrices has whole, and each of a row has its scale."""
    if "adamw8bit" in row:
        return AdamW8bitConfig(lr=1e-2, block=4, smallest=0)
    return MuonConfig(lr=1e-2) if "muon" in row else AdamWConfig(lr=1e-2)


def case_of(row: frozenset[str]) -> Case:
    """In fp64; `measured` takes another precision from the case that it is given."""
    total, micro_batch = rows_of(row)
    return Case(
        decoder_of(row).build,
        objective_of(row).build(),
        partial(optimizers.build_optimizer, optimizer_of(row)),
        VOCAB,
        LENGTH,
        total,
        micro_batch,
        groups=groups_of(row),
    )


def measured(case: Case, layout: str, row: frozenset[str], device: torch.device = CPU) -> Measurement:
    """One rank of a run; in a world of one, strategies that need more have nothing to do."""
    at = Layout.parse(layout)
    pipeline = PipelineConfig(schedule=schedule_of(row)).build() if at.pp > 1 else None
    with warnings.catch_warnings():
        if {"compile", "float8"} & row:  # imports of compiler and torchao warn
            warnings.simplefilter("ignore")
        return measure(case, Plan.of(transforms_of(row).values(), at, pipeline), device)


def job_of(row: frozenset[str], base: Any) -> Any:
    """The recipe of a row: `base` with the row's model, strategies, precision and batches."""
    total, micro_batch = rows_of(row)
    sizes = layout_of(row).sizes()
    pipeline = PipelineConfig(schedule=schedule_of(row) or schedule_class("1f1b")())
    packing = "pad" if "transformers_image_text" in row else base.data.packing
    return replace(
        base,
        model=decoder_of(row),
        objective=objective_of(row),
        transforms=MappingProxyType(transforms_of(row)),
        parallel=Parallel(pipeline=pipeline, **sizes),
        precision=precision_of(row),
        optimizer=optimizer_of(row),
        parameters=Parameters(groups=list(groups_of(row))),
        train=replace(base.train, global_batch=total, micro_batch=micro_batch),
        data=replace(base.data, sequence_length=LENGTH, packing=packing),
        hooks=[],
    )
