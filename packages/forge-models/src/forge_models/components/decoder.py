"""The decoder, dense or with experts, chosen by `[model] name = "decoder"`, and its table `[model.mtp]`."""

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Gt

from forge_core.component import FREE, IDENTITY, Component, Place, Slot
from forge_core.features import Feature
from forge_models.base_format import TUNED
from forge_models.components.attentions import GQA
from forge_models.components.experts import MoEConfig
from forge_models.components.layers import RMSNormConfig, SwiGLU
from forge_models.components.lora import LoRAConfig
from forge_models.shape import LAYOUT_DEPENDENT, DecoderShape, LayerInputsShape, NormPlacement, Rope, Streams

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from forge_models import decoder


@dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """MTP modules: each predicts one token further ahead, from the hidden states of the previous module (DeepSeek-V3, 2024,
    section 2.2).

    They add weight / depth times the sum of their losses to the minimized loss. Evaluation and exports in the Hugging Face format
    leave them out.
    """

    key_class: ClassVar = IDENTITY

    depth: Annotated[int, Gt(0)] = 1
    """Number of modules: module k predicts the token k + 1 positions ahead, with a block like that of layer layers + k - 1."""
    weight: Annotated[float, Gt(0)] = 0.3
    """Weight of the mean of the modules' losses; each loss is a sum over its labels, divided by the number of next-token
    labels."""
    schedule: Annotated[Component | None, Slot("forge.schedules")] = None
    """Factor on `weight` over the run, such as { name = "multi_step", at = [0.68], factors = [0.333] }; 1 when absent."""


@dataclass(frozen=True, kw_only=True)
class LayerInputsConfig:
    """Per-layer embeddings: a second table has a small vector of each token for each layer, to which a projection of the embedded
    token is added; a gate in each block lets it into the stream (Gemma 3n, Gemma 4)."""

    key_class: ClassVar = IDENTITY

    dim: Annotated[int, Gt(0)] = 256
    """Width of the vector of one layer."""
    vocab_size: Annotated[int, Gt(1)] | None = None
    """Number of rows of the table, at least the model's `vocab_size`, which it is when absent."""


FFN_MULTIPLE = 64
"""The default feed-forward width is a multiple of this, so that it divides over ranks and tiles."""


MOST_ELEMENTS = 10**15
"""Maximum number of parameters: a thousand times the largest models, and far below the limit of 64-bit counts."""

