"""Steps of other trainers on a Forge decoder's shape, weights and tokens. Each function returns one that makes a step.

All have fp32 masters, fused AdamW with Forge's settings, clipping at 1 and SDPA attention; bf16 is autocast.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from forge_core.batch import IGNORE, Batch
from forge_models.components.decoder import DecoderConfig
from forge_models.hf.families.llama import Llama
from forge_models.hf.family import config_of
from forge_models.hf.names import places_in

ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


def exported(decoder: DecoderConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """`weights` by the names that Hugging Face's Llama has for them."""
    places = places_in(Llama(), decoder)
    return {other: tensor for name, place in places.items() for other, tensor in place.split(weights[name]).items()}


def transformers(decoder: DecoderConfig, weights: dict[str, Tensor], data: Batch, compute: str) -> Callable[[], float]:
    """Hugging Face's Llama under accelerate, as both document it."""
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForCausalLM

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if compute == "bf16" else "no")
    settings = config_of(Llama(), decoder) | {"use_cache": False, "attn_implementation": "sdpa"}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    missing, unexpected = model.load_state_dict(exported(decoder, weights), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)  # a tied head is the embedding
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), **ADAMW))

    def one() -> float:
        loss = model(input_ids=data.tokens, labels=data.labels, shift_labels=data.labels).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return one


def torchtitan(decoder: DecoderConfig, weights: dict[str, Tensor], data: Batch, compute: str) -> Callable[[], float]:
    """torchtitan's Llama, its blocks and its loss compiled, in the order of its trainer's step on one device.

    Raises:
        ValueError: for a decoder that its Llama cannot be: a tied head, scaled positions, another width of the MLP.
    """
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.config import JobConfig
    from torchtitan.distributed.utils import clip_grad_norm_
    from torchtitan.models.llama3.infra.parallelize import apply_compile
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    config = JobConfig()
    config.compile.enable = True
    settings = config_of(Llama(), decoder)
    arguments = TransformerModelArgs(
        dim=decoder.dim,
        n_layers=decoder.layers,
        n_heads=decoder.heads,
        n_kv_heads=settings["num_key_value_heads"],
        vocab_size=decoder.vocab_size,
        norm_eps=settings["rms_norm_eps"],
        rope_theta=decoder.rope.theta,
        max_seq_len=decoder.max_length,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
    )
    model = Transformer(arguments)
    width = model.layers["0"].feed_forward.w1.out_features
    if settings["tie_word_embeddings"] or decoder.rope.scaling != "none" or width != decoder.ffn_dim:
        raise ValueError(
            f"torchtitan's Llama has a head of its own, plain positions and an MLP of {width} here; try another shape"
        )
    adapter = Llama3StateDictAdapter(arguments, None)
    model.load_state_dict(adapter.from_hf(exported(decoder, weights)), strict=True)
    apply_compile(model, config.compile)
    loss_of = build_cross_entropy_loss(config)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def one() -> float:
        optimizer.zero_grad()
        tokens = (data.labels != IGNORE).sum().float()
        with torch.autocast("cpu", torch.bfloat16) if compute == "bf16" else nullcontext():
            logits = model(data.tokens)
            loss = loss_of(logits, data.labels) / tokens
        del logits
        loss.backward()
        clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizer.step()
        return loss.item()

    return one
