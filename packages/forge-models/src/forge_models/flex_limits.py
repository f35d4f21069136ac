"""Calls of flex attention on a GPU that nobody has shown to be right, so they get another kernel or are refused.

- In a compiled block, rows shorter than one block of the mask. Compiled models have let a token see another document there, while
  the kernel by itself was exact.
- The backward of a soft cap together with a mask, if a length is no multiple of a block: it has returned NaN (pytorch #153799).

Documents may have any length in both cases, because only rows are cut into blocks.
"""

from forge_models.shape import AttentionKernel

BLOCK = 128
"""Queries, and keys, of a block of flex attention's mask."""


def takes_flex(kind: AttentionKernel, queries: int, keys: int, compiled: bool, capped: bool) -> bool:
    """Returns whether flex attention computes rows of these lengths on a GPU. Otherwise a mask does, of less than a block.

    Args:
        kind: the chosen kernel, "auto" or "flex".
        queries, keys: lengths of the rows.
        compiled: whether the call is part of a compiled block.
        capped: whether a soft cap is differentiated.

    Raises:
        ValueError: neither fits: `refusal` says why.
    """
    if why := refusal(kind, queries, keys, compiled, capped):
        raise ValueError(why)
    return not (kind == "auto" and keys <= BLOCK and _unproven(queries, keys, compiled, capped))


def refusal(kind: AttentionKernel, queries: int, keys: int, compiled: bool, capped: bool) -> str:
    """Returns why rows of these lengths are refused, with the arguments of `takes_flex`; "" if they are not."""
    if kind not in ("auto", "flex") or (kind == "auto" and keys <= BLOCK):
        return ""
    why = _unproven(queries, keys, compiled, capped)
    if why and kind == "flex":
        return f"model.attention.core = 'flex' {why}, or set model.attention.core to 'auto' or 'sdpa'"
    return why and f"model.attention.core = 'auto' takes flex attention on a GPU, which {why}, or set it to 'sdpa'"


def _unproven(queries: int, keys: int, compiled: bool, capped: bool) -> str:
    short = min(queries, keys)
    if compiled and short < BLOCK:
        return (
            f"is not proven in compiled blocks for rows of {short} tokens: they may see other documents; raise "
            f"data.sequence_length to {BLOCK} or more for each rank of parallel.cp, or remove [transforms.compile]"
        )
    uneven = next((length for length in (queries, keys) if length % BLOCK), None)
    if capped and uneven is not None:
        return (
            f"is not proven with model.attention.soft_cap for rows of {uneven} tokens: gradients may be NaN; make "
            f"data.sequence_length a multiple of {BLOCK} for each rank of parallel.cp"
        )
    return ""
