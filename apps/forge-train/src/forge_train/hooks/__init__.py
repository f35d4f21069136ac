"""What happens around a step: logging, progress, evaluation, saving. A hook is one class, with its keys as fields.

    from dataclasses import dataclass
    from forge_train import JobRanks, load_recipe
    from forge_train.hooks import Periodic, Save
    from forge_train.run import fit, start_run

    @dataclass(kw_only=True)
    class Largest(Periodic):
        every: int = 2  # optimizer steps

        def act(self, run):
            run.log({"largest": max(item.tensor.abs().max().item() for item in run.model.trainable())})

    run = start_run(load_recipe("debug", ["--train.max_steps=4", "--hooks=[]", "--job.name=largest"], world=1), JobRanks())
    run.hooks += [Largest(), Save()]
    fit(run)

A recipe names a hook of a file by `name = "./largest.py:Largest"`. Importing this package imports no torch.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_train.hooks.evaluation import Best, EarlyStop, Evaluate, Tasks
    from forge_train.hooks.machine import Machine
    from forge_train.hooks.metrics import Log
    from forge_train.hooks.periodic import Periodic
    from forge_train.hooks.profile import Profile
    from forge_train.hooks.progress import Progress
    from forge_train.hooks.routing import RoutingStatistics
    from forge_train.hooks.samples import Answers, Sample
    from forge_train.hooks.save import Save
    from forge_train.hooks.stragglers import Stragglers
    from forge_train.hooks.weights import EmaConfig, Norms, Replicas

__all__ = [
    "Answers",
    "Best",
    "EarlyStop",
    "EmaConfig",
    "Evaluate",
    "Log",
    "Machine",
    "Norms",
    "Periodic",
    "Profile",
    "Progress",
    "Replicas",
    "RoutingStatistics",
    "Sample",
    "Save",
    "Stragglers",
    "Tasks",
]
__getattr__, __dir__ = lazy_exports(__name__)
