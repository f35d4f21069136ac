"""Interfaces of models, strategies and optimizers, and of the position of a rank in the layout.

Collectives enter a model only at three seams: the attention core, the expert dispatcher and the loss head. A model has the local
implementation as an attribute; a transform replaces the attribute, or requests its form for several ranks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from forge_core.features import Plane
from forge_core.layout import Layout
from forge_core.specs import Specs

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from forge_core.batch import Batch


class Topology(Protocol):
    """One rank's view of a layout (`forge_parallel.placement.topology.Topology`). A world of one has no groups or meshes."""

    @property
    def layout(self) -> Layout: ...
    @property
    def device(self) -> "torch.device": ...
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int:
        """Number of ranks in the world."""
        ...

    @property
    def data_rank(self) -> int:
        """Number of the share of the global batch that this rank reads."""
        ...

    @property
    def data_size(self) -> int:
        """Number of shares of the global batch."""
        ...

    @property
    def coordinates(self) -> Mapping[str, int]:
        """This rank's coordinate on every axis of both views."""
        ...

    @property
    def dense(self) -> "DeviceMesh":
        """Mesh of dense parameters."""
        ...

    @property
    def sparse(self) -> "DeviceMesh":
        """Mesh of experts, over the same ranks."""
        ...

    @property
    def data_mesh(self) -> "DeviceMesh":
        """Mesh over which dense parameters are sharded, with the replica axis first, if any."""
        ...

    @property
    def experts_mesh(self) -> "DeviceMesh":
        """The same for parameters of experts."""
        ...

    def group(self, axis: str) -> "ProcessGroup":
        """Returns the group of ranks that differ from this one only on `axis`, in order of coordinates. The size of `axis` must
        be larger than 1."""
        ...

    def stage_group(self) -> "ProcessGroup":
        """Collective: returns the group of ranks that together hold this rank's pipeline stages, in rank order; without a
        pipeline, all ranks. The world must have several ranks."""
        ...

    def nodes(self, axis: str, size: int) -> "tuple[ProcessGroup, ProcessGroup]":
        """Collective: splits the ranks of `axis` into nodes of `size` neighbors; returns the group of this rank's node, and the
        group of its peers in all nodes."""
        ...

    def all_reduce(self, tensor: "Tensor") -> "Tensor":
        """Collective: sums `tensor` in place over the world; the identity in a world of one."""
        ...

    def from_first(self, tensor: "Tensor") -> "Tensor":
        """Collective: returns the tensor of rank 0 on every rank's device."""
        ...


class Context(Protocol):
    """One part of the model on one rank (`forge_parallel.model.parallel_model.Context`).

    Attributes:
        specs: specs of the part, with global names.
        topology: topology of this rank.
        compute: dtype of parameters and activations in forward and backward.
        state: dtype of the parameters that the optimizer updates.
        whole: specs of the whole model if the part is a pipeline stage, else None.
        average: whether gradients are averaged over data ranks instead of summed, for loops with a mean loss on each rank.
    """

    @property
    def specs(self) -> Specs: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def compute(self) -> "torch.dtype": ...
    @property
    def state(self) -> "torch.dtype": ...
    @property
    def whole(self) -> Specs | None: ...
    @property
    def average(self) -> bool: ...


class LossTerms(NamedTuple):
    """The result of an objective for one micro-batch, before any reduction.

    This is a named tuple because torch's module hooks look for tensors inside tuples, not inside arbitrary objects.

    Attributes:
        sum: scalar fp32, the loss summed over valid tokens, with its graph. A regularization term may contribute to its gradient
            without contributing to its value, so that reported losses can be compared with runs without the term.
        tokens: scalar int64, number of valid tokens.
        metrics: further detached fp32 scalars, each a sum over valid tokens.
        rows: (B,) detached, contribution of each row to `sum`; None if not computed, which disables the loss by source.
    """

    sum: "Tensor"
    tokens: "Tensor"
    metrics: "dict[str, Tensor]"
    rows: "Tensor | None" = None


