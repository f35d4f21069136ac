"""Rotary positions in a `config.json`: `rope_theta` with `rope_scaling`, or the newer `rope_parameters`."""

from collections.abc import Mapping
from typing import Any

from forge_models.components.decoder import DecoderConfig
from forge_models.hf.config import WHOLE, Keys, same_value
from forge_models.hf.layers import FULL, SLIDING
from forge_models.shape import Rope

SCALINGS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
        *("attention_factor", "mscale", "mscale_all_dim"),
    ),
}
"""Keys of each `rope_type`; any other key is an error."""

OURS = {"original_max_position_embeddings": "original_max_length"}
"""Keys whose field in `Rope` has a different name."""

TYPES: Mapping[str, type] = {"original_max_position_embeddings": int, "truncate": bool}
EXPECTED: Mapping[type, str] = {int: "a positive integer", bool: "true or false"}
"""Keys whose values are not positive numbers, and names of their types for messages."""

PARTIAL = "partial_rotary_factor"
TABLES = "rope_parameters"
"""Key of the newer tables, one for each kind of layer or one for all."""
PROPORTIONAL = "proportional"
"""`rope_type` of a table in which `partial_rotary_factor` is the share of pairs that turn; only some families have it."""


def read_rope(
    keys: Keys,
    theta: float = 10000.0,
    local_theta: float | None = None,
    local_key: str | None = None,
    partial: float | None = None,
    inert: tuple[str, ...] = (),
    proportion: float | None = None,
) -> dict[str, Any]:
    """Reads `rope` and `max_length` of the decoder; collects faults in `keys`.

    Args:
        keys: keys of the configuration.
        theta: default base of the angles.
        local_theta: default base of windowed layers, whose angles are never scaled; None = all layers have the same angles.
        local_key: key of the base of windowed layers; None = only the tables for both kinds of layers contain it.
        partial: default of `partial_rotary_factor`, the share of a head that is rotated, which may be in the rope table or next
            to it; None = the key does not exist.
        inert: keys of a table that change nothing of text.
        proportion: share of pairs of global layers that turn if there is no table; None = tables of this type do not exist.
    """
    length = keys.integer("max_position_embeddings")
    rope = _rope(keys, theta, length, local_theta, local_key, partial, inert, proportion)
    if rope.scaling == "dynamic":  # dynamic scaling is for sequences longer than max_position_embeddings
        length = int(length * (rope.factor or 1))
    return {"rope": rope, "max_length": length}


def _rope(
    keys: Keys,
    default_theta: float,
    length: int,
    default_local: float | None,
    local_key: str | None,
    default_partial: float | None,
    inert: tuple[str, ...],
    default_proportion: float | None,
) -> Rope:
    values = {key: keys.values[key] if keys.given(key) else None for key in ("rope_theta", "rope_scaling", "rope_parameters")}
    if values["rope_scaling"] and values["rope_parameters"]:
        keys.fault("rope_scaling", "conflicts with rope_parameters; give one of the two")
        return Rope()
    for where in ("rope_scaling", "rope_parameters"):
        if not isinstance(values[where], dict | None):
            keys.fault(where, f"expected a table, not {values[where]!r}")
            return Rope()
    table = values["rope_parameters"] or values["rope_scaling"] or {}
    table = {name: value for name, value in table.items() if name not in inert}
    where = "rope_parameters" if values["rope_parameters"] else "rope_scaling"
    theta = _theta(keys, "rope_theta", values["rope_theta"], default_theta)
    partial = 1.0
    if default_partial is not None:
        partial = _partial(keys, table, where, default_partial)
        keys.settle(PARTIAL, partial)
        table = {name: value for name, value in table.items() if name != PARTIAL}
    local_theta = None
    if default_local is not None:
        local_theta = default_local
        if local_key is not None and keys.given(local_key):
            local_theta = _theta(keys, local_key, keys.values[local_key], default_local)
        nested = FULL in table or SLIDING in table
        if table and nested != (where == "rope_parameters"):  # the reference ignores such a table
            keys.fault(where, f"expected {'tables ' + FULL + ' and ' + SLIDING if not nested else 'a table without others'}")
            return Rope()
        if nested:
            sliding = _table(keys, f"{where}.{SLIDING}", table.get(SLIDING))
            fields = read_table(keys, f"{where}.{SLIDING}", sliding, local_theta, length)
            if fields.get("scaling", "none") != "none":
                keys.fault(f"{where}.{SLIDING}", "a scaling of local layers is not implemented")
            local_theta = fields["theta"]
            for name in sorted(set(table) - {FULL, SLIDING}):
                keys.fault(f"{where}.{name}", "is not implemented")
            table, where = _table(keys, f"{where}.{FULL}", table.get(FULL)), f"{where}.{FULL}"
    if default_proportion is not None and not values["rope_parameters"]:
        table = {"rope_type": PROPORTIONAL, PARTIAL: default_proportion}
    if default_proportion is not None and table.get("rope_type") == PROPORTIONAL:
        fields = _proportional(keys, where, table, theta)
    else:
        fields = read_table(keys, where, table, theta, length)
    try:
        return Rope(local_theta=local_theta, partial=partial, **fields)
    except (ValueError, TypeError) as cause:
        keys.fault(where, str(cause))
        return Rope()


