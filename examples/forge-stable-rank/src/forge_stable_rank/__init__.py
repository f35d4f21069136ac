"""The stable rank of matrices as a plugin of Forge."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from forge_core import ForgeError
from forge_core.protocols import Hook, Run, StepResult


@dataclass(kw_only=True)
class StableRank(Hook):
    """Logs the stable rank of hidden matrices, |W|_F^2 / |W|_2^2: a number from 1 to the smaller side of the matrix.

    It is 1 if one direction has all of the weight. A number that falls towards 1 precedes many divergences.
    """

    observes = True

    every: Annotated[int, Gt(0)] = 100
    """Optimizer steps between two measurements."""

    def check(self, run: Run) -> None:
        if run.topology.layout.pp > 1:
            raise ForgeError("hook stable_rank measures whole models, but a pipeline rank has only its stages; remove the hook")

    def after_step(self, run: Run, result: StepResult) -> None:
        if run.state.step % self.every:
            return
        import torch

        ranks: dict[str, float] = {}
        with torch.no_grad():
            for name, tensor, group in run.model.trainable():
                if group == "matrix":
                    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # collective, so on every rank
                    singular = torch.linalg.svdvals(whole.float()).double()
                    ranks[name] = float((singular.square().sum(-1) / singular.amax(-1).square().clamp(min=1e-300)).min())
        lowest = min(ranks, key=ranks.__getitem__)
        run.log({"stable_rank/mean": sum(ranks.values()) / len(ranks), "stable_rank/lowest": ranks[lowest]})