@runtime_checkable
class AttentionCore(Protocol):
    """Seam 1: softmax(q k^T * scale + mask) v on local tensors, always causal."""

    def prepare(self, documents: "Tensor | None", length: int, window: int | None, device: "Any") -> Any:
        """Returns an object, such as a mask, that all layers with the same `window` share for a batch. The model passes it on
        unchanged.

        Args:
            documents: (B, T) int32, or None if each row is one document: the fast causal path.
            length: T, the number of positions.
            window: maximum number of positions that a position attends to, including itself; None = all previous ones.
            device: device of the result.
        """
        ...

    def __call__(
        self,
        q: "Tensor",
        k: "Tensor",
        v: "Tensor",
        shared: Any,
        scale: float,
        soft_cap: float | None = None,
        sinks: "Tensor | None" = None,
    ) -> "Tensor":
        """q (B, heads, T, head_dim), k (B, kv_heads, T, head_dim), v (B, kv_heads, T, width) -> (B, heads, T, width).

        With a `soft_cap`, scores become soft_cap * tanh(scores / soft_cap) before the mask. With `sinks` (heads,), one for each
        head of q, the softmax has one more score, which every query sees and which has no value. A core that does not support
        one of them must not have the argument, so that models which need it are refused.
        """
        ...


@runtime_checkable
class RecurrentCore(Protocol):
    """Seam 1 of recurrent layers: convolution and state over whole rows, on local tensors."""

    def prepare(self, documents: "Tensor | None", length: int, window: int | None, device: "Any") -> Any:
        """Does the same as `AttentionCore.prepare`; recurrent layers have no window."""
        ...

    def recur(
        self,
        streams: "Sequence[Tensor]",
        filters: "Sequence[tuple[Tensor, Tensor | None]]",
        g: "Tensor",
        beta: "Tensor",
        shared: Any,
        cache: Any = None,
        skip: "Tensor | None" = None,
    ) -> "Tensor":
        """Returns the outputs of all heads, (B, T, heads, value width).

        Args:
            streams: projected queries and keys (B, T, key_heads, key width), and values (B, T, heads, value width).
            filters: weight (channels, width) and bias (channels,) of the causal convolution of each stream; its channels are
                heads * width of the stream.
            g: (B, T, heads) logarithms of the decay, or (B, T, heads, key width) if each channel of the keys has its own.
            beta: (B, T, heads) step sizes.
            shared: from `prepare`.
            cache: `LayerCache` with the state, which this call updates.
            skip: (heads,) factor with which values are added to the outputs; None: they are not.
        """
        ...


@runtime_checkable
class PackedCore(AttentionCore, Protocol):
    """An attention core with variable-length kernels for rows of several documents."""

    def prepare_packed(
        self, documents: "Tensor | None", starts: "Tensor | None", length: int, window: int | None, x: "Tensor"
    ) -> Any:
        """Does the same as `prepare`, and is called instead of it if a core has it.

        Args:
            documents, length, window: see `prepare`.
            starts: `Batch.document_starts` of the whole rows that this rank attends over, or None if unknown.
            x: the residual stream, which has the dtype and device of the core's later arguments.
        """
        ...


class PositionedTokens(NamedTuple):
    """The positions of tokens that are not stored in the order of their row.

    Attributes:
        places: (T,) int64, the position of each token in its row.
        documents: (B, T) int32, or None if each row is one document.
    """

    places: "Tensor"
    documents: "Tensor | None"


@runtime_checkable
class PositionedCore(AttentionCore, Protocol):
    """An attention core that accepts positions of queries and keys, as gathering keys over ranks requires."""

    def prepare_placed(self, queries: PositionedTokens, keys: PositionedTokens, window: int | None) -> Any:
        """Does the same as `prepare` for T queries and S keys in any order: k is (B, kv_heads, S, head_dim), v likewise."""
        ...


@runtime_checkable
class ExpertDispatcher(Protocol):
    """Seam 2: sends tokens to their experts and the results back."""

    def __call__(
        self,
        x: "Tensor",
        experts: "Tensor",
        weights: "Tensor",
        expert_fn: "Callable[[Tensor, Tensor], Tensor]",
        num_experts: int,
        slots: int | None = None,
        overlap_with: "Callable[[], Tensor] | None" = None,
    ) -> "Tensor":
        """Returns the weighted sum of the chosen experts' outputs, (N, embed), plus the result of `overlap_with`.

        Args:
            x: (N, embed) tokens.
            experts: (N, top_k) int64 expert of each slot; -1 = dropped.
            weights: (N, top_k) combine weights.
            expert_fn: (tokens sorted by expert, tokens per expert (num_experts,) int64) -> outputs in the same order. The tokens
                may have further rows at the end that belong to no expert; their outputs are ignored.
            num_experts: number of experts in the layer.
            slots: number of slots that are not dropped, if the host knows it.
            overlap_with: computes (N, embed) to add, such as the output of shared experts; called once, during communication.
        """
        ...


