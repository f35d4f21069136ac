"""The modeled time of a training step, from a model's shapes, a layout and a description of the hardware.

    from forge_models import DecoderConfig
    from forge_parallel import Layout
    from forge_parallel.model.realize import Blueprint
    from forge_parallel.timing import Efficiency, Execution, Hardware, Scores, predict, stages_of, work_of

    config = DecoderConfig(dim=256, layers=4, heads=8, kv_heads=2, vocab_size=4096, max_length=1024)
    blueprint = Blueprint.of(config.build)
    work = work_of(blueprint, [Scores(width=2 * 256)] * 4)
    gpu, layout, execution = Hardware.load("h100"), Layout.parse("dp4"), Execution(rows=8, length=1024)
    step = predict(work, stages_of(blueprint, None, 1), layout, execution, gpu, Efficiency())
    assert step.tokens == 4 * 8 * 1024
    assert step.seconds > step.flops * step.tokens / 4 / gpu.flops["bf16"]

`forge-train plan --hardware` does this for a recipe, and `benchmarks/timing/score.py` compares with published runs.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_parallel.timing.calibration import Observation, fit, rank_correlation, score
    from forge_parallel.timing.failures import SavePlan, best_interval
    from forge_parallel.timing.hardware import Hardware, Link, UnknownHardware, known_hardware
    from forge_parallel.timing.step_time import Efficiency, ErrorSummary, StepTime, predict
    from forge_parallel.timing.work import Execution, ModelWork, Scores, StageBlocks, stages_of, work_of

__all__ = [
    "Efficiency",
    "ErrorSummary",
    "Execution",
    "Hardware",
    "Link",
    "ModelWork",
    "Observation",
    "SavePlan",
    "Scores",
    "StageBlocks",
    "StepTime",
    "UnknownHardware",
    "best_interval",
    "fit",
    "known_hardware",
    "predict",
    "rank_correlation",
    "score",
    "stages_of",
    "work_of",
]
__getattr__, __dir__ = lazy_exports(__name__)
