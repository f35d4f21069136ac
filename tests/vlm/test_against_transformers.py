"""Fusions against modules of transformers of the same mathematics, on small random models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_models.blocks.moe.layer import ExpertLayer
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig
from forge_models.components.layers import RMSNormConfig, SwiGLU
from forge_testing.modules import on_meta
from forge_vlm.components.adapters import LinearConfig, MLPConfig
from forge_vlm.components.encoders import Features, SigLIP
from forge_vlm.components.fusions import CrossAttention, JointDecoder
from forge_vlm.components.model import VLM
from forge_vlm.fusion.modalities import ModalityExperts, ModalityGroups
from vlm.encoders.test_published import siglip, stored
from vlm.tiny import IMAGE, PARTS, SIZES

transformers = pytest.importorskip("transformers")

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
}
BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    **{f"attention.{name}_proj.weight": f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"mlp.{name}_proj.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}
CROSS = {
    "attention_gate": "cross_attn_attn_gate",
    "mlp_gate": "cross_attn_mlp_gate",
    "attention_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    **{
        f"attention.{name}.weight": f"cross_attn.{name}.weight"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    },
    **{f"mlp.{name}_proj.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}


def randomized(theirs: Any, seed: int = 0) -> Any:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2 + (parameter.dim() < 2))
    return theirs.double().eval()


def ours(component: VLM, given: dict[str, torch.Tensor]) -> Any:
    """Filled with tensors by our names; one that is missing stays away from being equal: it is NaN."""
    model = on_meta(component.build).double().to_empty(device="cpu").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        for name, parameter in model.named_parameters():
            parameter.copy_(given[name])
    return model


def text_names(layers: dict[int, str], prefix: str) -> dict[str, str]:
    found = {f"blocks.{mine}.{a}": f"{prefix}layers.{theirs}.{b}" for mine, theirs in layers.items() for a, b in BLOCK.items()}
    return found | {"norm.weight": f"{prefix}norm.weight", "embed.weight": f"{prefix}embed_tokens.weight"}


def test_the_joint_decoder_has_the_logits_of_llava(tmp_path: Path) -> None:
    """Rows with one image, two and none; a tower of SigLIP, its last hidden state before the norm, a projector of two."""
    stored(tmp_path, siglip())
    encoder = SigLIP(path=str(tmp_path), feature_layers=(-1,))
    config = transformers.LlavaConfig(
        vision_config=transformers.SiglipVisionConfig.from_pretrained(tmp_path),
        text_config=transformers.LlamaConfig(num_hidden_layers=3, rope_parameters=PLAIN_ROPE, **LLAMA),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    theirs = randomized(transformers.LlavaForConditionalGeneration(config))
    theirs.model.vision_tower.load_state_dict(transformers.SiglipVisionModel.from_pretrained(tmp_path).double().state_dict())
    component = VLM(
        **SIZES, **{**PARTS, "norm": RMSNormConfig(eps=1e-5)}, encoder=encoder, adapter=MLPConfig(), fusion=JointDecoder()
    )
    state = theirs.state_dict()
    names = {**text_names({layer: str(layer) for layer in range(3)}, "model.language_model."), "head.weight": "lm_head.weight"}
    given = {mine: state[name] for mine, name in names.items()}
    projector = "model.multi_modal_projector"
    module = component.build()
    for place, name in enumerate(path for path, layer in module.adapter.named_modules() if isinstance(layer, torch.nn.Linear)):
        for slot in ("weight", "bias"):
            given[f"adapter.{name}.{slot}"] = state[f"{projector}.linear_{place + 1}.{slot}"]
    weights = encoder.weights()
    given |= {f"encoder.{name}": tensor for name, tensor in weights.read(list(weights.tensors)).items()}
    model = ours(component, given)
    count = component.per_image
    assert count == 16
    rows = [[3, *[IMAGE] * count, 4, 5, *[IMAGE] * count, 6], [7, 8, *[IMAGE] * count, *range(9, 27)], [*range(1, 37)]]
    tokens = torch.tensor([row[:36] for row in rows])
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        wanted = theirs(input_ids=tokens, pixel_values=images).logits
        found = model(tokens, images=images, image_rows=torch.tensor([[0, 1], [2, -1], [-1, -1]]))
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5), (found - wanted).abs().max()


def test_cross_blocks_have_the_logits_of_mllama() -> None:
    """Where transformers is causal: every token comes behind the image (transformers issue 39379)."""
    config = transformers.models.mllama.configuration_mllama.MllamaTextConfig(
        num_hidden_layers=6, cross_attention_layers=[1, 4], rope_parameters=PLAIN_ROPE, **LLAMA
    )
    theirs = randomized(transformers.models.mllama.modeling_mllama.MllamaForCausalLM(config)).float()  # it mixes precisions
    component = VLM(
        **{**SIZES, "layers": 4},
        **{**PARTS, "norm": RMSNormConfig(eps=1e-5)},
        encoder=Features(count=5, dim=16),
        adapter=LinearConfig(bias=False),
        fusion=CrossAttention(every=2),
    )
    state = {name.removeprefix("model."): tensor for name, tensor in theirs.state_dict().items()}
    names = text_names({0: "0", 1: "2", 2: "3", 3: "5"}, "")
    names |= {f"blocks.{mine}.cross.{a}": f"layers.{place}.{b}" for mine, place in ((1, 1), (3, 4)) for a, b in CROSS.items()}
    given = {mine: state[name] for mine, name in names.items()} | {"head.weight": state["lm_head.weight"]}
    given["embed.weight"] = given["embed.weight"][:40]  # theirs has eight rows more, the image's among them
    module = component.build()
    (path,) = [path for path, layer in module.adapter.named_modules() if isinstance(layer, torch.nn.Linear)]
    model = ours(component, given | {f"adapter.{path}.weight": torch.eye(16)}).float()
    tokens = torch.tensor([[IMAGE, 3, 4, 5, 6, 7], [IMAGE, 8, 9, 10, 11, 12]])
    features = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        every = torch.zeros(2, 1, 6, 5)  # without a mask their kernel is causal, over the features of an image too
        wanted = theirs(input_ids=tokens, cross_attention_states=features, cross_attention_mask=every).logits
        found = model(tokens, images=features, image_rows=torch.tensor([[0], [1]]))
        text = theirs(input_ids=tokens[:, 1:]).logits
        assert torch.allclose(model(tokens[:, 1:]), text, rtol=0, atol=1e-5)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5), (found - wanted).abs().max()


def test_experts_by_modality_are_those_of_ernie() -> None:
    """A text group, a vision group and shared experts of both (Ernie 4.5 VL)."""
    from transformers.models.ernie4_5_vl_moe import configuration_ernie4_5_vl_moe as configuration
    from transformers.models.ernie4_5_vl_moe import modeling_ernie4_5_vl_moe as modeling

    config = configuration.Ernie4_5_VLMoeTextConfig(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=2,
        moe_intermediate_size=[8, 8],
    )
    theirs = randomized(modeling.Ernie4_5_VLMoeMoeBlock(config))
    for router in (theirs.text_moe.gate, theirs.vision_moe.gate):
        torch.nn.init.zeros_(router.moe_statics.e_score_correction_bias)
    shape = DecoderConfig(**SIZES, **PARTS, moe=MoEConfig(experts=4, top_k=2, shared=2, ffn_dim=8, kernel="loop")).shape
    assert shape.moe is not None
    mine = ModalityExperts(("text", "image"), shape.moe, SwiGLU(), shape.context(0), ExpertLayer).double().eval()
    with torch.no_grad():
        for name, part in (("text", theirs.text_moe), ("image", theirs.vision_moe)):
            layer: Any = mine.layers[name]
            layer.router.weight.copy_(part.gate.weight)
            gate, up = part.experts.gate_up_proj.chunk(2, dim=1)
            layer.experts.gate_proj.copy_(gate)
            layer.experts.up_proj.copy_(up)
            layer.experts.down_proj.copy_(part.experts.down_proj)
        shared: Any = mine.shared
        for matrix in ("gate_proj", "up_proj", "down_proj"):
            getattr(shared, matrix).weight.copy_(getattr(theirs.shared_experts, matrix).weight)
        draw = torch.Generator().manual_seed(2)
        x = torch.randn(3, 9, 16, generator=draw, dtype=torch.float64)
        kinds = torch.randint(2, (3, 9), generator=draw)
        wanted, _ = theirs(x, kinds)
        found, router_stats = mine(x, ModalityGroups.of(kinds, 2))
    assert router_stats is None
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5), (found - wanted).abs().max()


def test_a_row_before_its_image_is_right_where_transformers_is_not() -> None:
    """Logits before an image are those of the text model, for any image; in Mllama they depend on it (issue 39379)."""
    from vlm.test_fusions import copied
    from vlm.tiny import MODELS, TEXT, batch, build, row

    component = replace(MODELS["cross"])
    model, text = build(component), build(TEXT)
    copied(text, model)
    inputs = batch(row(component, 3, 4, 5, "1", 6))
    with torch.no_grad():
        assert torch.equal(model(**inputs)[:, :3], text(inputs["x"])[:, :3])
