"""The decoder module: embedding, blocks, norm, head. It contains no parallel code."""

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forge_core.batch import IGNORE, PADDING, MTPTargets
from forge_core.errors import ForgeError
from forge_core.protocols.model import LossTerms, Objective
from forge_core.specs import Dim, Init, ModuleSpec, Specs, TensorSpec
from forge_models.blocks.attention import chunk_numbers
from forge_models.blocks.block import Block, MTPModules
from forge_models.blocks.cache import KVCache
from forge_models.blocks.head import Head
from forge_models.blocks.layer_inputs import LayerInputs
from forge_models.blocks.layers import Embedding
from forge_models.blocks.lora import adapter_names
from forge_models.blocks.moe.layer import observe_all
from forge_models.blocks.positions import LearnedPositions
from forge_models.blocks.rope import Rotary, Rotation
from forge_models.blocks.streams import StreamWeights
from forge_models.inner_values import scope, tap
from forge_models.shape import DecoderShape

TABLE = "embed.weight"
HEAD = "head.weight"
"""Name of a tied head, whose tensor is that of the embedding."""
MTP_TABLE = "mtp.embed.weight"
"""Name of the embedding in the MTP modules."""
COMPUTING = (".router.bias", ".router.table", ".scalar")
"""Suffixes of the names of buffers that are part of what a trained model computes."""