@runtime_checkable
class ExpertStack(Protocol):
    """A module of stacked experts, without collectives: the `expert_fn` of a dispatcher.

    A strategy that multiplies in another number format overrides `products` in a subclass of the module's class.
    """

    def forward(self, tokens: "Tensor", counts: "Tensor") -> "Tensor":
        """See `expert_fn` of `ExpertDispatcher`."""
        ...

    def products(self, tokens: "Tensor", counts: "Tensor") -> "Callable[[Tensor, Tensor], Tensor]":
        """Returns the matrix product for one forward: (rows (n, inputs) in the order of `tokens`, weight (count, outputs,
        inputs)) -> (n, outputs), each row times the matrix of its expert. Called once per forward."""
        ...


@runtime_checkable
class Observer(Protocol):
    """A module that collects statistics during an optimizer step, such as a layer of experts that balances its load.

    For every such module of the model, a step calls `before_step` before its first forward. After all backwards, it sums
    `statistics` over all ranks with different tokens, and passes the sum to `after_step`, together with the decision to skip the
    update. So the module changes its state once per optimizer step, in the same way on every rank.
    """

    def before_step(self, scale: "Tensor") -> None:
        """Begins a step. `scale` is scalar fp64, 1 / (tokens of the step without padding, over all micro-batches and data
        ranks). The module multiplies its auxiliary losses, which are sums over tokens, by it."""
        ...

    def statistics(self) -> "Tensor":
        """Returns (n,) fp64, summed over all training forwards since `before_step`; zeros if there was no forward. n must
        depend only on the model."""
        ...

    def after_step(self, totals: "Tensor", skip: "Tensor") -> None:
        """Ends a step. `totals` are the summed statistics. If `skip`, a scalar, is 1, the update is skipped and the state must
        not change."""
        ...

    def report(self) -> "Mapping[str, Tensor]":
        """Returns the metrics of the newest step by name, equal on every rank that holds the module: scalars for trackers, and
        vectors for figures; empty before the first step."""
        ...


@runtime_checkable
class LossHead(Protocol):
    """Seam 3: projection to the vocabulary and cross-entropy in one function, so that full logits are never stored.

    A loss head may have a method `compiled()`, which returns the same loss head with compiled kernels. It is called if blocks
    are compiled for an accelerator. It may have a method `for_dry_run()`, which returns a loss head with the same memory and the
    same collectives in fewer operators; its values may be undefined. Dry runs call it.
    """

    def __call__(
        self,
        hidden: "Tensor",
        weight: "Tensor",
        labels: "Tensor",
        z_loss: float,
        soft_cap: float | None,
        smoothing: float = 0.0,
        weights: "Tensor | None" = None,
    ) -> "tuple[Tensor, Tensor, Tensor]":
        """Returns (total, nll, z): a scalar fp32 with graph, and two (N,) fp32, detached, one value per label, 0 for `IGNORE`.

        `total = sum(weights * ((1 - smoothing) * nll + smoothing * mean + z_loss * z))`, where z is the square of the log of the
        partition function, and mean is the mean over the vocabulary of the nll with each token as the label.

        Args:
            hidden: (N, embed) in compute precision.
            weight: (vocab, embed).
            labels: (N,) int64, `IGNORE` = no loss. Without any valid label, the results are zeros with a graph.
            z_loss: weight of the z term.
            soft_cap: if set, logits become soft_cap * tanh(logits / soft_cap).
            smoothing: passed only if it is not 0: a loss head that does not support it must not have the argument.
            weights: (N,) factors on the loss of each position, without gradient; passed only if given, like `smoothing`.
        """
        ...

    def split(self, first: int, gather: "Callable[[Tensor], Tensor]") -> "LossHead":
        """Returns the loss head of a rank that holds only some rows of `weight`, with a vocabulary that is split over ranks.

        Its labels and losses are those of the whole vocabulary, and its losses are equal on all ranks. Its gradient of `hidden`
        is this rank's summand.

        Args:
            first: number of the rank's first row in the whole vocabulary.
            gather: Collective: (k, n) -> (ranks, k, n), the arguments of all ranks.
        """
        ...