USUAL = MappingProxyType({"layers": 100, "dim": 8192, "heads": 64, "head_dim": 128, "ffn_dim": 32768, "vocab_size": 131072})
"""Sizes of large models, to find the size that is out of proportion."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Component):
    """Decoder: embedding, blocks of attention and feed-forward layer, norm, head; the defaults give the Llama architecture."""

    key_class: ClassVar = IDENTITY
    renamed: ClassVar = MappingProxyType({"prediction": "mtp"})

    dim: Annotated[int, Gt(0)] = 512
    """Width of the residual stream."""
    layers: Annotated[int, Gt(0)] = 8
    """Number of blocks."""
    heads: Annotated[int, Gt(0)] = 8
    """Number of query heads."""
    kv_heads: Annotated[int, Gt(0)] | None = None
    """Number of key and value heads, a divisor of `heads`; follows `heads` when absent."""
    head_dim: Annotated[int, Gt(0)] | None = None
    """Width of one head, even; dim / heads when absent."""
    ffn_dim: Annotated[int, Gt(0)] | None = None
    """Hidden width of the feed-forward layer; when absent, 8/3 * dim rounded up to a multiple of 64, or 4 * dim for an MLP with
    two matrices."""
    vocab_size: Annotated[int, Gt(1)] = 32768
    """Number of token ids."""
    max_length: Annotated[int, Gt(0), FREE] = 2048
    """Maximum sequence length in tokens."""
    rope: Rope = field(default_factory=Rope)
    """Rotary positions."""
    tied_embeddings: Annotated[bool, Feature("tied", when=True, plane="model")] = False
    """Whether the head shares the embedding table."""
    learned_positions: bool = False
    """Whether a learned vector of each position in a document, of which there are `max_length`, is added to the embedded token
    (GPT-2). Attention has rotary positions as well, unless `attention.nope_every` is 1."""
    soft_cap: Annotated[float, Gt(0)] | None = None
    """Logits become soft_cap * tanh(logits / soft_cap); no cap when absent."""
    norm_placement: NormPlacement = "pre"
    """Norms before each part of a block (Llama), after it (OLMo-2), or both (Gemma-2); always inside the residual branch."""
    parallel_residual: bool = False
    """Whether attention and feed-forward layer of a block both read the stream that enters it, and are added together
    (GPT-J, GPT-NeoX); otherwise the feed-forward layer reads the stream after attention."""
    shared_norm: bool = False
    """Whether the feed-forward layer reads what the norm before attention makes, so that a block with `parallel_residual` has one
    norm before its parts instead of two (GPT-J, Cohere)."""
    attention_only: tuple[Annotated[int, Ge(0)], ...] = ()
    """Indices, from 0, of blocks that have no feed-forward layer behind their attention or recurrent layer (Nemotron-H)."""
    layer_scalar: bool = False
    """Whether the stream that leaves a block is multiplied with a number of the block, which is stored with the weights but not
    trained: 1 in a new model (Gemma 4)."""
    streams: Annotated[Streams | None, Feature("streams", unless=None, plane="model")] = None
    """Several residual streams that each part of a block mixes; one, to which parts are added, when absent."""
    layer_inputs: Annotated[LayerInputsConfig | None, Feature("layer_inputs", unless=None, plane="model")] = None
    """Per-layer embeddings; none when absent. Not with a pipeline."""
    embed_multiplier: Annotated[float, Gt(0)] = 1.0
    """Factor on embedded tokens, rounded to the compute precision first (Gemma: sqrt(dim))."""
    residual_multiplier: Annotated[float, Gt(0)] = 1.0
    """Factor on the output that each part of a block adds to the residual stream."""
    logit_multiplier: Annotated[float, Gt(0)] = 1.0
    """Factor on logits, before their cap (Granite: 1 / logits_scaling)."""
    init_std: Annotated[float, Gt(0), FREE] = 0.02
    """Initial standard deviation of hidden matrices; output projections start with init_std / sqrt(2 * layers)."""
    attention: Annotated[Component, Slot("forge.attentions", default="gqa")] = Slot.unset()
    """Attention of every block."""
    mlp: Annotated[Component, Slot("forge.mlps", default="swiglu")] = Slot.unset()
    """Feed-forward layer of every block without experts; experts use its activation and gating."""
    moe: Annotated[MoEConfig | None, Feature("experts", unless=None, plane="model")] = None
    """Experts instead of feed-forward layers; the model is dense when absent."""
    norm: Annotated[Component, Slot("forge.norms", default="rmsnorm")] = Slot.unset()
    """Norm of each part of a block, and before the head."""
    mtp: Annotated[MTPConfig | None, Feature("mtp", unless=None, plane="model")] = None
    """Multi-token prediction in training; when absent, only the next token is predicted."""
    lora: Annotated[LoRAConfig | None, Feature("lora", unless=None, plane="model")] = None
    """Low-rank adapters; all other parameters are then a frozen base. When absent, all parameters are trained."""
    labels: Annotated[tuple[str, ...], Feature("classification", unless=(), plane="model")] = ()
    """Names of the labels of a classifier, in the order of their numbers. When absent, the model predicts tokens. A classifier
    has a head of labels instead of words, which objective `classification` trains: a new one, unless the weights that it starts
    from have one for these labels. `tied_embeddings`, `soft_cap` and `logit_multiplier` do not affect it."""
    from_hf: Annotated[str | None, FREE, Place] = None
    """Folder in the Hugging Face format whose weights the run starts from; keys that are absent here come from its
    config.json."""

    from_hf_ignore: tuple[str, ...] = ()
    """Keys of that config.json to ignore: unknown keys, or keys of features that are not implemented."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[DecoderConfig]":
        """Returns a small decoder, and variants with options that change the computation."""
        small = cls(dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=24, vocab_size=40, max_length=64)
        return (
            small,
            replace(small, tied_embeddings=True, soft_cap=3.0, norm_placement="sandwich", embed_multiplier=4.0),
            replace(small, moe=MoEConfig(experts=4, shared=1, first_dense=1, kernel="loop"), norm_placement="post"),
            replace(small, parallel_residual=True),
            replace(small, parallel_residual=True, shared_norm=True),
            replace(small, learned_positions=True, attention=GQA(nope_every=1)),
            replace(small, attention_only=(0,)),
            replace(small, layer_scalar=True),
            replace(small, streams=Streams(count=2, sinkhorn=3)),
            replace(small, layer_inputs=LayerInputsConfig(dim=6, vocab_size=44)),
            replace(small, layers=4, attention=GQA(shared_kv_layers=2, shared_kv_ffn_factor=2)),
            replace(small, mtp=MTPConfig(depth=2), logit_multiplier=0.25),
            replace(small, lora=LoRAConfig(rank=2)),
            replace(small, labels=("a", "b", "c"), tied_embeddings=True),
        )

    def __post_init__(self) -> None:
        if self.from_hf_ignore and self.from_hf is None:
            raise ValueError("from_hf_ignore needs from_hf; set from_hf, or remove from_hf_ignore")
        shape = self.shape
        self._check_size(shape)
        if self.heads % shape.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} must divide heads {self.heads}")
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"dim {self.dim} must be a multiple of heads {self.heads}, or head_dim must be given")
        if shape.head_dim % 2:
            source = "head_dim" if self.head_dim is not None else f"dim {self.dim} / heads {self.heads} = head_dim"
            raise ValueError(f"{source} {shape.head_dim} must be even, because rotary positions rotate pairs")
        self._check_norms(shape)
        self._check_streams(shape)
        for part in (shape.attention, shape.mlp):
            check: Any = getattr(part, "check", None)
            if check is not None:
                check(shape.context(0))
        if self.labels:
            self._check_labels()
        if shape.layer_inputs is not None:
            self._check_layer_inputs(shape, shape.layer_inputs)
        if self.mtp is not None and not shape.causal:
            raise ValueError(
                "attention.causal = false does not support [model.mtp], because a token already sees those that MTP modules "
                "predict; remove one"
            )
        if missing := [layer for layer in self.attention_only if layer >= self.layers]:
            raise ValueError(f"attention_only {missing} do not exist; the model has {self.layers} blocks, counted from 0")
        if shape.moe is not None:
            self._check_experts(shape)
        if self.lora is not None:
            self._check_lora(self.lora, shape)

    def _check_norms(self, shape: DecoderShape) -> None:
        if not self.shared_norm:
            return
        if not self.parallel_residual:
            raise ValueError("shared_norm needs parallel_residual = true, where both parts of a block read the same stream")
        if any(shape.norm_placement_at(layer) == "post" for layer in range(self.layers)):
            raise ValueError("shared_norm needs norms before the parts of a block; set norm_placement = 'pre' or 'sandwich'")

    def _check_streams(self, shape: DecoderShape) -> None:
        if self.streams is None:
            return
        if self.parallel_residual:
            raise ValueError(
                "streams does not support parallel_residual, because each part of a block mixes the streams in turn; remove one"
            )
        if self.mtp is not None:
            raise ValueError("streams does not support [model.mtp], whose modules read one residual stream; remove one")
        if self.layer_scalar:
            raise ValueError("streams does not support layer_scalar, a factor of one residual stream; remove one")
        if self.layer_inputs is not None:
            raise ValueError("streams does not support layer_inputs, which enter one residual stream; remove one")
        if getattr(shape.attention, "shared_kv_layers", 0):
            raise ValueError("streams is not proven with attention.shared_kv_layers; remove one")
        self.streams.resolved_norm_eps(shape.norm)

    def _check_layer_inputs(self, shape: DecoderShape, inputs: LayerInputsShape) -> None:
        if inputs.vocab_size < self.vocab_size:
            raise ValueError(f"layer_inputs.vocab_size {inputs.vocab_size} must be at least vocab_size {self.vocab_size}")
        if not isinstance(getattr(shape.mlp, "activation", None), str):
            raise ValueError(f"layer_inputs need the activation of the mlp, and {type(shape.mlp).__name__} has none of one input")
        if type(self) is not DecoderConfig:
            raise ValueError(f"layer_inputs are of text only, but this is a {type(self).__name__}; remove [model.layer_inputs]")

    def _check_lora(self, lora: LoRAConfig, shape: DecoderShape) -> None:
        if self.mtp is not None:
            raise ValueError("lora does not support [model.mtp], whose modules would be part of the frozen base; remove one")
        if lora.train and self.tied_embeddings:
            raise ValueError(
                f"lora.train = {list(lora.train)} does not support tied_embeddings, because embedding and head are one tensor; "
                "remove lora.train"
            )
        if shape.declares_matrices:
            hidden, experts = shape.matrices()
            lora.check([*hidden, *experts])
            lora.check_format(hidden | experts)

    @property
    def tuned(self) -> tuple[str, ...]:
        """Names of the parameters that are trained whole beside an adapter: of `lora.train`, and the head of a classifier."""
        named = () if self.lora is None else self.lora.tuned
        return tuple(dict.fromkeys((*named, TUNED["head"]))) if self.labels else named

    def _check_labels(self) -> None:
        if len(set(self.labels)) < len(self.labels) or len(self.labels) < 2 or "" in self.labels:
            raise ValueError(f"labels {list(self.labels)} must be at least two different names")
        if type(self) is not DecoderConfig:
            raise ValueError(f"labels make a classifier of text, but this is a {type(self).__name__}; remove them")
        if self.mtp is not None:
            raise ValueError("labels make a classifier, for which [model.mtp] has no tokens to predict; remove one")

    def _check_size(self, shape: DecoderShape) -> None:
        if (size := shape.elements) > MOST_ELEMENTS:
            asked = {name: getattr(self, name) or 0 for name in USUAL}
            name = max(USUAL, key=lambda name: asked[name] / USUAL[name])
            raise ValueError(f"{name} {asked[name]} gives {size:.1e} parameters; the limit is {MOST_ELEMENTS:.0e}")

    def _check_experts(self, shape: DecoderShape) -> None:
        moe, mlp = shape.moe, shape.mlp
        assert moe is not None
        if not any(shape.has_experts(layer) for layer in range(self.layers)):
            also = " and attention_only" if self.attention_only else ""
            raise ValueError(
                f"moe gives no layer experts: first_dense {moe.first_dense} and every {moe.every}{also} exclude all {self.layers}"
            )
        wider: Any = getattr(shape.attention, "ffn_factor_at", lambda *_: 1)
        if any(shape.has_experts(layer) and wider(layer, self.layers) != 1 for layer in range(self.layers)):
            raise ValueError("attention.shared_kv_ffn_factor has no effect on layers with experts; set it to 1, or remove moe")
        tables: tuple[int, ...] = getattr(moe.router, "hash_layers", ())
        if without := [layer for layer in tables if layer >= self.layers or not shape.has_experts(layer)]:
            raise ValueError(f"moe.router.hash_layers {without} are no blocks with experts, of {self.layers} counted from 0")
        if moe.branch_norms and self.shared_norm:
            raise ValueError("moe.branch_norms does not support shared_norm, because its experts read the stream; remove one")
        if not hasattr(mlp, "activation") or not hasattr(mlp, "gated"):
            raise ValueError(f"experts are built like mlp, and {type(mlp).__name__} does not declare `activation` and `gated`")

    @property
    def layout_dependent(self) -> tuple[str, ...]:
        """Keys that are set and whose effect depends on how rows are assigned to ranks and micro-batches."""
        if self.moe is None:
            return ()
        losses = tuple(f"model.moe.losses.{name}" for name in LAYOUT_DEPENDENT if getattr(self.moe.losses, name))
        return losses + (("model.moe.capacity",) if self.moe.capacity is not None else ())

    @property
    def shape(self) -> DecoderShape:
        """Shape of the model, with every default resolved."""
        mlp = SwiGLU() if self.mlp is None else self.mlp
        ffn_dim = self._default_ffn_dim(mlp) if self.ffn_dim is None else self.ffn_dim
        return DecoderShape(
            dim=self.dim,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.heads if self.kv_heads is None else self.kv_heads,
            head_dim=self.dim // self.heads if self.head_dim is None else self.head_dim,
            ffn_dim=ffn_dim,
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            rope=self.rope,
            tied_embeddings=self.tied_embeddings and not self.labels,
            learned_positions=self.learned_positions,
            soft_cap=self.soft_cap,
            norm_placement=self.norm_placement,
            parallel_residual=self.parallel_residual,
            shared_norm=self.shared_norm,
            attention_only=self.attention_only,
            layer_scalar=self.layer_scalar,
            streams=self.streams,
            layer_inputs=self._layer_inputs,
            embed_multiplier=self.embed_multiplier,
            residual_multiplier=self.residual_multiplier,
            logit_multiplier=self.logit_multiplier,
            init_std=self.init_std,
            attention=GQA() if self.attention is None else self.attention,
            mlp=mlp,
            norm=RMSNormConfig() if self.norm is None else self.norm,
            moe=None if self.moe is None else self.moe.shape(ffn_dim),
            mtp_depth=0 if self.mtp is None else self.mtp.depth,
            mtp_weight=0.0 if self.mtp is None else self.mtp.weight,
            mtp_schedule=None if self.mtp is None else self.mtp.schedule,
            labels=len(self.labels),
        )

    @property
    def _layer_inputs(self) -> LayerInputsShape | None:
        if (inputs := self.layer_inputs) is None:
            return None
        return LayerInputsShape(dim=inputs.dim, vocab_size=inputs.vocab_size or self.vocab_size)

    def _default_ffn_dim(self, mlp: Component) -> int:
        """Returns 4 * dim for an MLP with two matrices, and 8/3 * dim, rounded up to a multiple of 64, for one with three: both
        have about the same number of weights. The class attribute `gated` (default True) says that a component has three."""
        if not getattr(mlp, "gated", True):
            return 4 * self.dim
        return -(-8 * self.dim // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE

    def build(self) -> "decoder.Decoder":
        from forge_models import decoder

        if self.lora is None:
            return decoder.Decoder(self.shape)
        from forge_models.blocks.lora import attach, matrices_of

        shape = self.shape
        if shape.moe is not None and getattr(shape.moe.router, "bias_rate", 0):
            # The biases of routers belong to the base, so they must not follow the loads of this run.
            router: Any = shape.moe.router
            shape = replace(shape, moe=replace(shape.moe, router=replace(router, bias_rate=0.0)))
        model = decoder.Decoder(shape)
        matrices = matrices_of(model)
        attach(model, self.lora.matched(matrices), self.lora)
        model.adapted, model.tuned = True, self.tuned
        for name in model.tuned:
            model.get_parameter(name).requires_grad_(True)
        if self.lora.base_format != "full":
            from forge_models.blocks.quantized import quantize

            quantize(model, matrices, self.lora.base_format)
        return model