class Decoder(nn.Module):
    """A decoder of a given shape.

    A block's attention is called with (x, rotation, attention_mask, cache). The decoder reads five optional attributes of it:
    `core` (an `AttentionCore` or `RecurrentCore`, the seam where strategies enter; it prepares `attention_mask`, which is None
    without a core), `window` (passed to the core; None by default), `chunk` (None by default; otherwise the core is told that
    documents end at the borders of chunks), `mask_key` (layers with an equal one share what the core prepares; the window by
    default) and `rotary` (its rotary embedding; by default that of the model over the whole head).

    A factory (shape, layer) -> module builds blocks, which are called like `Block`; `reads` of a block names the further inputs
    that it receives (`token_mask`, `tokens`, and those that a subclass adds in `enter`).

    `embed`, `positions`, `layer_inputs`, `merge`, `norm`, `head` and `mtp` may be None and `blocks` may have fewer entries (under
    their own names): a pipeline part is this module without the rest. The first part takes tokens, later ones hidden states.
    """

    inputs: ClassVar[frozenset[str]] = frozenset()
    """Names of a batch's extras that the forward takes."""
    treats_blocks_alike: ClassVar[bool] = True
    """See `forge_core.protocols.model.Model`. A subclass declares it anew."""

    def __init__(self, shape: DecoderShape, block: Callable[[DecoderShape, int], nn.Module] = Block) -> None:
        super().__init__()
        self.shape = shape
        self.adapted = False  # whether this is the frozen base of an adapter (`forge_models.blocks.lora`)
        self.tuned: tuple[str, ...] = ()  # names of parameters that are trained whole beside an adapter
        norm: Any = shape.norm
        embed = Embedding(shape.vocab_size, shape.dim)
        head = (
            Head(shape.dim, shape.labels, self._head_std())
            if shape.labels
            else Head(shape.dim, shape.vocab_size, self._head_std(), shape.soft_cap, shape.logit_multiplier)
        )
        if shape.tied_embeddings:
            head.weight = embed.weight  # type: ignore[assignment]
        self.embed: Embedding | None = embed
        self.positions: LearnedPositions | None = None
        if shape.learned_positions:
            self.positions = LearnedPositions(shape.max_length, shape.dim, shape.init_std)
        inputs = shape.layer_inputs
        self.layer_inputs: LayerInputs | None = None if inputs is None else LayerInputs(inputs, shape.context(0))
        self.blocks = nn.ModuleDict({str(layer): block(shape, layer) for layer in range(shape.layers)})
        self.merge: StreamWeights | None = None if shape.streams is None else StreamWeights(shape)
        self.norm: nn.Module | None = norm.build(shape.dim)
        self.head: Head | None = head
        self.mtp: MTPModules | None = MTPModules(shape, embed) if shape.mtp_depth else None

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        document_starts: Tensor | None = None,
        labels: Tensor | None = None,
        objective: Objective | None = None,
        cache: KVCache | None = None,
        at: Tensor | None = None,
        tokens: Tensor | None = None,
        mtp_targets: MTPTargets | None = None,
        token_mask: Tensor | None = None,
        **extras: Tensor,
    ) -> Tensor | LossTerms:
        """Returns logits (B, T, vocab), with an objective its `LossTerms`, without a head hidden states (B, T, dim), or
        (B, T, streams, dim) with several residual streams. A classifier has logits of labels (B, T, labels), of which those of
        the last token of a text count.

        Args:
            x: (B, T) int64 tokens, or hidden states of the previous part.
            positions: (B, T) position of each token in its document; None: 0 .. T - 1, or the positions after those in the cache.
            documents: (B, T) document of each token, to which attention is limited; None: each row is one document. `PADDING`
                marks a position without a token, which no expert processes.
            document_starts: (n,) int32 starts of documents, as in `Batch`; spares attention on a GPU a synchronization.
            labels: (B, T) int64, already shifted; required by an objective.
            objective: the loss to minimize.
            cache: keys and values of earlier tokens; extended by this call.
            at: (B,) index of one token per row; if given, only its logits are returned, (B, 1, vocab).
            tokens: (B, T) int64, for a later part whose routers use token ids; a part with the embedding has them in `x`.
            mtp_targets: tokens and labels of the MTP modules, whose losses are added; with labels and an objective only.
            token_mask: (B, T) bool, False for a position without a token, which no expert processes; None: derived from
                `documents`, or all True. Causal attention ignores it, so padding must come after the tokens of its row.
            extras: further inputs of the batch, named in `inputs`; a text decoder has none.

        Raises:
            ValueError: inputs do not go together, or are longer than `max_length`.
        """
        self._check(x, documents, labels, objective, cache, mtp_targets, extras)
        depths = {} if mtp_targets is None or self.mtp is None else dict(self.mtp.depths.items())
        mtp_blocks = [depth.block for depth in depths.values()]
        if token_mask is None and documents is not None:
            token_mask = documents != PADDING
        x, rotations, masks = self._stream(
            x, positions, documents, document_starts, token_mask, cache, tokens, mtp_blocks, extras
        )
        stream = x
        if at is not None:
            x = x[torch.arange(x.shape[0], device=x.device), at].unsqueeze(1)
        with scope("", self):
            if self.merge is not None:
                x = self.merge(x)
            if self.norm is not None:
                x = tap("norm", self.norm(x))
            if self.head is None:
                return x
            terms = self.head(x, labels, objective)
        if isinstance(terms, Tensor):
            with scope("", self):
                return tap("logits", terms)
        if mtp_targets is None or not depths:
            return terms
        return self._add_mtp(terms, stream, mtp_targets, rotations, masks, token_mask, objective)

    def _stream(
        self,
        x: Tensor,
        positions: Tensor | None,
        documents: Tensor | None,
        starts: Tensor | None,
        token_mask: Tensor | None,
        cache: KVCache | None,
        tokens: Tensor | None,
        mtp_blocks: list[Any],
        extras: Mapping[str, Tensor],
    ) -> tuple[Tensor, dict[Rotary, Rotation], dict[Any, Any]]:
        """Returns the residual stream after the last block, rotations, and attention masks (also for `mtp_blocks`)."""
        # Hidden states of an earlier part may be split along the sequence; positions never are.
        length = x.shape[1] if self.embed is not None or positions is None else positions.shape[-1]
        if cache is not None:
            positions = cache.advance(positions, length)
            if self.cache_limit is not None and cache.extent > self.cache_limit:
                raise ValueError(
                    f"dynamic rope scaling does not support a cache of more than original_max_length = {self.cache_limit} "
                    "tokens, because cached keys have another scaling; use fewer tokens, or yarn or linear scaling"
                )
        elif positions is None:
            positions = torch.arange(length, device=x.device)
        blocks = [*self.blocks.values(), *mtp_blocks]
        rotations = {rotary: rotary(positions, documents) for rotary in {self._rotary(block) for block in blocks}}
        if self.embed is not None:
            with scope("", self):
                tokens, x = x, tap("embeddings", self._embedded(self.embed, x))
        x, shared = self.enter(x, tokens, documents, extras, cache)
        if self.layer_inputs is not None and tokens is not None:
            shared["layer_inputs"] = self.layer_inputs(x, tokens)
        if self.positions is not None:
            x = self.positions(x, positions if positions.dim() == 2 else positions.unsqueeze(0))
        if self.embed is not None and self.shape.streams is not None:
            x = x.unsqueeze(2).expand(-1, -1, self.shape.streams.count, -1).contiguous()
        seen = documents
        if documents is None and token_mask is not None and not self.shape.causal:
            seen = token_mask.int() - 1  # tokens must not see the padding behind them
        masks = self._attention_masks(blocks, seen, starts, length, x, cache, positions)
        shared = {"token_mask": token_mask, "tokens": tokens, "documents": documents, **shared}
        return self._run_blocks(x, rotations, masks, cache, shared), rotations, masks

    def enter(
        self,
        x: Tensor,
        tokens: Tensor | None,
        documents: Tensor | None,
        extras: Mapping[str, Tensor],
        cache: KVCache | None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Returns the input of this part's first block, and further inputs of blocks by name; a hook for subclasses.

        `x` (B, T, dim) is the embedded input, or the output of the previous part; `tokens` (B, T) are ids, if known; the other
        arguments are as in `forward`.
        """
        del tokens, documents, extras, cache
        return x, {}

    def hidden_states(self, tokens: Tensor, cache: KVCache, positions: Tensor | None = None) -> Tensor:
        """Returns the residual stream (B, T, dim) after the last block of a whole decoder: the input of `norm` and `head`, and of
        `draft`."""
        self._check(tokens, None, None, None, cache, None, {})
        return self._stream(tokens, positions, None, None, None, cache, None, [], {})[0]

    def draft(
        self, depth: str, x: Tensor, tokens: Tensor, cache: KVCache, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Runs one MTP module with a cache; returns its residual stream, and the hidden states for the head.

        Args:
            depth: name of the module; "1" predicts the token after the next one.
            x: (B, T, dim) residual stream of the previous module, for "1" that of the last block.
            tokens: (B, T) tokens shifted left by the depth of the MTP module.
            cache: cache of this module's layer only, under its name.
            positions: (B, T); None: the positions after those in the cache.
        """
        assert self.embed is not None
        assert self.mtp is not None
        module: Any = self.mtp.depths[depth]
        positions = cache.advance(positions, tokens.shape[1])
        rotation = self._rotary(module.block)(positions)
        attention_mask = self._attention_masks([module.block], None, None, tokens.shape[1], x, cache).get(_mask_key(module.block))
        inputs = (self._embedded(self.embed, tokens), rotation, attention_mask, cache.layers[depth], None, tokens)
        with scope(f"mtp.depths.{depth}.", self):
            x, hidden, *_ = module(x, *inputs)
        return x, hidden

    def _add_mtp(
        self,
        terms: LossTerms,
        x: Tensor,
        mtp_targets: MTPTargets,
        rotations: dict[Rotary, Rotation],
        masks: dict[Any, Any],
        token_mask: Tensor | None,
        objective: Objective | None,
    ) -> LossTerms:
        """Returns `terms` with the gradients of the MTP losses, which are computed from the residual stream `x`."""
        mtp, head = self.mtp, self.head
        assert mtp is not None
        assert head is not None
        mtp_terms = []
        depth: Any
        for k, (name, depth) in enumerate(mtp.depths.items()):
            token, label = mtp_targets.tokens[..., k], mtp_targets.labels[..., k]
            here = token != IGNORE if token_mask is None else token_mask & (token != IGNORE)
            token = token.clamp(min=0)  # positions without a token have no label, and positions with a label do not see them
            inputs = (self._embedded(mtp.embed, token), rotations[self._rotary(depth.block)], masks.get(_mask_key(depth.block)))
            known = {"token_mask": here, "tokens": token}
            with scope(f"mtp.depths.{name}.", self):
                x, hidden, *observed = depth(x, *inputs, **{key: known[key] for key in depth.block.reads})
            if observed:
                depth.block.observe(*observed)
            mtp_terms.append(head(hidden, label, objective))
        return mtp.add_gradient(terms, mtp_terms)

    def _embedded(self, table: Embedding, tokens: Tensor) -> Tensor:
        x = table(tokens)
        if self.shape.embed_multiplier == 1:
            return x
        return x * torch.tensor(self.shape.embed_multiplier, dtype=x.dtype)

    def at_step(self, step: int, steps: int) -> None:
        """Sets the weight of the MTP losses for optimizer step `step` of a run of `steps`."""
        if self.mtp is not None:
            self.mtp.at_step(step, steps)

    def _run_blocks(
        self,
        x: Tensor,
        rotations: dict[Rotary, Rotation],
        masks: dict[Any, Any],
        cache: KVCache | None,
        shared: dict[str, Any],
    ) -> Tensor:
        observed: list[tuple[Any, Tensor]] = []
        given: dict[str, Any] = {}
        block: Any
        for name, block in self.blocks.items():
            rotation = rotations[self._rotary(block)]
            further = {key: shared.get(key) for key in getattr(block, "reads", ())}
            if (kind := getattr(block, "takes", None)) is not None:
                if kind not in given:
                    raise ValueError(
                        f"model.attention.shared_kv_layers: block {name} takes keys and values of a block on another stage of "
                        "the pipeline; set parallel.pp = 1"
                    )
                further["key_values"] = given[kind]
            if "layer_input" in further:
                if "layer_inputs" not in shared:
                    raise ValueError("model.layer_inputs are made on the first stage of a pipeline only; set parallel.pp = 1")
                further["layer_input"] = shared["layer_inputs"][:, :, int(name)]
            with scope(f"blocks.{name}.", self):
                layer_cache = None if cache is None else cache.layers[name]
                x = block(x, rotation, masks.get(_mask_key(block)), layer_cache, **further)
                if not isinstance(x, tuple):
                    continue
                x, router_stats, *attention_stats = x
                if (kind := getattr(block, "gives", None)) is not None:
                    given[kind] = attention_stats.pop()
            if attention_stats:
                block.observe(None, *attention_stats)
            if router_stats is not None:
                observed += [(block.mlp, router_stats)] if isinstance(router_stats, Tensor) else block.observed(router_stats)
        if observed:
            x = observe_all(x, observed)  # outside blocks, where recomputation does not repeat it
        with scope("", self):
            return tap("residual", x) if self.head is not None else x

    def _attention_masks(
        self,
        blocks: list[Any],
        documents: Tensor | None,
        starts: Tensor | None,
        length: int,
        x: Tensor,
        cache: KVCache | None,
        positions: Tensor | None = None,
    ) -> dict[Any, Any]:
        """Returns, by window or other key, what attention cores share for this batch; prepared once and used by every layer.
        Without `positions`, layers with chunks need a cache."""
        masks: dict[Any, Any] = {}
        for block in blocks:
            attention, key = _attention(block), _mask_key(block)
            if key in masks:
                continue
            core, window, chunk = (getattr(attention, name, None) for name in ("core", "window", "chunk"))
            if core is None:
                continue
            within, known = documents, starts
            if chunk is not None and chunk < self.shape.max_length and cache is None:
                assert positions is not None
                within, known = chunk_numbers(documents, positions, chunk, self.shape.max_length, x.shape[0]), None
            if cache is None and hasattr(core, "prepare_packed"):
                masks[key] = core.prepare_packed(within, known, length, window, x)
            elif cache is None:
                masks[key] = core.prepare(within, length, window, x.device)
            elif hasattr(core, "prepare_cached"):
                masks[key] = core.prepare_cached(cache.slots, cache.extent, window if chunk is None else chunk)
            else:
                raise ValueError(f"attention core {type(core).__name__} does not support a cache; generate without one")
        return masks

    def _rotary(self, block: nn.Module) -> Rotary:
        rotary = getattr(_attention(block), "rotary", None)
        return Rotary(self.shape.head_dim, self.shape.rope) if rotary is None else rotary

    @property
    def cache_limit(self) -> int | None:
        """Maximum number of tokens that a cache may hold; None: its capacity.

        Under dynamic rope scaling, a longer sequence rotates its earlier tokens differently, so cached keys would be wrong.
        """
        ropes = [self._rotary(block).rope for block in self.blocks.values()]
        return min((rope.original_max_length or 0 for rope in ropes if rope.scaling == "dynamic"), default=None)

    def _check(
        self,
        x: Tensor,
        documents: Tensor | None,
        labels: Tensor | None,
        objective: Objective | None,
        cache: KVCache | None,
        mtp_targets: MTPTargets | None,
        extras: dict[str, Tensor],
    ) -> None:
        if self.shape.moe is not None and self.shape.moe.losses.pooled and (self.embed is None or self.head is None):
            raise ValueError("model.moe.losses.pooled needs all layers, but a pipeline stage has only some of them; set it to 0")
        if unknown := extras.keys() - self.inputs:
            known = f"; its inputs are {', '.join(sorted(self.inputs))}" if self.inputs else ""
            raise ValueError(f"this model does not take {', '.join(sorted(unknown))}{known}")
        if x.shape[1] > self.shape.max_length:
            raise ValueError(
                f"a row has {x.shape[1]} tokens, more than max_length {self.shape.max_length}; shorten it, or raise max_length"
            )
        if objective is not None and labels is None:
            raise ValueError("an objective needs labels; pass both, or neither")
        if labels is not None and objective is None:
            raise ValueError("labels need an objective; pass one, or leave labels out to get logits")
        if mtp_targets is not None and (objective is None or self.mtp is None):
            raise ValueError("mtp_targets need an objective and a model with [model.mtp]; leave them out, or give both")
        if cache is not None and not self.shape.causal:
            raise ValueError("model.attention.causal = false: a cache holds earlier tokens only; call without one")
        if cache is not None and documents is not None:
            raise ValueError("a cache holds one document per row; call without documents")

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Returns an empty cache for `batch` rows of up to `capacity` tokens, on the device of the parameters.

        Raises:
            ForgeError: the model is a classifier, or bidirectional.
        """
        if self.shape.labels:
            raise ForgeError(
                f"the model is a classifier of {self.shape.labels} labels (model.labels) and predicts no next token; use "
                "`forge-train evaluate` on labeled texts, or generate with the model that it started from"
            )
        if not self.shape.causal:
            raise ForgeError(
                "model.attention.causal = false: each token sees the tokens after it, so no cache of earlier tokens can replace "
                "them and text cannot be generated token by token; use a causal model"
            )
        return KVCache(self.blocks, batch, capacity, next(self.parameters()).device)

    def specs(self) -> Specs:
        """Returns the specs from which strategies work."""
        shape = self.shape
        stream: tuple[Dim, ...] = ("batch", "sequence", "embed")
        tensors: dict[str, TensorSpec] = {}
        modules: dict[str, ModuleSpec] = {}
        table = TensorSpec(("vocab", "embed"), Init("normal", self._embed_std()), "embedding")
        for path in ("embed", "mtp.embed"):
            if self._has(path):
                tensors[f"{path}.weight"] = table
                modules[path] = ModuleSpec((("batch", "sequence"),), (stream,))
        if self.norm is not None:
            modules["norm"] = ModuleSpec((stream,), (stream,))
        for path, module in self.named_modules():
            for name, spec in getattr(module, "tensor_specs", dict)().items():
                tensors[_join(path, name)] = spec
            for name, layout in getattr(module, "module_specs", dict)().items():
                modules[_join(path, name)] = layout
        copies = [MTP_TABLE] if self._has("mtp") else []
        copies += [HEAD] if shape.tied_embeddings and self._has("head") else []
        for name in copies if self.embed is not None else ():
            del tensors[name]
        depths = () if self.mtp is None else tuple(f"mtp.depths.{name}" for name in self.mtp.depths)
        return Specs(
            tensors=tensors,
            modules=modules,
            blocks=(*(f"blocks.{name}" for name in self.blocks), *depths),
            units=shape.units,
            ties=dict.fromkeys(copies, TABLE),
            entry=tuple(name for name in ("embed", "positions", "layer_inputs") if self._has(name)),
            exit=tuple(name for name in ("merge", "norm", "head", "mtp") if self._has(name)),
            whole_rows=shape.whole_rows,
            whole_stream=shape.whole_stream,
            mtp_depth=len(depths),
            streams=None if shape.streams is None else shape.streams.count,
            needs=("tokens", "document_starts", "token_mask"),
            base=self._base(tensors),
        )

    def _base(self, tensors: Mapping[str, TensorSpec]) -> frozenset[str]:
        """Returns the tensors that belong to the base of an adapter: all, apart from the adapter, from what is trained beside it,
        and from buffers that count what a run does. Empty without an adapter."""
        if not self.adapted:
            return frozenset()
        counters = {name for name, _ in self.named_buffers() if not name.endswith(COMPUTING)}
        return frozenset(tensors) - counters - set(adapter_names(self)) - set(self.tuned)

    def _has(self, path: str) -> bool:
        module: Any = self
        for name in path.split("."):
            module = getattr(module, name, None)
        return module is not None

    def _head_std(self) -> float:
        """Returns at most 1 / (2 sqrt(dim)): normed hidden states have length sqrt(dim), so initial logits have variance <= 1/4
        and the loss exceeds ln vocab_size by at most 1/8, for every width."""
        return min(self.shape.init_std, 0.5 / sqrt(self.shape.dim))

    def _embed_std(self) -> float:
        """Returns at most 2 / dim for a tied embedding, because it also scores a token against itself, with up to dim * std."""
        return min(self.shape.init_std, 2 / self.shape.dim) if self.shape.tied_embeddings else self.shape.init_std


def _attention(block: Any) -> Any:
    return block.attention


def _mask_key(block: nn.Module) -> Any:
    """Returns what blocks have in common that share what a core prepares: by default the window."""
    attention = _attention(block)
    return getattr(attention, "mask_key", getattr(attention, "window", None))


def _join(path: str, name: str) -> str:
    return ".".join(part for part in (path, name) if part)
