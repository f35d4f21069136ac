"""Recurrent layers in a `config.json` and in a checkpoint: Gated DeltaNet or Mamba-2 beside full attention.

Qwen3-Next stores q, k, v and z of a layer in one matrix, and b and a in another; each has the rows of one key head after another,
with those of all its value heads. The filters of q, k and v are one tensor with a dimension of size 1. Qwen3.5 stores q, k and v
in one matrix, one after another, and the others alone; OLMo Hybrid stores each of these tensors alone. Mamba-2 stores the gate,
x, B, C and the steps in one matrix, one after the other, and the filters of x, B and C in one tensor. Kimi Delta Attention stores
each tensor alone.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from forge_models.components.decoder import DecoderConfig
from forge_models.components.kimi_delta import KDA
from forge_models.components.recurrent import GDN, Hybrid
from forge_models.components.state_space import Mamba2
from forge_models.hf.config import Keys
from forge_models.hf.layers import FULL

LINEAR = "linear_attention"
"""Kind of a recurrent layer in `layer_types`."""

SIZES = {
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "conv_width",
}
"""Key of a configuration -> field of `GDN`."""

INTERVAL = "full_attention_interval"
"""Key of the number n of which every n-th layer has full attention, for configurations without `layer_types`."""


def read_kinds(keys: Keys, every: int, interval: bool = True) -> dict[str, Any]:
    """Reads which layers have full attention, as fields of `Hybrid`; `every` is the default of the interval, which has a key if
    `interval` is true."""
    layers = keys.integer("num_hidden_layers")
    every = keys.integer(INTERVAL) if interval and keys.given(INTERVAL) else every
    types = keys.values["layer_types"] if keys.given("layer_types") else None
    if types is None:
        return {"full_every": every or None}
    if not isinstance(types, list) or len(types) != layers or set(types) - {FULL, LINEAR}:
        keys.fault("layer_types", f"expected {layers} times {FULL!r} or {LINEAR!r}")
        return {}
    return kinds_of(types)


def kinds_of(types: Sequence[str]) -> dict[str, Any]:
    """Returns the kinds of layers as fields of `Hybrid`, by their names in `layer_types`."""
    full = [layer for layer, kind in enumerate(types) if kind == FULL]
    if full and full == list(range(full[0], len(types), full[0] + 1)):
        return {"full_every": full[0] + 1}
    return {"kinds": tuple("full" if kind == FULL else "recurrent" for kind in types)}


def write_kinds(decoder: DecoderConfig) -> dict[str, Any]:
    """Returns the keys of `read_kinds` and `read_delta_net`; empty without recurrent layers."""
    attention = decoder.shape.attention
    if not isinstance(attention, Hybrid):
        return {}
    written: dict[str, Any] = {"layer_types": [FULL if attention.is_full(at) else LINEAR for at in range(decoder.layers)]}
    recurrent = attention.recurrent
    if isinstance(recurrent, GDN):
        sizes: dict[str, int] = dict(
            zip(("key_heads", "value_heads", "key_dim", "value_dim"), recurrent.heads(decoder.shape.context(0)), strict=True)
        )
        written |= {theirs: sizes.get(ours, recurrent.conv_width) for theirs, ours in SIZES.items()}
    return written


def read_delta_net(keys: Keys, **fields: Any) -> GDN:
    """Reads the sizes of the recurrent layers."""
    return GDN(**{ours: keys.integer(theirs) or 1 for theirs, ours in SIZES.items()}, **fields)


Place = tuple[str, tuple[int, ...], int, tuple[int, ...]]
"""Of a parameter: its name in a layer of a checkpoint, the rows of the checkpoint's tensor in which its rows are, the number of
rows of that tensor, and the dimensions after the first; no rows = the same tensor."""

PLAIN = {"decay.A_log": "A_log", "decay.dt_bias": "dt_bias", "norm.weight": "norm.weight", "o_proj.weight": "out_proj.weight"}
"""Our name of a parameter -> its name in a layer of Qwen3-Next and Qwen3.5, where both have it alone."""

SEPARATE = {"decay.A_log": "A_log", "decay.dt_bias": "dt_bias", "norm.weight": "o_norm.weight", "z_proj.weight": "g_proj.weight"}
"""Our name of a parameter -> its name in a layer of OLMo Hybrid, if they differ; see `separate_places` for filters."""


def separate_places(part: GDN, decoder: DecoderConfig) -> Callable[[str], Place | None]:
    """Returns a function from our name of a parameter to its place in a layer of OLMo Hybrid."""
    key_heads, value_heads, key_dim, value_dim = part.heads(decoder.shape.context(0))
    rows = {"q": key_heads * key_dim, "k": key_heads * key_dim, "v": value_heads * value_dim}
    projections = {f"{name}_proj.weight" for name in (*rows, "b", "a", "o")}

    def place(name: str) -> Place | None:
        letter, _, filters = name.partition("_")
        if filters == "conv.weight" and letter in rows:
            return f"{letter}_conv1d.weight", (), rows[letter], (1, part.conv_width)
        theirs = name if name in projections else SEPARATE.get(name)
        return None if theirs is None else (theirs, (), 0, ())

    return place


def kimi_places(part: KDA, decoder: DecoderConfig) -> Callable[[str], Place | None]:
    """Returns a function from our name of a parameter to its place in a layer of Kimi Linear."""
    sizes = part.resolved(decoder.shape.context(0))
    heads, rows = sizes.heads or 0, (sizes.heads or 0) * (sizes.head_dim or 0)
    projections = {f"{name}_proj.weight" for name in ("q", "k", "v", "b", "f_a", "f_b", "g_a", "g_b", "o")}
    alone: dict[str, Place] = {"decay.A_log": ("A_log", (), 1, (1, heads, 1)), "decay.dt_bias": ("dt_bias", (), 0, ())}
    alone |= {f"{letter}_conv.weight": (f"{letter}_conv1d.weight", (), rows, (1, part.conv_width)) for letter in "qkv"}
    alone["norm.weight"] = ("o_norm.weight", (), 0, ())

    def place(name: str) -> Place | None:
        return (name, (), 0, ()) if name in projections else alone.get(name)

    return place


def joined_places(part: GDN, decoder: DecoderConfig) -> Callable[[str], Place | None]:
    """Returns a function from our name of a parameter to its place in a layer of Qwen3.5."""
    key_heads, value_heads, key_dim, value_dim = part.heads(decoder.shape.context(0))
    keys, values = key_heads * key_dim, value_heads * value_dim
    starts, whole = {"q": (0, keys), "k": (keys, 2 * keys), "v": (2 * keys, 2 * keys + values)}, 2 * keys + values
    filters, alone = (1, part.conv_width), {f"{name}_proj.weight": f"in_proj_{name}.weight" for name in "zba"}

    def place(name: str) -> Place | None:
        letter, _, rest = name.partition("_")
        if letter in starts and rest in ("proj.weight", "conv.weight"):
            theirs, sizes = ("in_proj_qkv.weight", (decoder.dim,)) if rest == "proj.weight" else ("conv1d.weight", filters)
            return theirs, tuple(range(*starts[letter])), whole, sizes
        theirs = (PLAIN | alone).get(name)
        return None if theirs is None else (theirs, (), 0, ())

    return place


def state_space_places(part: Mamba2, decoder: DecoderConfig) -> Callable[[str], Place | None]:
    """Returns a function from our name of a parameter to its place in a layer of Nemotron-H."""
    sizes = part.sizes(decoder.shape.context(0))
    values, keys = sizes["heads"] * sizes["head_dim"], sizes["groups"] * sizes["state_dim"]
    joint = {"z_proj": values, "x_proj": values, "b_proj": keys, "c_proj": keys, "dt_proj": sizes["heads"]}
    filters = {"x_conv": values, "b_conv": keys, "c_conv": keys}
    plain = {f"steps.{name}": name for name in ("A_log", "dt_bias", "D")} | {"norm.weight": "norm.weight"}

    def place(name: str) -> Place | None:
        module, _, slot = name.partition(".")
        if name in plain:
            return plain[name], (), 0, ()
        if module == "o_proj":
            return f"out_proj.{slot}", (), 0, ()
        width = (decoder.dim,) if module in joint else (1, part.conv_width)
        for theirs, parts in (("in_proj", joint), ("conv1d", filters)):
            if module in parts:
                names = list(parts)
                start = sum(parts[other] for other in names[: names.index(module)])
                rows = tuple(range(start, start + parts[module]))
                return f"{theirs}.{slot}", rows, sum(parts.values()), width if slot == "weight" else ()
        return None

    return place


def fused_places(part: GDN, decoder: DecoderConfig) -> Callable[[str], Place | None]:
    """Returns a function from our name of a parameter to its place in a layer of Qwen3-Next."""
    key_heads, value_heads, key_dim, value_dim = part.heads(decoder.shape.context(0))
    shared = value_heads // key_heads
    of_head = shared * value_dim
    mixed = {"q_proj": key_dim, "k_proj": key_dim, "v_proj": of_head, "z_proj": of_head}
    gates, joined = {"b_proj": shared, "a_proj": shared}, joined_places(part, decoder)

    def interleaved(widths: dict[str, int], name: str) -> tuple[tuple[int, ...], int]:
        whole, before = sum(widths.values()), 0
        for other, width in widths.items():
            if other == name:
                break
            before += width
        rows = chain.from_iterable(
            range(head * whole + before, head * whole + before + widths[name]) for head in range(key_heads)
        )
        return tuple(rows), key_heads * whole

    def place(name: str) -> Place | None:
        module = name.partition(".")[0]
        for theirs, widths in (("in_proj_qkvz.weight", mixed), ("in_proj_ba.weight", gates)):
            if module in widths:
                return theirs, *interleaved(widths, module), (decoder.dim,)
        return joined(name)

    return place
