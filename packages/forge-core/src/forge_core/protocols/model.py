"""What models, strategies and optimizers agree on.

Collectives enter a model at three seams only: the attention core, the expert dispatcher and the loss head. A model
ships the local implementation as an attribute; a transform replaces the attribute, or asks it for its form on several ranks.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from forge_core.features import Plane
from forge_core.protocols.topology import Context, Topology
from forge_core.specs import Specs

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor, nn

    from forge_core.batch import Batch


class LossTerms(NamedTuple):
    """What an objective makes of one micro-batch, before any reduction.

    A named tuple because torch's module hooks look for tensors inside tuples, not inside arbitrary objects.

    Attributes:
        sum: scalar fp32, the loss summed over valid tokens, with its graph. A term that only regularizes may be in its gradient
            and not in its value, so that what is reported can be compared with runs that are trained without the term.
        tokens: scalar int64, number of valid tokens.
        metrics: further detached fp32 scalars, each a sum over valid tokens.
        rows: (B,) detached, what each row adds to `sum`; None where it is not counted; then no loss by source is known.
    """

    sum: "Tensor"
    tokens: "Tensor"
    metrics: "dict[str, Tensor]"
    rows: "Tensor | None" = None


@runtime_checkable
class AttentionCore(Protocol):
    """Seam 1: softmax(q k^T * scale + mask) v on local tensors, always causal."""

    def prepare(self, documents: "Tensor | None", length: int, window: int | None, device: "Any") -> Any:
        """What all layers with one `window` share for a batch, such as a mask; opaque to the model.

        Args:
            documents: (B, T) int32, or None when each row is one document: the fast causal path.
            length: T, the number of positions.
            window: a position sees at most this many positions, itself included; None = all before it.
            device: where the result lives.
        """
        ...

    def __call__(
        self, q: "Tensor", k: "Tensor", v: "Tensor", shared: Any, scale: float, soft_cap: float | None = None
    ) -> "Tensor":
        """q (B, heads, T, head_dim), k (B, kv_heads, T, head_dim), v (B, kv_heads, T, width) -> (B, heads, T, width).

        With a `soft_cap`, scores become soft_cap * tanh(scores / soft_cap) before the mask. A core that cannot do this
        must not take the argument, so that a model which caps its scores is refused.
        """
        ...


@runtime_checkable
class PackedCore(AttentionCore, Protocol):
    """An attention core with kernels for rows of several documents that need more than their mask."""

    def prepare_packed(
        self, documents: "Tensor | None", starts: "Tensor | None", length: int, window: int | None, x: "Tensor"
    ) -> Any:
        """As `prepare`, which takes its place where a core does not have it.

        Args:
            documents: as there.
            starts: `Batch.document_starts` of the whole rows that this rank attends over, where they are known.
            length: as there.
            window: as there.
            x: the residual stream, which tells dtype and device of what the core will be called with.
        """
        ...


class PositionedTokens(NamedTuple):
    """Tokens of one row that do not lie where they belong.

    Attributes:
        places: (T,) int64, the place of each token in its row.
        documents: (B, T) int32, or None when each row is one document.
    """

    places: "Tensor"
    documents: "Tensor | None"


@runtime_checkable
class PositionedCore(AttentionCore, Protocol):
    """An attention core that can be told where its queries and keys belong: what gathering keys over ranks builds on."""

    def prepare_placed(self, queries: PositionedTokens, keys: PositionedTokens, window: int | None) -> Any:
        """As `prepare`, for calls with T queries and S keys in any order: k is (B, kv_heads, S, head_dim), v alike."""
        ...


@runtime_checkable
class ExpertDispatcher(Protocol):
    """Seam 2: brings tokens to their experts and the results back."""

    def __call__(
        self,
        x: "Tensor",
        experts: "Tensor",
        weights: "Tensor",
        run: "Callable[[Tensor, Tensor], Tensor]",
        count: int,
        slots: int | None = None,
        overlap_with: "Callable[[], Tensor] | None" = None,
    ) -> "Tensor":
        """Weighted sum of the chosen experts' outputs, (N, embed), plus what `overlap_with` makes.

        Args:
            x: (N, embed) tokens.
            experts: (N, top_k) int64 expert of each slot; -1 = dropped.
            weights: (N, top_k) combine weights.
            run: (tokens sorted by expert, tokens per expert (count,) int64) -> outputs in the same order. Rows beyond the
                last expert's may be there; they belong to no expert, and their outputs are ignored.
            count: number of experts in the layer.
            slots: how many slots are not dropped, where the host knows it.
            overlap_with: makes (N, embed) to add, such as the output of shared experts; called once, while tokens travel.
        """
        ...


@runtime_checkable
class ExpertStack(Protocol):
    """A module of stacked experts: what a dispatcher runs, and how it multiplies.

    No collective enters here. A strategy that multiplies in other numbers derives from the module's class.
    """

    def forward(self, tokens: "Tensor", counts: "Tensor") -> "Tensor":
        """See `run` of `ExpertDispatcher`."""
        ...

    def products(self, tokens: "Tensor", counts: "Tensor") -> "Callable[[Tensor, Tensor], Tensor]":
        """How `forward` multiplies what it was given: (rows (n, inputs) in the order of `tokens`, weight (count, outputs,
        inputs)) -> (n, outputs), each row with the matrix of its expert. Called once in a forward."""
        ...


@runtime_checkable
class Observer(Protocol):
    """A module that keeps count over one optimizer step, such as a layer of experts that balances itself.

    For every module of the model that is one, a step calls `before_step` before its first forward, then, when all backwards
    are done, sums `statistics` over all ranks that saw different tokens, and hands the sum to `after_step` together with the
    verdict on the update. So such a module changes its state once per optimizer step, and alike on every rank.
    """

    def before_step(self, scale: "Tensor") -> None:
        """`scale`: scalar fp64, 1 / (tokens of the step that are not padding, over all micro-batches and data ranks). The module
        multiplies the losses that it adds, which are sums over tokens, by it."""
        ...

    def statistics(self) -> "Tensor":
        """(n,) fp64, a sum over all forwards in training since `before_step`; zeros where there was none. n depends on the
        model only."""
        ...

    def after_step(self, totals: "Tensor", skip: "Tensor") -> None:
        """`totals`: the summed statistics. `skip`: scalar; where it is 1 the update does not happen, and nothing may move."""
        ...

    def report(self) -> "Mapping[str, Tensor]":
        """What the newest step measured, by name, alike on every rank that holds the module: scalars for trackers and vectors
        for pictures; empty before the first step."""
        ...


@runtime_checkable
class LossHead(Protocol):
    """Seam 3: projection to the vocabulary and cross-entropy in one, so that full logits never exist.

    One that has `compiled()`, which returns the same with compiled kernels, is asked for it where blocks are compiled for an
    accelerator.
    """

    def __call__(
        self,
        hidden: "Tensor",
        weight: "Tensor",
        labels: "Tensor",
        z_loss: float,
        soft_cap: float | None,
        smoothing: float = 0.0,
    ) -> "tuple[Tensor, Tensor, Tensor]":
        """(total with graph, nll, z): a scalar fp32, and of each label (N,) fp32, detached, 0 where there is none.

        `total = sum((1 - smoothing) * nll + smoothing * mean + z_loss * z)`, with z the square of the log of the partition
        function, and mean that of the nll that each word of the vocabulary would have as the label.

        Args:
            hidden: (N, embed) in compute precision.
            weight: (vocab, embed).
            labels: (N,) int64, `IGNORE` = no loss. A batch without any valid label gives zeros with a graph.
            z_loss: weight of the z term.
            soft_cap: logits become soft_cap * tanh(logits / soft_cap) when given.
            smoothing: given only where it is not 0: a loss head that cannot do this must not take the argument.
        """
        ...

    def split(self, first: int, gather: "Callable[[Tensor], Tensor]") -> "LossHead":
        """Where ranks share the vocabulary: the loss head of one that holds some rows of `weight`, from number `first` on.

        Its losses are those of the whole vocabulary, of which labels are, and the same on all ranks; its gradient of `hidden` is
        this rank's summand.

        Args:
            gather: Collective: (k, n) -> (ranks, k, n), what each rank gave.
        """
        ...


class Head(Protocol):
    """The last module of a model, as an objective sees it."""

    def loss(
        self, hidden: "Tensor", labels: "Tensor", z_loss: float = 0.0, smoothing: float = 0.0
    ) -> "tuple[Tensor, Tensor, Tensor]":
        """`hidden` (B, T, embed), `labels` (B, T): what `LossHead` returns, nll and z as (B, T)."""
        ...


class Objective(Protocol):
    """What is minimized; runs inside the last part's forward."""

    def __call__(self, head: Head, hidden: "Tensor", labels: "Tensor") -> LossTerms: ...


