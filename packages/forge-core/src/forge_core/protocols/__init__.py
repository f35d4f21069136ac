"""The interfaces between packages, as `Protocol`s and plain data. Nothing here imports torch at run time.

    from forge_core.protocols import Hook, Run, StepResult

    class Ticker(Hook):
        def after_step(self, run: Run, result: StepResult) -> None:
            if run.state.step % 100 == 0:
                print(run.state.step, result.numbers()["loss"])

`model` has the interfaces of models, strategies and optimizers; `topology` the position of a rank in the layout; `data` sources,
tokenizers and streams; `checkpoint` live state and stores; `weights` formats of weights; `run` the keys of a recipe that several
packages read, the trainer and its hooks.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_core.protocols.checkpoint import LinkingStore, Piece, Store, World
    from forge_core.protocols.data import (
        Cursor,
        EvaluationSet,
        Source,
        SourceComponent,
        SourceContext,
        SourceWithItems,
        SourceWithMask,
        Stream,
        StreamedSource,
        TextComponent,
        Texts,
        Tokenizer,
    )
    from forge_core.protocols.model import (
        AttentionCore,
        AveragingOptimizer,
        Context,
        ExpertDispatcher,
        ExpertStack,
        Head,
        LaidOutModel,
        LossHead,
        LossTerms,
        Model,
        NamedTensor,
        Objective,
        Observer,
        Optimizer,
        PackedCore,
        PositionedCore,
        Topology,
        TrainableModel,
        Transform,
    )
    from forge_core.protocols.run import (
        EndingTracker,
        EndStatus,
        Evaluation,
        Hook,
        HookRequests,
        Job,
        Run,
        RunState,
        Step,
        StepResult,
        Tracker,
    )
    from forge_core.protocols.weights import Converter, HfModel, StoredTensor, Weights, WeightsInfo

__all__ = [
    "AttentionCore",
    "AveragingOptimizer",
    "Context",
    "Converter",
    "Cursor",
    "EndStatus",
    "EndingTracker",
    "Evaluation",
    "EvaluationSet",
    "ExpertDispatcher",
    "ExpertStack",
    "Head",
    "HfModel",
    "Hook",
    "HookRequests",
    "Job",
    "LaidOutModel",
    "LinkingStore",
    "LossHead",
    "LossTerms",
    "Model",
    "NamedTensor",
    "Objective",
    "Observer",
    "Optimizer",
    "PackedCore",
    "Piece",
    "PositionedCore",
    "Run",
    "RunState",
    "Source",
    "SourceComponent",
    "SourceContext",
    "SourceWithItems",
    "SourceWithMask",
    "Step",
    "StepResult",
    "Store",
    "StoredTensor",
    "Stream",
    "StreamedSource",
    "TextComponent",
    "Texts",
    "Tokenizer",
    "Topology",
    "Tracker",
    "TrainableModel",
    "Transform",
    "Weights",
    "WeightsInfo",
    "World",
]
__getattr__, __dir__ = lazy_exports(__name__)
