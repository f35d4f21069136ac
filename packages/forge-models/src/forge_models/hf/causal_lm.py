"""Any causal language model of transformers as a model of Forge.

`causal_lm` builds the class that a `config.json` names on the meta device and mixes `CausalLM` into it. Modules and parameters
keep their names. The forward of the class is replaced: it runs the body of the model up to the hidden states, and the loss is
computed from them in parts, so that the logits of a whole batch never exist. `causal_lm_anatomy` finds out what a class consists
of.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forge_core.batch import IGNORE, PADDING
from forge_core.protocols.model import ExpertDispatcher, Objective
from forge_core.specs import Dim, Group, Init, ModuleSpec, Specs, TensorSpec
from forge_models.blocks.cache import KVCache
from forge_models.blocks.head import ChunkedCrossEntropy, Head
from forge_models.blocks.moe.dispatch import LocalDispatch
from forge_models.blocks.moe.experts import ContiguousGradient, grouped_products
from forge_models.components.lora import LoRAConfig
from forge_models.hf.causal_lm_anatomy import (
    EXPERTS,
    Anatomy,
    Chain,
    Given,
    arguments,
    built,
    chain_of,
    initial_values,
    keep_constants,
    read_settings,
    replaced,
    tied,
)
from forge_models.hf.causal_lm_lora import adapted_product, adapter_specs, adapter_widths, blocks_path
from forge_models.hf.config import Unsupported
from forge_models.torch_private import assert_async

STREAM: tuple[Dim, ...] = ("batch", "sequence", "embed")
UNLIMITED = 2**20
"""Tokens of a row for classes whose configuration names no limit."""


def causal_lm(config: str, settings: Mapping[str, Any], drawn: bool = False, packs: bool = False) -> "CausalLM":
    """Returns the model of a configuration, with parameters and persistent buffers on the meta device.

    Args:
        config: content of `config.json`.
        settings: keys that replace those of `config`.
        drawn: whether initial weights are drawn, so that every initial value must be one that a spec can express.
        packs: whether the class keeps the documents of a row apart, which a comparison has shown.

    Raises:
        Unsupported: transformers is not installed, does not know the model, or Forge cannot train this class; says why.
    """
    offer_experts()
    return mixed(built(read_settings(config, settings)), CausalLM, drawn, packs)


def mixed(module: Any, kind: "type[CausalLM]", drawn: bool, packs: bool) -> Any:
    """Returns a module of transformers with `kind` mixed into its class; see `causal_lm`.

    Raises:
        Unsupported: Forge cannot train the class; says why.
    """
    with torch.device("cpu"):  # callers build models on the meta device; constants have values
        keep_constants(module)
        anatomy = Anatomy.of(module)
        inits = initial_values(module)
        if drawn and (odd := {name: how for name, how in inits.items() if isinstance(how, str)}):
            name, how = next(iter(odd.items()))
            raise Unsupported(
                f"{type(module).__name__} initializes {name} in a way that Forge cannot draw for every layout ({how}), and "
                f"{len(odd) - 1} more; start from weights: set model.folder and leave out weights_from"
            )
        module.__class__ = _mixed(type(module), kind)
        module.prepare(anatomy, inits, packs)
    return module


def offer_experts() -> None:
    """Makes `run_experts` known to transformers.

    Raises:
        Unsupported: transformers is missing, or older than 5.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as cause:
        raise Unsupported(
            "a class of transformers needs version 5 of that library: pip install -U 'transformers>=5.20'"
        ) from cause
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, run_experts)


