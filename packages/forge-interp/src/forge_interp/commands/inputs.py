"""Shared parts of the commands for inner values: rows of text and selections."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from forge_core.errors import ForgeError
from forge_core.lines import lines_of
from forge_core.protocols.weights import Weights
from forge_core.registry import Registry
from forge_train.inference.tokenizer import check_tokenizer, tokenizer_for


def rows_of_text(
    weights: Weights,
    file: Path,
    tokenizer: Path | None,
    registry: Registry,
    note: Callable[[str], None],
    *,
    length: int | None = None,
    lines: bool = False,
    limit: int | None = None,
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Token ids of each input, and facts about where they come from.

    Args:
        length: tokens of an input at most; the model's longest one at most, and 512 by default.
        lines: each line is an input, cut off at `length`, and `note` says how many were; else the text is cut into inputs.
        limit: inputs at most.

    Raises:
        ForgeError: the file cannot be read or holds nothing, no tokenizer is found, or the length does not fit.
    """
    try:
        content = file.read_bytes()
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise ForgeError(f"{file} cannot be read: {cause}") from cause
    longest = int(getattr(weights.model, "max_length", 512))
    wide = min(longest, 512) if length is None else length
    if not 1 <= wide <= longest:
        raise ForgeError(f"--length {wide}: an input of {weights.facts.origin} has 1 to {longest} tokens")
    coder = tokenizer_for(weights, tokenizer, registry, note)
    check_tokenizer(coder, weights, note)
    begin = coder.prefix
    if lines:
        rows = [torch.tensor([*begin, *coder.encode(line).tolist()]) for line in lines_of(text) if line][:limit]
        if cut := [len(row) for row in rows if len(row) > wide]:
            note(
                f"{len(cut)} of {len(rows)} lines have more than --length {wide} tokens and are cut off; the longest: {max(cut)}"
            )
        rows = [row[:wide] for row in rows]
    else:
        rows = list(torch.tensor([*begin, *coder.encode(text).tolist()], dtype=torch.int64).split(wide))
    rows = [row for row in rows if len(row)][:limit]
    if not rows:
        raise ForgeError(f"{file} holds no text")
    return rows, {"text": hashlib.sha256(content).hexdigest(), "tokenizer": coder.fingerprint, "length": wide, "lines": lines}


def integers(option: str, given: str | None) -> list[int] | None:
    """`0,3,-1`.

    Raises:
        ForgeError: something else.
    """
    if given is None:
        return None
    try:
        return [int(one) for one in given.split(",")]
    except ValueError:
        raise ForgeError(f"{option} {given}: integers with commas between, such as 0,3,-1") from None


def positions_of(given: str) -> Any:
    """`all`, `last`, `mean` or `0,5`.

    Raises:
        ForgeError: something else.
    """
    if given in ("all", "last", "mean"):
        return given
    try:
        return integers("--positions", given)
    except ForgeError:
        raise ForgeError(f"--positions {given}: all, last, mean, or integers with commas between") from None


def row_count(inputs: Sequence[torch.Tensor], positions: Any) -> int:
    """Returns the number of rows that a capture stores."""
    if positions == "all":
        return sum(map(len, inputs))
    return len(inputs) * (1 if isinstance(positions, str) else len(positions))
