"""How an optimizer treats parameters of which a rank holds a part. No torch.

The component of an optimizer says it by a class attribute `shards`:
    elementwise: the update of an element depends on that element's own value, gradient and state, as in Adam. A part is then
        updated as the whole would be. `forge_core.conformance.conforms` tests the claim.
    blocks: elements of a row, the last dimension, are updated together in blocks, rows by themselves, as in AdamW with moments of
        eight bits. A part of whole blocks is updated as the whole would be; another part is refused when the optimizer is built.
        On several ranks it is a feature, which has to be proven; parts of whole rows are tested as above.
    gathers: it needs more, such as a norm or a product of a whole tensor, and gets it from the other ranks itself, as
        `optim.whole_matrices` does. On several ranks it is a feature then, which has to be proven.
One that says neither may compute a norm of its part and be wrong in silence (Muon, LAMB), so it is refused where tensors are
split.
"""

from typing import TYPE_CHECKING, Any

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_parallel.optim.grouped import with_settings
from forge_parallel.optim.settings import NO_SETTINGS, Settings

if TYPE_CHECKING:
    from forge_core.protocols.model import Optimizer
    from forge_parallel.build.parallel_model import ParallelModel

WAYS = ("elementwise", "blocks", "gathers")
PROVEN = ("blocks", "gathers")
"""Of these, features on several ranks."""


def split(layout: Layout) -> bool:
    """Whether ranks hold different parameters: everywhere but on replicas of a whole model."""
    return layout.world > layout.dp_replicate


def sharding_fault(component: Any, layout: Layout) -> str | None:
    """Why the optimizer of a component cannot be used in a layout; None when it can."""
    way = getattr(component, "shards", None)
    if way in WAYS or not split(layout):
        return None
    said = "does not say" if way is None else f"says {way!r} of"
    return (
        f"{type(component).__name__} {said} how it treats parts of parameters, which ranks hold in layout {layout}; "
        "an optimizer that computes norms or matrices of parts is wrong there"
    )


HINT = (
    "in its component set `shards: ClassVar[str] = 'elementwise'` if each element is updated by itself (test it with "
    "forge_core.conformance.conforms), or 'gathers' if it exchanges what it needs, as by forge_parallel's WholeMatrices; or use "
    "one process"
)


def build_optimizer(component: Any, model: "ParallelModel", settings: Settings = NO_SETTINGS) -> "Optimizer":
    """The optimizer of a component, for a model that is laid out, with `settings` for some of its parameters.

    Raises:
        PlanError: the layout splits parameters, and the component does not say how it treats parts; or it has not what is set.
    """
    if why := sharding_fault(component, model.topology.layout):
        raise PlanError(f"optimizer: {why}; {HINT}")
    if settings.stages:
        from forge_parallel.optim.stages.optimizer import StagedOptimizer

        return StagedOptimizer(component, model, settings.stages)
    return with_settings(component, model, settings)
