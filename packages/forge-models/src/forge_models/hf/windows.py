"""Layers that see a window of positions only: how wide it is, and which layers they are."""

from collections.abc import Callable
from typing import Any

from forge_models.components.decoder import Decoder
from forge_models.hf.config import Keys

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers in `layer_types`."""


def read_window(keys: Keys) -> int | None:
    """The width; None = every layer sees everything."""
    window = keys.integer("sliding_window", optional=True) or None
    if keys.given("sliding_window_size"):  # Gemma-2 configurations repeat the window under this name
        keys.only("sliding_window_size", window)
    return window


def read_local_layers(keys: Keys, window: int | None, local: Callable[[int], bool]) -> dict[str, Any]:
    """`window`, `global_every` and `global_layers` of the attention; `local` tells by index, where `layer_types` is absent."""
    layers = keys.integer("num_hidden_layers")
    types = keys.values["layer_types"] if keys.given("layer_types") else None
    types = types or [SLIDING if local(layer) else FULL for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or set(types) - {FULL, SLIDING}:
        keys.fault("layer_types", f"expected {layers} times {FULL!r} or {SLIDING!r}")
        return {}
    if SLIDING not in types:
        return {}
    if window is None:
        keys.fault("sliding_window", f"is missing, but layer_types says {SLIDING!r}")
        return {}
    full = tuple(layer for layer, kind in enumerate(types) if kind == FULL)
    if not full:
        return {"window": window}
    every = full[0] + 1
    if full == tuple(range(every - 1, layers, every)):
        return {"window": window, "global_every": every}
    return {"window": window, "global_layers": full}


def read_period(keys: Keys, period: int) -> dict[str, Any]:
    """The same of a family whose every n-th layer is global; `period` is n when no key says it."""
    window = read_window(keys)
    patterns = [name for name in ("sliding_window_pattern", "_sliding_window_pattern") if keys.given(name)]
    period = keys.integer(patterns[0]) if patterns else period
    for name in patterns[1:]:  # transformers saves both when it was given the first
        keys.only(name, period)
    return read_local_layers(keys, window, lambda layer: not period or (layer + 1) % period != 0)


def windows_of(decoder: Decoder) -> tuple[int | None, ...]:
    """The window of every layer."""
    return decoder.shape.windows()[: decoder.layers]


def write_window(decoder: Decoder) -> dict[str, Any]:
    """The key of `read_window`."""
    return {"sliding_window": getattr(decoder.shape.attention, "window", None)}


def write_local_layers(decoder: Decoder) -> dict[str, Any]:
    """The keys of `read_local_layers`."""
    return write_window(decoder) | {"layer_types": [FULL if window is None else SLIDING for window in windows_of(decoder)]}