def run_experts(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Computes a layer of stacked experts of transformers through its dispatcher, which expert parallelism replaces.

    Args:
        experts: the module with the stacked weights.
        hidden: (N, embed) tokens.
        index: (N, top_k) experts of each token.
        weights: (N, top_k) weights of their outputs.
    """
    (layer,) = experts.__dict__["layer"]
    shape = hidden.shape
    flat, index = hidden.reshape(-1, shape[-1]), index.flatten(0, -2)
    weights = weights.flatten(0, -2).to(torch.promote_types(weights.dtype, hidden.dtype))  # sums are made in their dtype
    out = layer.dispatch(flat, index, weights, lambda tokens, counts: _feed_forward(experts, tokens, counts), experts.num_experts)
    return out.view(shape)


def _feed_forward(experts: Any, tokens: Tensor, counts: Tensor) -> Tensor:
    """(n, embed) tokens sorted by expert, with `counts` of each -> (n, embed); rows beyond the counts are undefined."""
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    enter, leave = getattr(experts, name), experts.down_proj
    product = grouped_products(
        tokens, counts, experts.num_experts, (*enter.shape[1:], *leave.shape[1:], *adapter_widths(experts))
    )
    normed = getattr(experts, "has_post_expert_norm", False)
    chosen = None
    if experts.has_bias or normed:  # a row of an expert adds to the gradients of vectors, and an undefined row must not
        ends, index = counts.cumsum(0), torch.arange(len(tokens), device=tokens.device)
        chosen = torch.searchsorted(ends, index, right=True)[:, None] == torch.arange(len(counts), device=tokens.device)

    def projected(rows: Tensor, weight: Tensor, name: str) -> Tensor:
        out = product(rows, weight.mT if experts.is_transposed else weight)
        rows = adapted_product(experts, name, product, rows, out)
        if chosen is None:
            return rows
        if experts.has_bias:  # the gradients of a product are sums in a fixed order, those of an index are not on a GPU
            rows = rows + chosen.to(rows.dtype) @ getattr(experts, f"{name}_bias")
        return rows.where(chosen.any(1, keepdim=True), 0)  # last: the gradient of an undefined row may be NaN, too

    x = projected(tokens, enter, name)
    x = experts._apply_gate(x) if experts.has_gate else experts.act_fn(x)
    x = projected(x, leave, "down_proj")
    return ContiguousGradient.apply(experts.post_expert_norm(x) if normed else x)


class WholeLogits:
    """Takes the place of a head for classes that compute their logits in another way: its hidden states are logits."""

    def loss(
        self, hidden: Tensor, labels: Tensor, z_loss: float = 0.0, smoothing: float = 0.0, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Head.loss`; `hidden` are logits (B, T, vocab)."""
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        counted = (labels != IGNORE).to(wide.dtype)
        log_partition = wide.logsumexp(-1)
        chosen = wide.gather(-1, labels.where(labels != IGNORE, 0).unsqueeze(-1)).squeeze(-1)
        nll, z = (log_partition - chosen) * counted, log_partition.square() * counted
        target = nll
        if smoothing:
            target = (1 - smoothing) * nll + smoothing * (log_partition - wide.mean(-1)) * counted
        each = target + z_loss * z
        return (each if weights is None else each * weights).sum(), nll.detach(), z.detach()


class PassingBlock(nn.Module):
    """Takes the place of a module that runs in another pipeline stage: returns its first argument.

    It keeps the plain attributes of the module, such as the kind of a layer, which a body reads. Modules in front of a stage
    return `stream` instead, the hidden states that the previous stage has sent: a body may compute positions and factors between
    its embeddings and its first block, which the first stage has already applied.
    """

    def __init__(self, original: nn.Module, returns_tuple: bool = False) -> None:
        super().__init__()
        self.stream: Tensor | None = None
        for name, value in vars(original).items():
            if isinstance(value, str | int | float) and not name.startswith("_"):
                setattr(self, name, value)
        self.returns_tuple = returns_tuple

    def forward(self, hidden: Any = None, *_: Any, **others: Any) -> Any:
        """Returns the hidden states."""
        hidden = others.get("hidden_states") if hidden is None else hidden
        hidden = hidden if self.stream is None else self.stream
        return (hidden,) if self.returns_tuple else hidden


class TokenHistory(KVCache):
    """A cache that keeps tokens instead of keys and values: each forward computes the whole row again.

    That is slow for long rows and right for every class, whatever state its layers have.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device) -> None:
        super().__init__((), batch, capacity, device)
        self.tokens = torch.zeros(batch, capacity, dtype=torch.int64, device=device)

    def extended(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Stores tokens (B, T); returns all tokens of the rows so far (B, extent)."""
        slots = self.advance(positions, x.shape[1])
        self.tokens.scatter_(1, slots, x)
        return self.tokens[:, : self.extent]


@dataclass(frozen=True)
class RowLimits:
    """Sizes that generation reads as `shape` of a model."""

    vocab_size: int
    max_length: int


class CausalLM(nn.Module):
    """Mixed into a class of transformers: specs, a loss in parts, and the arguments that Forge passes.

    Attributes:
        anatomy: paths of the parts.
        inits: initial values by name.
        adapted: whether this is the frozen base of an adapter.
    """

    inputs: ClassVar[frozenset[str]] = frozenset()
    anatomy: Anatomy
    inits: Mapping[str, Init | str]
    config: Any
    original: ClassVar[type[nn.Module]]
    """The class of transformers."""

    def prepare(self, anatomy: Anatomy, inits: Mapping[str, Init | str], packs: bool) -> None:
        """Sets what was found out about the class, and puts in Forge's output layer and dispatchers."""
        self.anatomy, self.inits, self.packs = anatomy, inits, packs
        self.constants_on = torch.device("cpu")
        self.left_out: frozenset[str] = frozenset()
        self.chain: Chain | None = None
        self.no_stages, self.adapted = "", False
        if anatomy.head:
            head: Any = self.get_submodule(anatomy.head)
            head.__class__ = Head
            head.core, head.soft_cap, head.multiplier = ChunkedCrossEntropy(), anatomy.soft_cap, anatomy.scale
        for path in self.stacks():
            layer: Any = self.get_submodule(path.rpartition(".")[0])
            dispatch: ExpertDispatcher = LocalDispatch()
            layer.dispatch = dispatch
            self.get_submodule(path).__dict__["layer"] = (layer,)

    def stacks(self) -> list[str]:
        """Returns the paths of stacked experts that transformers can run with another function."""
        return [path for path, part in self.named_modules() if hasattr(part, "has_gate") and hasattr(part, "down_proj")]

    def targeted(self, lora: LoRAConfig, paths: Sequence[str]) -> tuple[str, ...]:
        """Returns those of `paths`, of layers that can have an adapter, that the targets of `lora` name.

        Raises:
            ValueError: a target names none.
        """
        return lora.matched(paths, {path: blocks_path(self.anatomy.blocks, path) for path in paths})

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
        objective: Objective | None = None,
        cache: TokenHistory | None = None,
        at: Tensor | None = None,
    ) -> Any:
        """Returns logits (B, T, vocab), with an objective its `LossTerms`, without a head hidden states (B, T, width).

        Args:
            x: (B, T) int64 tokens, or hidden states (B, T, width) of the previous pipeline stage.
            positions: (B, T) position of each token in its document; None: 0 .. T - 1.
            documents: (B, T) document of each token, to which attention is limited; None: each row is one document.
            labels: (B, T) int64, already shifted; required by an objective.
            objective: the loss to minimize.
            cache: earlier tokens of the rows; extended by this call.
            at: (B,) index of one token per row; if given, only its logits are returned, (B, 1, vocab).
        """
        if cache is not None:
            x, places, positions = cache.extended(x, positions), cache.slots, None
        else:
            places = None
        if at is not None:
            places = at[:, None] if places is None else places.gather(1, at[:, None])
        if self.constants_on != x.device:
            self.move_constants(x.device)
        body: Any = self.get_submodule(self.anatomy.body) if self.anatomy.body else None
        takes = arguments(type(self).original if body is None else type(body))
        given: dict[str, Any] = {"inputs_embeds" if x.is_floating_point() else "input_ids": x}
        if documents is not None and self.packs:
            if "position_ids" not in takes:
                raise ValueError(f"{type(self).__name__} takes no positions, so rows cannot have several documents")
            given["position_ids"] = _places(documents)
        elif documents is not None:
            self.refuse_several(documents)
        elif positions is not None and "position_ids" in takes:
            given["position_ids"] = positions.expand(x.shape[:2])
        if "use_cache" in takes:
            given["use_cache"] = False
        if body is None:
            return self._loss_of(_at(super().forward(**given).logits, places), labels, objective)
        with self._entered(x):
            hidden = body(**given)[0]
        if self.left_out.intersection(self.anatomy.behind):
            return hidden
        if not self.anatomy.head:
            tokens = {key: given[key] for key in ("input_ids", "inputs_embeds") if key in given}
            with replaced((body, lambda *_, **__: Given(hidden))):
                return self._loss_of(_at(super().forward(**tokens).logits, places), labels, objective)
        hidden = _at(hidden, places)
        return self.get_submodule(self.anatomy.head)(hidden, labels, objective)

    @staticmethod
    def _loss_of(logits: Tensor, labels: Tensor | None, objective: Objective | None) -> Any:
        return logits if objective is None or labels is None else objective(WholeLogits(), logits, labels)

    def refuse_several(self, documents: Tensor) -> None:
        """Checks that each row is one document, for a class that does not keep several apart.

        Raises:
            ValueError: a row has several documents; on a GPU, which is not waited for, the device asserts it.
        """
        several = ((documents != documents[:, :1]) & (documents != PADDING)).any()
        message = f"a row has several documents, and {type(self).__name__} does not keep them apart; set data.packing = 'pad'"
        if documents.device.type != "cpu":
            assert_async(~several, message)
        elif several:
            raise ValueError(message)

    def new_cache(self, batch: int, capacity: int) -> TokenHistory:
        """Returns an empty cache for `batch` rows of up to `capacity` tokens."""
        return TokenHistory(batch, capacity, next(self.parameters()).device)

    @property
    def shape(self) -> RowLimits:
        """Sizes that generation reads."""
        text = self.config.get_text_config()
        return RowLimits(text.vocab_size, getattr(text, "max_position_embeddings", None) or UNLIMITED)

    cache_limit: ClassVar[None] = None

    @contextmanager
    def _entered(self, x: Tensor) -> Iterator[None]:
        """Context in which modules in front of this stage return `x`, the hidden states of the previous stage."""
        ahead: list[Any] = []
        if x.is_floating_point():
            here = next((index for index, path in enumerate(self.anatomy.blocks) if path not in self.left_out), None)
            before = self.anatomy.blocks if here is None else self.anatomy.blocks[:here]
            ahead = [self.get_submodule(path) for path in (*self._chain().entry, *before) if path in self.left_out]
        for part in ahead:
            part.stream = x
        try:
            yield
        finally:
            for part in ahead:
                part.stream = None

    def move_constants(self, device: torch.device) -> None:
        """Moves tensors that are neither parameters nor buffers to a device."""
        for part in self.modules():
            for name, value in vars(part).items():
                if isinstance(value, Tensor):
                    part.__dict__[name] = value.to(device)
        self.constants_on = device

    def leave_out(self, path: str) -> None:
        """Removes a module that runs in another pipeline stage; the names of other modules stay."""
        if path in self.anatomy.behind:
            above, _, name = path.rpartition(".")
            setattr(self.get_submodule(above), name, None)
        else:
            above, _, name = path.rpartition(".")
            returns_tuple = path in self.anatomy.blocks and self._chain().returns_tuple
            self.get_submodule(above)._modules[name] = PassingBlock(self.get_submodule(path), returns_tuple)
        self.left_out |= {path}

    def _chain(self) -> Chain:
        if self.chain is None:
            self.chain = chain_of(self)
        return self.chain

    def specs(self) -> Specs:
        """Returns the specs from which strategies work."""
        anatomy = self.anatomy
        ties = tied(self)
        stacked = {f"{path}.{name}" for path in self.stacks() for name, _ in self.get_submodule(path).named_parameters()}
        tensors = {
            name: self._spec(name, tensor, name in stacked) for name, tensor in (*self.named_parameters(), *self.named_buffers())
        }
        own = adapter_specs(self) if self.adapted else {}
        tensors |= own
        modules = {
            anatomy.embed: ModuleSpec((("batch", "sequence"),), (STREAM,)),
            anatomy.head: ModuleSpec((STREAM,), (("batch", "sequence", "vocab"),)),
        }
        modules.pop("", None)
        here = [path for path in anatomy.blocks if path not in self.left_out]
        entry, leaving = self._ends()
        return Specs(
            tensors=tensors,
            modules={path: spec for path, spec in modules.items() if path not in self.left_out},
            blocks=tuple(here),
            units={"embed": anatomy.width},
            ties=ties,
            entry=tuple(path for path in entry if path not in self.left_out),
            exit=tuple(path for path in leaving if path not in self.left_out),
            tp_plan=self._tp_styles(),
            whole_rows=("its class of transformers attends over whole rows",),
            whole_stream=("its class of transformers computes on whole sequences",),
            base=frozenset(tensors) - set(own) if self.adapted else frozenset(),
        )

    def _tp_styles(self) -> dict[str, str]:
        """Returns the styles of linear layers under tensor parallelism that the class comes with, without embeddings and head."""
        plan = getattr(self, "_tp_plan", None) or {}
        own = {self.anatomy.embed, self.anatomy.head}
        return {pattern: style for pattern, style in plan.items() if pattern not in own}

    def _ends(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the modules before and behind the blocks; empty if a pipeline cannot split the class."""
        try:
            chain = self._chain()
        except Unsupported as cause:
            self.no_stages = str(cause)
            return (), ()
        return chain.entry, (*chain.exit, *self.anatomy.behind)

    def _spec(self, name: str, tensor: Tensor, stacked: bool) -> TensorSpec:
        path, _, slot = name.rpartition(".")
        init = self.inits.get(name, "nothing")
        init = init if isinstance(init, Init) else Init("zeros")
        if path == self.anatomy.embed and path and slot == "weight":
            return TensorSpec(("vocab", "embed"), init, "embedding")
        if path == self.anatomy.head and path:
            return TensorSpec(("vocab", "embed"), init, "head")
        if stacked:
            return TensorSpec(("expert", *(None,) * (tensor.dim() - 1)), init, "matrix" if tensor.dim() == 3 else "vector", True)
        group: Group = "matrix" if tensor.dim() == 2 else "vector"
        owner = type(self.get_submodule(path)).__name__
        if group == "matrix" and isinstance(self.get_submodule(path), nn.Embedding):
            group = "embedding"
        elif group == "matrix" and "Router" in owner:
            group = "router"
        return TensorSpec((None,) * tensor.dim(), init, group)


def _at(values: Tensor, places: Tensor | None) -> Tensor:
    """(B, T, width) -> (B, n, width), the vectors at `places` (B, n); None: all of them."""
    return values if places is None else values.gather(1, places.unsqueeze(-1).expand(*places.shape, values.shape[-1]))


def _places(documents: Tensor) -> Tensor:
    """Returns the position of each token in its document; documents (B, T) lie one after the other."""
    index = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - index.where(first, 0).cummax(1).values


@cache
def _mixed(original: type[nn.Module], kind: type[CausalLM]) -> type[nn.Module]:
    return type(original.__name__, (kind, original), {"original": original})