class Model(Protocol):
    """A model as strategies see it: an `nn.Module` that describes itself.

    Its forward takes (x, *, positions, documents, labels, objective, **extras). With an objective it returns what that
    returns; without, logits (B, T, vocab) from a last part, else hidden states (B, T, embed). A part of a pipeline is the
    model with the modules of other parts being None; only a last part is given labels and objective. In training, a model whose
    specs name an `mtp_depth` is given `mtp_targets` too (`forge_core.batch.MTPTargets`, with labels and objective only): it adds
    the gradient of multi-token prediction to that of `LossTerms.sum`, whose value and `rows` stay those of the next token.

    A model that takes extras of a batch may have `with_extras(batch)`: for checks, a batch of random tokens with extras that are
    a function of each row alone, however rows are dealt out.

    A model whose loss changes over a run may have `at_step(step, steps)`: before each optimizer step every part is told the
    number of those done and of those of the run.
    """

    def specs(self) -> Specs: ...


class NamedTensor(NamedTuple):
    """A trainable tensor with its global name and optimizer group."""

    name: str
    tensor: "Tensor"
    group: str


class TrainableModel(Protocol):
    """What an optimizer factory is given: only a realized, sharded model has it."""

    def trainable(self) -> Iterable[NamedTensor]:
        """Every local parameter once; a tied copy is not repeated."""
        ...


