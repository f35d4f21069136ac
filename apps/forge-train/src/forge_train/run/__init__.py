"""A training run from start to end: started, resumed, stepped through, saved, stopped.

    from forge_train import JobRanks, load_recipe
    from forge_train.run import fit, start_run

    recipe = load_recipe("debug", ["--job.dir=runs/parts", "--train.max_steps=4", "--hooks=[]"], world=1)
    run = start_run(recipe, JobRanks())  # builds everything; resumes if the directory has a checkpoint
    print(run.model.parameter_count(), "parameters")
    reason = fit(run)  # the loop over optimizer steps
    run.saves.close()
    assert run.state.step == 4

`train` does both, and starts again after a rollback.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_train.run.loop import fit, train
    from forge_train.run.run import Run
    from forge_train.run.start import start_run
    from forge_train.run.training import Decided, State, Training

__all__ = ["Decided", "Run", "State", "Training", "fit", "start_run", "train"]
__getattr__, __dir__ = lazy_exports(__name__)
