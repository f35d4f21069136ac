"""Replicas that are none any more must not go on training, nor be saved."""

from typing import Any

from forge_parallel.verify.replicas import drifted
from forge_train.hooks.periodic import Periodic
from forge_train.run.stop import TrainingError


class ReplicasHook(Periodic):
    """Stops the run with the name of the tensor and the rank that holds it otherwise."""

    def act(self, run: Any) -> None:
        """Compares all parameters.

        Raises:
            TrainingError: one drifted.
        """
        if found := drifted(run.model):
            raise TrainingError(
                f"after step {run.state.step} rank {found.rank} holds other values of {found.name} than its replicas: a faulty "
                "device, or a kernel that is not deterministic. The run goes on from the newest checkpoint when started again; "
                "leave that rank's device out if it happens twice"
            )