class LaidOutModel(TrainableModel, Protocol):
    """What an optimizer of whole matrices needs to know besides: what the tensors are, and where their parts lie."""

    @property
    def specs(self) -> Specs: ...
    @property
    def topology(self) -> Topology: ...


class Optimizer(Protocol):
    """Updates parameters from their `.grad`. All its state exists from construction on.

    One that works through its parameters in parts may have `shorten()`, which a dry run calls: steps may then leave out parts
    that take no more memory than those that are updated.

    One whose parameters depend on the step may have `at_step(step)`: before a step's forward it is told how many are done.
    """

    def step(self, skip: "Tensor | None" = None) -> None:
        """One update. `skip`: scalar fp32 on the device; where it is 1 the step is a bitwise no-op."""
        ...

    def set_factor(self, factor: float) -> None:
        """Multiplies every group's own learning rate; the schedule calls it before each step."""
        ...

    def zero_grad(self) -> None:
        """Clears the gradient of every parameter of the model, whichever group it is in."""
        ...

    def state(self) -> "Mapping[str, Mapping[str, Tensor]]":
        """State name -> global parameter name -> tensor: live tensors, laid out as the parameter or scalar."""
        ...


class AveragingOptimizer(Optimizer, Protocol):
    """One that evaluates other weights than those that it trains. It tells the model so when it is built:
    `model.evaluate_with(self.averaged)`, where the model has that method."""

    def averaged(self) -> "AbstractContextManager[Mapping[str, Tensor]]":
        """Inside, parameters hold the weights to evaluate, to save and to export. Gives those that are trained by global name,
        laid out as the parameters: they are back afterwards bit for bit, or what was written to them meanwhile."""
        ...


class Transform(Protocol):
    """One strategy. `phase` orders it, `axes` are the mesh axes that it claims, `needs` names the transforms that must be in
    the plan as well when one of these axes is larger than 1. `whole_backward`: it does not support a pipeline that splits
    the backward of a block. `plane`: what it changes (`forge_core.features.Plane`), which says what it has to be proven with.

    Derive from it: a strategy then says only what it does, and the rest does nothing.
    """

    name: str
    phase: int
    axes: frozenset[str]
    needs: frozenset[str] = frozenset()
    whole_backward: bool = False
    plane: Plane = "layout"

    def apply(self, part: "nn.Module", context: Context) -> "nn.Module":
        """Changes `part` (on the meta device) in place or returns its replacement."""
        ...

    def parameter_device(self, device: "torch.device") -> "torch.device":
        """Where parameters, their gradients and what an optimizer keeps lie, given where they do without this strategy."""
        return device

    def local_batch(self, batch: "Batch", context: Context) -> "Batch":
        """This rank's share of a batch that its data rank read; called before anything is counted."""
        return batch

    def hidden_shape(self, shape: "tuple[int, ...]", context: Context) -> "tuple[int, ...]":
        """Local shape of the hidden states between two parts of a pipeline, given what it is without this strategy.

        It starts as (B, T, embed) of the local batch.
        """
        return shape

    def whole_sequences(self, part: "nn.Module", on: bool) -> None:
        """Switched on for forwards of any length whose input and output are whole on every rank, such as generation's."""

    def before_micro_batch(self, part: "nn.Module", last: bool) -> None:
        """Called before each forward in training; `last` is the one after which gradients must be complete."""

    def after_backward(self, part: "nn.Module", context: Context) -> None:
        """Called once a step, after its last backward: what is still missing from the gradients is added here."""
