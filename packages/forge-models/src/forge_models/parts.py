"""Components of this distribution by group and name. The registry reads this table, and imports a component when it is used."""

PARTS = {
    "forge.models": {
        "decoder": "forge_models.components.decoder:DecoderConfig",
        "transformers": "forge_models.components.transformers:TransformersConfig",
    },
    "forge.attentions": {
        "compressed_mqa": "forge_models.components.compressed:CompressedMQA",
        "gated_delta_net": "forge_models.components.recurrent:GDN",
        "gqa": "forge_models.components.attentions:GQA",
        "hybrid": "forge_models.components.recurrent:Hybrid",
        "kimi_delta": "forge_models.components.kimi_delta:KDA",
        "mamba2": "forge_models.components.state_space:Mamba2",
        "indexed_mla": "forge_models.components.attentions:IndexedMLA",
        "mla": "forge_models.components.attentions:MLA",
    },
    "forge.mlps": {
        "clamped_swiglu": "forge_models.components.layers:ClampedSwiGLU",
        "geglu": "forge_models.components.layers:GeGLU",
        "gelu": "forge_models.components.layers:GELU",
        "relu": "forge_models.components.layers:ReLU",
        "relu2": "forge_models.components.layers:ReLU2",
        "swiglu": "forge_models.components.layers:SwiGLU",
    },
    "forge.norms": {
        "layernorm": "forge_models.components.layers:LayerNormConfig",
        "rmsnorm": "forge_models.components.layers:RMSNormConfig",
    },
    "forge.routers": {
        "hash": "forge_models.components.experts:HashConfig",
        "normed_topk": "forge_models.components.experts:NormedTopKConfig",
        "sigmoid_topk": "forge_models.components.experts:SigmoidTopKConfig",
        "softmax_topk": "forge_models.components.experts:SoftmaxTopKConfig",
        "topk_sigmoid": "forge_models.components.experts:TopKSigmoidConfig",
    },
    "forge.checks": {
        "adapters_fit": "forge_models.checks:adapters_fit",
        "classes_are_compared": "forge_models.checks:classes_are_compared",
        "direction_fits": "forge_models.checks:direction_fits",
        "experts_compile": "forge_models.checks:experts_compile",
        "experts_fit": "forge_models.checks:experts_fit",
        "experts_see_other_tokens": "forge_models.checks:experts_see_other_tokens",
        "layers_share_a_stage": "forge_models.checks:layers_share_a_stage",
        "recurrent_kernels_fit": "forge_models.checks:recurrent_kernels_fit",
        "objective_fits": "forge_models.checks:objective_fits",
    },
    "forge.converters": {
        "gguf": "forge_models.gguf.converter:GgufConverter",
        "hf": "forge_models.hf.converter:HfConverter",
        "peft": "forge_models.components.lora:PeftConfig",
    },
    "forge.objectives": {
        "classification": "forge_models.objectives:Classification",
        "cross_entropy": "forge_models.objectives:CrossEntropy",
        "distillation": "forge_models.objectives:Distillation",
        "dpo": "forge_models.objectives:DPO",
        "masked_diffusion": "forge_models.objectives:MaskedDiffusion",
        "masked_lm": "forge_models.objectives:MaskedLM",
    },
}