def _table(keys: Keys, where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict | None):
        keys.fault(where, f"expected a table, not {value!r}")
    return value if isinstance(value, dict) else {}


def _theta(keys: Keys, where: str, value: Any, default: float) -> float:
    """Returns a base; the default if it is absent, null, or invalid, which is also a fault."""
    return default if value is None else keys.positive(where, value) or default


def _partial(keys: Keys, table: Mapping[str, Any], where: str, default: float) -> float:
    places = {PARTIAL: keys.values[PARTIAL] if keys.given(PARTIAL) else None, f"{where}.{PARTIAL}": table.get(PARTIAL)}
    given = {place: value for place, value in places.items() if value is not None} or {PARTIAL: default}
    for place, value in given.items():
        if type(value) not in (int, float) or not 0 < value <= 1:
            keys.fault(place, f"expected a number above 0, 1 at most, not {value!r}")
            return 1.0
    if len(set(given.values())) > 1:
        keys.fault(
            PARTIAL,
            f"{' and '.join(f'{place} = {value}' for place, value in given.items())}: conflicting values; keep one of them",
        )
    return float(next(iter(given.values())))


def read_table(keys: Keys, where: str, table: Mapping[str, Any], theta: float, max_length: int) -> dict[str, Any]:
    """Returns the fields of `Rope` that a table describes. `theta` is the default of the base, `max_length` that of the original
    length."""
    kinds = {name: table[name] for name in ("rope_type", "type") if table.get(name) is not None}
    kind = next(iter(kinds.values()), "default")
    fields: dict[str, Any] = {"theta": _theta(keys, f"{where}.rope_theta", table.get("rope_theta"), theta)}
    if any(other != kind for other in kinds.values()):
        keys.fault(f"{where}.type", f"{kinds['type']!r}, but rope_type is {kind!r}; conflicting values, keep one of them")
    if not isinstance(kind, str) or kind not in SCALINGS:
        keys.fault(f"{where}.rope_type", f"{kind!r} is not implemented; known: {', '.join(SCALINGS)}")
        return fields
    inert = {"rope_type", "type", "rope_theta", "finetuned"}
    for name, value in table.items():
        if name in inert or value is None or (name == PARTIAL and same_value(value, 1)):
            continue
        if name in ("mscale", "mscale_all_dim") and same_value(value, 0):
            continue  # as if it were absent
        # transformers adds the model's length to every table, but only some scalings use it
        if name not in SCALINGS[kind] and not (name == "original_max_position_embeddings" and kind in ("default", "linear")):
            if not keys.ignored(f"{where}.{name}"):
                keys.fault(f"{where}.{name}", f"{value!r} is not implemented for rope_type {kind!r}")
        elif name in SCALINGS[kind]:
            whole = TYPES.get(name)
            if whole is not None and (type(value) is not whole or (whole is int and not 0 < value < WHOLE)):
                keys.fault(f"{where}.{name}", f"expected {EXPECTED[whole]}, not {value!r}")
            elif whole is not None:
                fields[OURS.get(name, name)] = value
            elif (number := keys.positive(f"{where}.{name}", value)) is not None:
                fields[OURS.get(name, name)] = number
    if kind == "default":
        return fields
    fields["scaling"] = kind
    if kind == "dynamic":  # the reference uses the model's length here
        fields["original_max_length"] = max_length
    elif kind == "yarn":
        fields.setdefault("original_max_length", max_length)
        fields.setdefault("factor", max_length / fields["original_max_length"])
    elif kind == "llama3":
        for name in SCALINGS[kind]:
            if OURS.get(name, name) not in fields:
                keys.fault(f"{where}.{name}", "is missing")
    return fields


