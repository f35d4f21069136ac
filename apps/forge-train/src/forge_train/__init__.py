"""The trainer: reads a recipe, trains it, and resumes it.

    from forge_train import JobRanks, load_recipe, read_metrics, train

    recipe = load_recipe("debug", ["--job.dir=runs/first", "--train.max_steps=5"], world=1)
    run, reason = train(recipe, JobRanks())
    run.saves.close()
    assert run.state.step == 5
    print(reason, list(read_metrics(run.directory / "metrics.jsonl"))[-1])

The command `forge-train run debug` does the same, in any number of processes. Importing this package imports no torch. Further
fronts: `forge_train.recipe`, `.run`, `.hooks`, `.inference` and `.formats`.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_core.protocols.run import Hook, StepResult
    from forge_train.inference.stored import load_model, open_weights
    from forge_train.mlflow_tracker import Mlflow
    from forge_train.process.ranks import JobRanks
    from forge_train.process.stop import TrainingError
    from forge_train.recipe.load import Recipe, load_recipe
    from forge_train.recipe.schema import Job
    from forge_train.run.loop import fit, train
    from forge_train.run.run import Run
    from forge_train.run.start import start_run
    from forge_train.schedules import Constant, Cosine, CosineRestarts, InverseSqrt, Linear, MultiStep, Rex, Unscheduled, Wsd
    from forge_train.trackers import Jsonl, JsonlTracker, TensorBoard, Wandb, read_metrics

__all__ = [
    "Constant",
    "Cosine",
    "CosineRestarts",
    "Hook",
    "InverseSqrt",
    "Job",
    "JobRanks",
    "Jsonl",
    "JsonlTracker",
    "Linear",
    "Mlflow",
    "MultiStep",
    "Recipe",
    "Rex",
    "Run",
    "StepResult",
    "TensorBoard",
    "TrainingError",
    "Unscheduled",
    "Wandb",
    "Wsd",
    "fit",
    "load_model",
    "load_recipe",
    "open_weights",
    "read_metrics",
    "start_run",
    "train",
]
__getattr__, __dir__ = lazy_exports(__name__)
