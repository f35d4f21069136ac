"""Shared parts of the commands for inner values: rows of text and selections."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from forge_core.errors import ForgeError
from forge_core.files import lines_of
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
    """Returns the token ids of each input, and facts about their origin.

    Args:
        length: maximum number of tokens of an input, at most the model's maximum; 512 by default.
        lines: whether each line is an input, truncated to `length` (`note` reports how many); otherwise the text is split.
        limit: maximum number of inputs.

    Raises:
        ForgeError: the file cannot be read or is empty, no tokenizer is found, or the model does not support the length.
    """
    try:
        content = file.read_bytes()
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise ForgeError(f"{file} cannot be read: {cause}") from cause
    longest = int(getattr(weights.model, "max_length", 512))
    wide = min(longest, 512) if length is None else length
    if not 1 <= wide <= longest:
        raise ForgeError(f"--length {wide}: an input of {weights.facts.origin} must have 1 to {longest} tokens")
    coder = tokenizer_for(weights, tokenizer, registry, note)
    check_tokenizer(coder, weights, note)
    begin = coder.prefix
    if lines:
        rows = [torch.tensor([*begin, *coder.encode(line).tolist()]) for line in lines_of(text) if line][:limit]
        if cut := [len(row) for row in rows if len(row) > wide]:
            note(f"{len(cut)} of {len(rows)} lines are truncated to --length {wide}; the longest one has {max(cut)} tokens")
        rows = [row[:wide] for row in rows]
    else:
        rows = list(torch.tensor([*begin, *coder.encode(text).tolist()], dtype=torch.int64).split(wide))
    rows = [row for row in rows if len(row)][:limit]
    if not rows:
        raise ForgeError(f"{file} contains no text; choose another file")
    return rows, {"text": hashlib.sha256(content).hexdigest(), "tokenizer": coder.fingerprint, "length": wide, "lines": lines}


def integers(option: str, text: str | None) -> list[int] | None:
    """Parses integers such as `0,3,-1`.

    Raises:
        ForgeError: the text has another form.
    """
    if text is None:
        return None
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ForgeError(f"{option} {text}: write integers separated by commas, such as 0,3,-1") from None


def positions_of(text: str) -> Any:
    """Parses positions: `all`, `last`, `mean` or `0,5`.

    Raises:
        ForgeError: the text has another form.
    """
    if text in ("all", "last", "mean"):
        return text
    try:
        return integers("--positions", text)
    except ForgeError:
        raise ForgeError(f"--positions {text}: write all, last, mean, or integers separated by commas") from None


def row_count(inputs: Sequence[torch.Tensor], positions: Any) -> int:
    """Returns the number of rows that a capture stores."""
    if positions == "all":
        return sum(map(len, inputs))
    return len(inputs) * (1 if isinstance(positions, str) else len(positions))