class Head(Protocol):
    """The last module of a model, as an objective sees it."""

    def loss(
        self,
        hidden: "Tensor",
        labels: "Tensor",
        z_loss: float = 0.0,
        smoothing: float = 0.0,
        weights: "Tensor | None" = None,
    ) -> "tuple[Tensor, Tensor, Tensor]":
        """Returns the result of the `LossHead` for `hidden` (B, T, embed), `labels` (B, T) and `weights` (B, T), with nll and z
        as (B, T)."""
        ...


class Objective(Protocol):
    """The function to minimize; it runs in the forward of the last pipeline stage.

    An objective that needs more than labels, or sums over something else than labels, derives from `BatchObjective`.
    """

    def __call__(self, head: Head, hidden: "Tensor", labels: "Tensor") -> LossTerms: ...


class BatchObjective(Objective, Protocol):
    """An objective of whole batches. Derive from this class and override what differs; the default methods are those of an
    objective that needs labels only. A step calls, in this order, `prepared`, `counts` and `bound`."""

    def prepared(self, batch: "Batch") -> "Batch":
        """Returns what the model and the objective get in place of a batch of whole rows on the host. The result for a row must
        depend on nothing but the row, so that it is the same in every layout and after a resume."""
        return batch

    def counts(self, batch: "Batch") -> "Tensor":
        """Returns (B,) int64: the number of summands that each row of a prepared batch has in `LossTerms.sum`; the loss of a
        step is divided by their number. By default the labels of the row."""
        from forge_core.batch import IGNORE

        return (batch.labels != IGNORE).flatten(1).sum(1)

    def bound(self, batch: "Batch") -> Objective:
        """Returns the objective for one prepared micro-batch on the device, cut as the layout cuts it."""
        return self

    def with_targets(self, batch: "Batch") -> "Batch":
        """For checks: returns a batch of random tokens with the targets that `bound` needs. Those of a row must depend on nothing
        but the row."""
        return batch


class Scorer(BatchObjective, Protocol):
    """An objective that is only evaluated, on frozen weights, to collect numbers about batches."""

    def entries(self, batch: "Batch", terms: LossTerms) -> bytes:
        """Returns the numbers of a batch on the host from its terms; those of several batches are joined in any order."""
        ...


class ReferencedObjective(BatchObjective, Protocol):
    """An objective that compares the model with frozen weights. A run computes numbers of these weights once, before the first
    step, for all its data; it stores them, and a resume reads them."""

    def scorer(self) -> Scorer:
        """Returns the objective that computes the numbers."""
        ...

    def with_reference(self, entries: bytes) -> "ReferencedObjective":
        """Returns this objective with the joined entries of all data."""
        ...


class TaughtObjective(BatchObjective, Protocol):
    """An objective that learns from a frozen model.

    Attributes:
        teacher: path of the model's weights.
    """

    teacher: str

    def with_teacher(self, module: "nn.Module") -> "TaughtObjective":
        """Returns this objective with its teacher, a whole `Model` with its weights."""
        ...


class Model(Protocol):
    """A model for strategies: an `nn.Module` that describes itself.

    Its forward takes (x, *, positions, documents, labels, objective, **extras). With an objective, it returns the result of the
    objective. Without, the last pipeline stage returns logits (B, T, vocab), and other stages hidden states (B, T, embed). A
    pipeline stage is the model with the modules of other stages set to None; only the last stage gets labels and objective. In
    training, if the specs have an `mtp_depth`, it also gets `mtp_targets` (`forge_core.batch.MTPTargets`) together with labels
    and objective. It then adds the gradient of multi-token prediction to that of `LossTerms.sum`, whose value and `rows` remain
    those of the next token.

    A model with extras may have `with_extras(batch)`. For checks, it adds extras to a batch of random tokens; the extras of a
    row must depend only on this row.

    A model that runs each of `Specs.blocks` once and in order, and does the same with equal ones, whatever their number, may
    declare `treats_blocks_alike = True` in its class, not in one that it inherits from. A dry run then leaves out most of them,
    and so takes seconds. A module inside a block declares it to say that it does not depend on the number of its block, even if
    it knows it.

    A model whose loss changes over a run may have `at_step(step, steps)`. It is called on every stage before each optimizer
    step, with the number of finished steps and of all steps of the run.
    """

    def specs(self) -> Specs: ...


class NamedTensor(NamedTuple):
    """A trainable tensor with its global name and optimizer group."""

    name: str
    tensor: "Tensor"
    group: str


