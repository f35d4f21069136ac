"""A family of models: converts between its `config.json` and a `DecoderConfig`, and defines the keys that most families share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from forge_core.errors import ConfigError
from forge_models.components.attentions import GQA, MLA, IndexedMLA
from forge_models.components.compressed import CompressedMQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.layers import RMSNormConfig, SwiGLU
from forge_models.components.recurrent import GDN, Hybrid, RecurrentLayer
from forge_models.hf.config import Allowed, Keys, Unsupported
from forge_models.hf.labels import KEYS, classifier_of, keys_of, labels_in
from forge_models.hf.layers import ExpertNames, meaning_of_experts, windows_of
from forge_models.hf.recurrent import fused_places
from forge_models.hf.rope import meaning, read_rope, write_rope


class Family(ABC):
    """One family: its keys and their meaning, and the names of its tensors.

    Attributes:
        model_type, architecture: names in `config.json`.
        defaults: values of absent keys, as in the reference implementation.
        ignores: keys without effect, with their allowed values; see `forge_models.hf.config`.
        parts: part of a block, or part.module, -> its name in a layer.
        outside: names of tensors outside the blocks, where they differ from those of `forge_models.hf.names`.
        layers: name of the list of layers.
        matrices: our matrix -> its name in a part of a layer, if they differ.
        joint: matrix of a checkpoint that has q, k and v of each head in turn; None: there is none.
        fused: matrix of a checkpoint -> our matrices that it concatenates.
        turned: whether the matrices of blocks have inputs before outputs.
        neighbors: whether q and k rotate neighboring dimensions, (0, 1), (2, 3), ..., so that their rows have another order.
        derived: ends of the names of further buffers that are computed from the configuration and not read.
        experts: names of experts; None: the family has none.
        recurrent: name of the recurrent layers in a layer; None: the family has none.
        recurrent_parts: components of recurrent layers whose tensors the family has.
        recurrent_places: places of the parameters of a recurrent layer; see `forge_models.hf.recurrent`.
        mtp_layers: key with the number of MTP layers after the last one, which are not read.
        mtp_modules: beginnings of the names of tensors of MTP modules beside the layers, which are not read.
        scales_inputs: whether the reference multiplies all inputs by `embed_multiplier`, features of images included.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]]
    ignores: ClassVar[Mapping[str, Allowed]] = MappingProxyType({})
    parts: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "attention": "self_attn",
            "mlp": "mlp",
            "attention_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
        }
    )
    outside: ClassVar[Mapping[str, str]] = MappingProxyType({})
    layers: ClassVar[str] = "model.layers"
    matrices: ClassVar[Mapping[str, str]] = MappingProxyType({})
    joint: ClassVar[str | None] = None
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    turned: ClassVar[bool] = False
    neighbors: ClassVar[bool] = False
    derived: ClassVar[tuple[str, ...]] = ()
    experts: ClassVar[ExpertNames | None] = None
    recurrent: ClassVar[str | None] = None
    recurrent_parts: ClassVar[tuple[type[RecurrentLayer], ...]] = (GDN,)
    recurrent_places: ClassVar[Callable[..., Any]] = staticmethod(fused_places)
    mtp_layers: ClassVar[str | None] = None
    mtp_modules: ClassVar[tuple[str, ...]] = ()
    scales_inputs: ClassVar[bool] = False

    def spelled(self, decoder: DecoderConfig, name: str) -> str:
        """Returns the name that Forge writes for a tensor that a checkpoint may have under another name."""
        del decoder
        return name

    def skipped(self, decoder: DecoderConfig) -> tuple[str, ...]:
        """Returns the beginnings of names of tensors that checkpoints may have but the model does not use."""
        del decoder
        return ()

    def place(self, decoder: DecoderConfig, name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
        """Returns the name and the shape in a checkpoint of a parameter whose name follows from no attribute of the family; None
        for all others."""
        del decoder, name, shape
        return None

    def module(self, name: str) -> str:
        """Returns the name in transformers of a module with this name in a checkpoint."""
        return name

    @abstractmethod
    def read(self, keys: Keys) -> dict[str, Any]:
        """Returns the fields of the `DecoderConfig` that a configuration describes. Every wrong key is a fault of `keys`."""

    @abstractmethod
    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        """Returns the keys that `read` reads, for any decoder; `misfits` detects what they cannot describe by reading them
        back."""

    def layer_of(self, decoder: DecoderConfig, block: int, part: str) -> int:
        """Returns the index of the checkpoint's layer that has part `part` of block `block`, a key of `parts`."""
        del decoder, part
        return block


def decoder_of(family: Family, values: Mapping[str, Any], where: str, ignore: Sequence[str] = ()) -> DecoderConfig:
    """Returns the decoder that a configuration describes.

    Args:
        family: family of the configuration.
        values: its keys.
        where: name of the file, for messages.
        ignore: keys to ignore although they are not understood.

    Raises:
        ConfigError: keys are missing, wrong, or not implemented, or an entry of `ignore` is not such a key; names all of them.
        Unsupported: the keys are valid, but not in combination.
    """
    labels: tuple[str, ...] = ()
    if values.get("architectures") == [classifier_of(family.model_type, family.architecture)]:
        labels = labels_in(values, where)
        values = {key: value for key, value in values.items() if key not in KEYS}
    keys = Keys(values, family.defaults, where, family.ignores, ignore)
    fields = {**family.read(keys), "labels": labels}
    keys.finish()
    try:
        return DecoderConfig(**fields)
    except ValueError as cause:
        raise Unsupported(f"{where}: {cause}") from cause


def config_of(family: Family, decoder: DecoderConfig) -> dict[str, Any]:
    """Returns the keys of `config.json` for `decoder`; `misfits` returns what they cannot describe."""
    named, labels = {"architectures": [family.architecture], "model_type": family.model_type}, decoder.labels
    if labels and (classifier := classifier_of(family.model_type, family.architecture)) is not None:
        named["architectures"] = [classifier]
    return named | family.write(replace(decoder, labels=())) | (keys_of(labels) if labels else {})


def meaning_of(decoder: DecoderConfig) -> dict[str, Any]:
    """Returns what determines the logits, in a normal form; equal for equal models."""
    fields = ("dim", "layers", "heads", "vocab_size", "tied_embeddings", "learned_positions", "soft_cap", "norm_placement")
    fields += ("parallel_residual", "shared_norm", "embed_multiplier", "residual_multiplier", "logit_multiplier", "labels")
    fields += ("layer_scalar",)
    fields += ("streams",)
    result: dict[str, Any] = {name: getattr(decoder, name) for name in fields} | {"layer_inputs": decoder.shape.layer_inputs}
    result |= {"attention_only": tuple(sorted(set(decoder.attention_only)))}
    result |= meaning_of_experts(decoder)
    if decoder.rope.scaling != "dynamic":
        result["max_length"] = decoder.max_length
    attention = decoder.shape.attention
    rotates_at: Any = getattr(attention, "rotates_at", None)
    if rotates_at is None or any(rotates_at(layer) for layer in range(decoder.layers)):
        result |= {f"rope.{name}": value for name, value in meaning(decoder.rope).items()}
    if isinstance(attention, Hybrid):
        result["attention.full"] = tuple(attention.is_full(layer) for layer in range(decoder.layers))
        placements = tuple(decoder.shape.norm_placement_at(layer) for layer in range(decoder.layers))
        recurrent = attention.recurrent
        if isinstance(recurrent, RecurrentLayer):
            recurrent = recurrent.resolved(decoder.shape.context(0))
        result |= {"norm_placement": placements, "attention.recurrent": recurrent}
        attention = attention.full
    if isinstance(attention, GQA):
        result |= _heads(decoder, attention) | {"attention.windows": windows_of(decoder)}
        result["attention.nope"] = tuple(layer for layer in range(decoder.layers) if not attention.rotates_at(layer))
        layers = dict.fromkeys(("global_every", "global_layers", "nope_every", "nope_layers"))
        heads: dict[str, Any] = dict.fromkeys(("global_head_dim", "global_kv_heads"))
        attention = replace(attention, keys_as_values="none", **heads)
        chunk = attention.chunk if any(result["attention.windows"]) else None
        if all(attention.rotates_at(layer) for layer in range(decoder.layers)) and attention.temperature_layers == "nope":
            none: dict[str, Any] = {"temperature": None, "temperature_length": None, "temperature_shift": 0}
            attention = replace(attention, **none, temperature_layers="all")
        attention = replace(attention, scale=None, window=None, chunk=chunk, **layers, core="auto")
    elif isinstance(attention, CompressedMQA):
        result["attention.kinds"] = tuple(attention.kind_at(layer, decoder.layers) for layer in range(decoder.layers))
        result["head_dim"] = decoder.shape.head_dim
        attention = replace(attention, kinds=None, kl_weight=1.0)
    elif isinstance(attention, MLA):
        attention = replace(attention, core="auto", norm_eps=getattr(attention.norm(decoder.shape.context(0)), "eps", None))
        attention = replace(attention, kl_weight=1.0) if isinstance(attention, IndexedMLA) else attention
    return result | {"attention": attention, "mlp": decoder.shape.mlp, "norm": decoder.shape.norm}


def _heads(decoder: DecoderConfig, attention: GQA) -> dict[str, Any]:
    """Returns the sizes of heads, the scale of scores and the layers without projected values: one value if layers are alike."""
    contexts = [attention.of_layer(decoder.shape.context(layer)) for layer in range(decoder.layers)]
    found = {
        "kv_heads": tuple(context.kv_heads for context in contexts),
        "head_dim": tuple(context.head_dim for context in contexts),
        "attention.scale": tuple(attention.scale or context.head_dim**-0.5 for context in contexts),
        "attention.keys_as_values": tuple(not attention.has_values(layer) for layer in range(decoder.layers)),
    }
    return {name: values if len(set(values)) > 1 else values[0] for name, values in found.items()}


def misfits(family: Family, decoder: DecoderConfig) -> list[str]:
    """Returns what a family's `config.json` cannot describe of `decoder`; empty if reading it back returns the same model."""
    if decoder.labels and classifier_of(family.model_type, family.architecture) is None:
        return ["transformers has no classifier of this family"]
    try:
        again = decoder_of(family, config_of(family, decoder), family.model_type)
    except (ConfigError, Unsupported) as refusal:
        return [str(refusal)]
    wanted, got = meaning_of(decoder), meaning_of(again)
    names = dict.fromkeys((*wanted, *got))
    return [f"{name} = {wanted.get(name)!r}, it has {got.get(name)!r}" for name in names if wanted.get(name) != got.get(name)]


SIZES: Mapping[str, str] = {
    "hidden_size": "dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_length",
}
"""Key of a configuration -> field of `DecoderConfig`, for numbers that every family has."""

SILU = ("hidden_act", "silu")
"""Key and value of the most common activation."""


def read_base(keys: Keys, eps: str | None = "rms_norm_eps", activation: tuple[str, str] = SILU, **rope: Any) -> dict[str, Any]:
    """Returns the fields of `DecoderConfig` that every family has. `eps` and `activation` are keys that differ in a few families
    (`eps` is None for one whose `eps` is fixed); `rope` are arguments of `read_rope`."""
    sizes = {ours: keys.integer(theirs) for theirs, ours in SIZES.items()}
    norm, std = RMSNormConfig() if eps is None else RMSNormConfig(eps=keys.number(eps)), keys.number("initializer_range")
    tied = keys.boolean("tie_word_embeddings")
    keys.only(*activation)
    return sizes | {"norm": norm, "init_std": std, "tied_embeddings": tied, "mlp": SwiGLU()} | read_rope(keys, **rope)


def read_heads(keys: Keys) -> dict[str, Any]:
    """Returns `kv_heads` and `head_dim`."""
    dim, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads", optional=True) or heads
    head_dim = keys.integer("head_dim", optional=True) if keys.known("head_dim") else 0
    return {"kv_heads": kv_heads, "head_dim": head_dim or (dim // heads if heads else 0)}


def read_biases(keys: Keys) -> dict[str, Any]:
    """Returns the biases of the attention's four projections, which one key sets."""
    bias = keys.boolean("attention_bias")
    return {"qkv_bias": bias, "output_bias": bias}


def write_base(
    family: Family, decoder: DecoderConfig, eps: str | None = "rms_norm_eps", activation: tuple[str, str] = SILU
) -> dict[str, Any]:
    """Returns the keys of `read_base` and `read_heads`, and keys that have the same value for every model."""
    shape = decoder.shape
    written: dict[str, Any] = {"attention_dropout": 0.0, "use_cache": True, "initializer_range": shape.init_std}
    written |= {theirs: getattr(shape, ours) for theirs, ours in SIZES.items()} | {"num_key_value_heads": shape.kv_heads}
    if "head_dim" in family.defaults:
        written["head_dim"] = shape.head_dim
    written |= {} if eps is None else {eps: getattr(shape.norm, "eps", 0.0)}
    written["tie_word_embeddings"] = shape.tied_embeddings
    return written | dict([activation]) | write_rope(decoder)


def write_biases(decoder: DecoderConfig) -> dict[str, Any]:
    """Returns the key of `read_biases`."""
    return {"attention_bias": getattr(decoder.shape.attention, "output_bias", False)}