def _proportional(keys: Keys, where: str, table: Mapping[str, Any], theta: float) -> dict[str, Any]:
    share, factor = table.get(PARTIAL, 1.0), table.get("factor", 1.0)
    if type(share) not in (int, float) or not 0 < share <= 1:
        keys.fault(f"{where}.{PARTIAL}", f"expected a number above 0, 1 at most, not {share!r}")
        share = 1.0
    for name in sorted(set(table) - {"rope_type", "rope_theta", PARTIAL, "factor"}):
        keys.fault(f"{where}.{name}", f"{table[name]!r} is not implemented for rope_type {PROPORTIONAL!r}")
    fields = {"theta": _theta(keys, f"{where}.rope_theta", table.get("rope_theta"), theta), "proportion": float(share)}
    if same_value(factor, 1) or (factor := keys.positive(f"{where}.factor", factor)) is None:
        return fields
    return fields | {"scaling": "linear", "factor": factor}


def write_tables(rope: Rope) -> dict[str, Any]:
    """Returns `rope_parameters` with a table for each kind of layer."""
    local = rope.of_layer(local=True)
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.proportion != 1:
        full |= {"rope_type": PROPORTIONAL, PARTIAL: rope.proportion}
        full |= {} if rope.factor is None else {"factor": rope.factor}
    elif rope.scaling != "none":
        full |= scaling_of(rope)
    return {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": local.theta}}


def write_rope(decoder: DecoderConfig) -> dict[str, Any]:
    """Returns `rope_theta` and `rope_scaling`, which every version of transformers reads, and the maximum length if it differs
    from Forge's."""
    rope = decoder.rope
    written: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": None}
    if rope.scaling == "dynamic":
        written["max_position_embeddings"] = rope.original_max_length
    if rope.scaling != "none":
        written["rope_scaling"] = scaling_of(rope)
    return written


def scaling_of(rope: Rope) -> dict[str, Any]:
    """Returns the keys of a table with the scaling of `rope`."""
    values = {name: getattr(rope, OURS.get(name, name)) for name in SCALINGS[rope.scaling]}
    return {"rope_type": rope.scaling, **{name: value for name, value in values.items() if value is not None}}


def meaning(rope: Rope) -> dict[str, Any]:
    """Returns the fields that affect the angles."""
    fields = {name: getattr(rope, name) for name in ("theta", "local_theta", "partial", "proportion", "scaling")}
    used = SCALINGS.get(rope.scaling, ()) if rope.scaling != "none" else ()
    extra = ("original_max_length",) if rope.scaling == "dynamic" else ()
    return fields | {name: getattr(rope, name) for name in (*(OURS.get(name, name) for name in used), *extra)}
