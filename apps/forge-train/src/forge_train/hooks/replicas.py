"""Stops the run when replicas have diverged."""

from forge_core.protocols.run import Run
from forge_parallel.verify.state import drifted
from forge_train.hooks.periodic import Periodic
from forge_train.process.stop import TrainingError


class ReplicasHook(Periodic):
    """Compares the replicas of every parameter, and names the tensor and the rank that differ."""

    def act(self, run: Run) -> None:
        """Compares all parameters.

        Raises:
            TrainingError: one drifted.
        """
        if found := drifted(run.model):
            raise TrainingError(
                f"after step {run.state.step} rank {found.rank} has other values of {found.name} than its replicas. The cause is "
                "a faulty device or a nondeterministic kernel. Start the run again to resume from its newest checkpoint; "
                "exclude that rank's device if it happens twice"
            )
