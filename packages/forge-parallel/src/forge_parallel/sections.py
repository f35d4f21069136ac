"""The recipe's `[parallel]` and `[precision]` tables."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt

from forge_core.component import FREE, IDENTITY, LAYOUT, Component, Slot
from forge_core.errors import PlanError
from forge_core.features import Feature, Neutral
from forge_parallel.pipeline import definition


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Schedule and split of a pipeline; used if `parallel.pp` is larger than 1."""

    key_class: ClassVar = LAYOUT

    schedule: Annotated[Component, Slot("forge.pipeline_schedules", default="1f1b")] = Slot.unset()
    """Order in which stages run."""
    split: Annotated[str, Neutral("how many blocks a stage runs; between stages the same travels")] = definition.BALANCED
    """Blocks per stage, such as "5,4,4,3" (stages of all ranks in order), or "balanced": the most expensive stage is as cheap
    as possible, in multiplications. The embedding is on the first stage and the head on the last; neither counts as a block."""

    def __post_init__(self) -> None:
        try:
            definition.parse(self.split)
        except PlanError as error:
            raise ValueError(str(error)) from None

    def build(self) -> definition.Pipeline:
        """What a plan takes."""
        return definition.Pipeline(schedule=self.schedule.build(), split=self.split)


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Sizes of the parallel axes; their product is the number of processes. Experts borrow ranks (`ep`, `etp`)."""

    key_class: ClassVar = LAYOUT

    dp_shard: Annotated[int, Ge(-1), Feature("dp_shard", unless=1)] = -1
    """Ranks over which parameters are sharded; -1: all ranks that the other axes leave."""
    dp_replicate: Annotated[int, Ge(1), Feature("dp_replicate", unless=1)] = 1
    """Replicas of the sharded model, each with different data (HSDP)."""
    tp: Annotated[int, Ge(1), Feature("tp", unless=1)] = 1
    """Ranks over which single matrices are split (tensor parallelism)."""
    cp: Annotated[int, Ge(1), Neutral("transforms.context.kind says which feature it is")] = 1
    """Ranks over which one sequence is split (context parallelism)."""
    pp: Annotated[int, Ge(1), Neutral("the schedule says which feature it is")] = 1
    """Ranks over which the blocks are distributed (pipeline parallelism)."""
    ep: Annotated[int, Ge(1), Neutral("transforms.expert.dispatcher says which feature it is")] = 1
    """Ranks over which experts are distributed; borrowed from dp_shard, cp and tp."""
    etp: Annotated[int, Ge(1), Feature("etp", unless=1)] = 1
    """Ranks over which one expert's matrices are split."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Stages and schedule, if pp is larger than 1."""
    proofs: Annotated[list[Path], Neutral("what was measured before"), FREE] = field(default_factory=list)
    """Folders of receipts of `forge-train parity RECIPE --record DIR`, which prove layouts with parts of plugins."""
    timeout: Annotated[float, Ge(1), Neutral("how long ranks wait; what they exchange is the same"), FREE] = 600.0
    """Seconds after which a collective that some rank never entered is an error. At the start, ranks wait equally long for each
    other, but at most five minutes."""
    step_timeout: Annotated[
        Annotated[float, Ge(1)] | None, Neutral("how long ranks wait; what they exchange is the same"), FREE
    ] = None
    """Like `timeout`, from the end of the first step on, when all ranks are connected and compiled. It must cover evaluations and
    saves, and on GPUs two steps, because the host is one step ahead. Default: `timeout`."""
    least_timeout: Annotated[float, Gt(0), Neutral("how long ranks wait; what they exchange is the same"), FREE] = 180.0
    """Shortest time, in seconds, that counts as a hang. Beyond it, a step, an update, a wait for data or a hook's action is a
    hang if it takes 10 times the 90th percentile of its last 200 durations (after at least 10); then processes write their stacks
    and end."""
    patience: Annotated[float, Gt(0), Neutral("how long ranks wait; what they exchange is the same"), FREE] = 30.0
    """Seconds after which a waiting rank logs which ranks it waits for, and where these are."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats. fp16 is not supported, since it needs a loss scaler and has no advantage here."""

    key_class: ClassVar = IDENTITY

    compute: Annotated[
        Literal["bf16", "fp32", "fp64"],
        Feature("bf16", when="bf16", plane="numerics"),
        Neutral("what every proof is measured in", when="fp64"),
        Neutral("as fp64, with fewer digits: no cast between parameters and computation", when="fp32"),
        FREE,
    ] = "bf16"
    """Format of parameters and activations in forward and backward; losses and reductions are at least fp32. fp32 products are
    exact fp32 on GPUs as well, because Forge never enables TF32."""
    state: Annotated[
        Literal["fp32", "fp64", "bf16"],
        Feature("bf16_state", when="bf16", plane="numerics"),
        Neutral("what every proof is measured in", when="fp64"),
    ] = "fp32"
    """Format of parameters, gradients and optimizer state. `bf16` halves their memory; updates are then rounded stochastically,
    and gradients of several micro-batches are summed in bf16."""

    def __post_init__(self) -> None:
        if self.compute == "fp64" and self.state != "fp64":
            raise ValueError("compute = 'fp64' needs state = 'fp64'")
        if self.state == "bf16" and self.compute != "bf16":
            raise ValueError(f"state = 'bf16' needs compute = 'bf16', not {self.compute!r}; change one of them")
