"""Multi-head latent attention in a `config.json`, and the order of rows in which a checkpoint keeps what turns.

DeepSeek turns neighboring dimensions (0, 1), (2, 3), ...; here dimension i turns with i + width / 2. So the rows that make
turning dimensions lie in another order there: ours are its even ones, then its odd ones, in the queries of every head and in
the shared key.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from forge_models.components.attentions import MLA
from forge_models.components.decoder import Decoder
from forge_models.hf.config import Keys

WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Keys and fields with one name."""

LATENT_EPS = 1e-6
"""Of the norms of latents: fixed in the reference, independent of `rms_norm_eps`."""

LATENT_NAMES: Mapping[str, str] = {
    "q_a_norm": "q_a_layernorm",
    "kv_a_proj": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm",
}
"""Our name of a part of the attention -> its name in a checkpoint, where they differ."""


def read_latent(keys: Keys) -> dict[str, Any]:
    """The fields of `MLA`; faults are left in `keys`."""
    fields: dict[str, Any] = {name: keys.integer(name) for name in WIDTHS}
    fields["q_lora_rank"] = keys.integer("q_lora_rank", optional=True) or None
    keys.only("num_key_value_heads", None, keys.integer("num_attention_heads"))
    keys.only("attention_bias", None, False)
    keys.only("rope_interleave", None, True)
    for key, value in _derived(fields).items():
        if keys.given(key):
            keys.only(key, None, value)
    return fields | {"norm_eps": LATENT_EPS}


def write_latent(decoder: Decoder) -> dict[str, Any]:
    """The keys that say the attention of `decoder`; empty when it is of another kind."""
    attention = decoder.shape.attention
    if not isinstance(attention, MLA):
        return {}
    fields = {name: getattr(attention, name) for name in (*WIDTHS, "q_lora_rank")}
    return fields | _derived(fields) | {"attention_bias": False, "rope_interleave": True}


def _derived(fields: Mapping[str, Any]) -> dict[str, int]:
    return {"head_dim": fields["qk_rope_head_dim"], "qk_head_dim": fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]}


def latent_rows(attention: MLA, heads: int, name: str) -> tuple[int, ...]:
    """Which row of a checkpoint's matrix each row of ours is; empty = the same order. `name` is that of the matrix here."""
    turning = attention.qk_rope_head_dim
    halves = [*range(0, turning, 2), *range(1, turning, 2)]
    if name in ("q_proj", "q_b_proj"):
        still = attention.qk_nope_head_dim
        head = [*range(still), *(still + row for row in halves)]
        return tuple(chain.from_iterable((start * len(head) + row for row in head) for start in range(heads)))
    if name == "kv_a_proj":
        rank = attention.kv_lora_rank
        return (*range(rank), *(rank + row for row in halves))
    return ()
