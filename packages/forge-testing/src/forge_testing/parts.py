"""The checks that forge-testing offers to the registry."""

PARTS = {
    "forge.conformance": {
        "forge.adapters": "forge_testing.checks.vision:AdapterChecks",
        "forge.attentions": "forge_testing.checks.blocks:AttentionChecks",
        "forge.converters": "forge_testing.checks.formats:ConverterChecks",
        "forge.encoders": "forge_testing.checks.vision:EncoderChecks",
        "forge.frame_scorers": "forge_testing.checks.vision:FrameScorerChecks",
        "forge.fusions": "forge_testing.checks.vision:FusionChecks",
        "forge.hf_models": "forge_testing.checks.formats:HfModelChecks",
        "forge.hooks": "forge_testing.checks.training:HookChecks",
        "forge.mlps": "forge_testing.checks.blocks:MLPChecks",
        "forge.models": "forge_testing.checks.models:ModelChecks",
        "forge.norms": "forge_testing.checks.blocks:NormChecks",
        "forge.objectives": "forge_testing.checks.models:ObjectiveChecks",
        "forge.optimizers": "forge_testing.checks.parallel:OptimizerChecks",
        "forge.pipeline_schedules": "forge_testing.checks.parallel:PipelineScheduleChecks",
        "forge.routers": "forge_testing.checks.blocks:RouterChecks",
        "forge.schedules": "forge_testing.checks.training:ScheduleChecks",
        "forge.sources": "forge_testing.checks.data:SourceChecks",
        "forge.stores": "forge_testing.checks.stores:StoreChecks",
        "forge.tokenizers": "forge_testing.checks.data:TokenizerChecks",
        "forge.trackers": "forge_testing.checks.training:TrackerChecks",
        "forge.transforms": "forge_testing.checks.parallel:TransformChecks",
    },
}