class TrainableModel(Protocol):
    """The argument of an optimizer factory: a realized, sharded model."""

    def trainable(self) -> Iterable[NamedTensor]:
        """Returns every local parameter once, without tied copies."""
        ...


class LaidOutModel(TrainableModel, Protocol):
    """A `TrainableModel` for optimizers of whole matrices, with the specs and the topology of its parameters."""

    @property
    def specs(self) -> Specs: ...
    @property
    def topology(self) -> Topology: ...


class Optimizer(Protocol):
    """Updates parameters from their `.grad`. All its state exists from construction on.

    An optimizer that updates its parameters in parts may have `shorten()`, which a dry run calls: its steps may then skip parts
    that need no more memory than the updated ones.

    An optimizer that does the same for equal parameters, one after another, whatever their number, may have `by_parameter()` in
    its class, not in one that it inherits from. It returns (names of parameters, tensor with one number for each) for every
    such tensor that `state` does not return, or None if it does not do the same after all. A dry run may then leave out most of
    the equal blocks of a model.

    An optimizer whose parameters depend on the step may have `at_step(step)`, which is called before the forward of a step with
    the number of finished steps.
    """

    def step(self, skip: "Tensor | None" = None) -> None:
        """Does one update. If `skip`, a scalar fp32 on the device, is 1, the step is a bitwise no-op."""
        ...

    def set_factor(self, factor: float) -> None:
        """Sets the factor on the learning rates of all groups; the schedule calls it before each step."""
        ...

    def zero_grad(self) -> None:
        """Clears the gradients of all parameters of the model, in any group."""
        ...

    def state(self) -> "Mapping[str, Mapping[str, Tensor]]":
        """Returns the live state tensors by state name and global parameter name, sharded like the parameter, or scalar."""
        ...


class AveragingOptimizer(Optimizer, Protocol):
    """An optimizer that evaluates other weights than it trains. Its constructor calls `model.evaluate_with(self.averaged)`, if
    the model has this method."""

    def averaged(self) -> "AbstractContextManager[Mapping[str, Tensor]]":
        """Swaps in the weights used for evaluation, checkpoints and exports. The context is the trained weights by global
        name, sharded like the parameters; on exit, the parameters get them back bit for bit, including changes made meanwhile."""
        ...


class Transform(Protocol):
    """One strategy. Derive from this class and override what the strategy changes; the default methods do nothing.

    A strategy that does the same with equal blocks, whatever their number, may have `block_variant(index, path, modules)` in its
    class, not in one that it inherits from. For the block at `path`, number `index` of its part, with the given paths of modules
    inside, it returns a value that is equal for blocks that it treats alike. A dry run may then leave out most of them.

    Attributes:
        order: place among the transforms.
        axes: mesh axes that it claims.
        needs: transforms that the plan must also contain if one of these axes is larger than 1.
        whole_backward: it does not support pipelines that split the backward of a block.
        plane: what it changes (`forge_core.features.Plane`), which determines the combinations that tests must cover.
    """

    name: str
    order: int
    axes: frozenset[str]
    needs: frozenset[str] = frozenset()
    whole_backward: bool = False
    plane: Plane = "layout"

    def apply(self, part: "nn.Module", context: Context) -> "nn.Module":
        """Changes `part` (on the meta device) in place or returns its replacement."""
        ...

    def parameter_device(self, device: "torch.device") -> "torch.device":
        """Returns the device of parameters, gradients and optimizer state; `device` is the one without this strategy."""
        return device

    def local_batch(self, batch: "Batch", context: Context) -> "Batch":
        """Returns this rank's share of the batch of its data rank; called before tokens are counted."""
        return batch

    def hidden_shape(self, shape: "tuple[int, ...]", context: Context) -> "tuple[int, ...]":
        """Returns the local shape of the hidden states between pipeline stages; `shape` is the one without this strategy.

        The first strategy gets (B, T, embed) of the local batch, or (B, T, streams, embed) of a model with several streams.
        """
        return shape

    def whole_sequences(self, part: "nn.Module", on: bool) -> None:
        """Switches to forwards of any length whose input and output are whole on every rank, as in generation, or back."""

    def before_micro_batch(self, part: "nn.Module", last: bool) -> None:
        """Called before each training forward; `last` is True for the micro-batch after which gradients must be complete."""

    def after_backward(self, part: "nn.Module", context: Context) -> None:
        """Called once per step after its last backward, to complete the gradients."""
