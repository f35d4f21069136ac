"""Parts that this distribution registers, by group and name. The registry imports a part on its first use."""

PARTS = {
    "forge.models": {
        "vlm": "forge_vlm.components.model:VLM",
    },
    "forge.hooks": {
        "modalities": "forge_vlm.hooks:ModalityStatistics",
    },
    "forge.fusions": {
        "cross_attention": "forge_vlm.components.fusions:CrossAttention",
        "joint_decoder": "forge_vlm.components.fusions:JointDecoder",
        "moma": "forge_vlm.components.fusions:MoMa",
        "mot": "forge_vlm.components.fusions:MixtureOfTransformers",
    },
    "forge.encoders": {
        "clip": "forge_vlm.components.encoders:CLIP",
        "dinov2": "forge_vlm.components.encoders:DINOv2",
        "features": "forge_vlm.components.encoders:Features",
        "siglip": "forge_vlm.components.encoders:SigLIP",
        "siglip2": "forge_vlm.components.encoders:SigLIP2",
        "vit": "forge_vlm.components.encoders:ViT",
    },
    "forge.frame_scorers": {
        "image_text": "forge_vlm.components.frame_scorers:ImageText",
        "stored": "forge_vlm.components.frame_scorers:StoredScores",
    },
    "forge.sources": {
        "digits": "forge_vlm.components.sources:Digits",
        "image_dataset": "forge_vlm.components.sources:ImageDataset",
        "image_jsonl": "forge_vlm.components.sources:ImageJsonl",
        "image_webdataset": "forge_vlm.components.sources:ImageWebdataset",
        "video_csv": "forge_vlm.components.sources:VideoCsv",
        "video_frames": "forge_vlm.components.sources:VideoFrames",
        "video_questions": "forge_vlm.components.sources:VideoQuestions",
    },
    "forge.adapters": {
        "attention_pool": "forge_vlm.components.adapters:AttentionPoolConfig",
        "average_pool": "forge_vlm.components.adapters:AveragePoolConfig",
        "linear": "forge_vlm.components.adapters:LinearConfig",
        "mlp": "forge_vlm.components.adapters:MLPConfig",
        "perceiver": "forge_vlm.components.adapters:PerceiverConfig",
        "pixel_shuffle": "forge_vlm.components.adapters:PixelShuffleConfig",
    },
    "forge.hf_models": {
        "forge_standalone": "forge_vlm.components.model:AutoModelFormatConfig",
        "llava": "forge_vlm.components.model:LlavaConfig",
        "mllama_text_model": "forge_vlm.components.model:MllamaConfig",
    },
    "forge.presets": {
        "vlm-demo": "forge_vlm.presets:vlm_demo",
        "debug-joint": "forge_vlm.presets:debug_joint",
        "debug-cross": "forge_vlm.presets:debug_cross",
        "debug-mot": "forge_vlm.presets:debug_mot",
        "debug-moma": "forge_vlm.presets:debug_moma",
        "7b-joint": "forge_vlm.presets:7b_joint",
        "7b-cross": "forge_vlm.presets:7b_cross",
        "7b-mot": "forge_vlm.presets:7b_mot",
        "7b-moma": "forge_vlm.presets:7b_moma",
        "7b-video": "forge_vlm.presets:7b_video",
    },
}
