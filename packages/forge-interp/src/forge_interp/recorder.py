"""Runs a model over inputs and stores the selected values; continues an interrupted run of the same capture."""

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.batch import PADDING
from forge_interp.captures import Captured, capture, select_taps
from forge_interp.selection import Positions, Selection
from forge_interp.store import SHARD_BYTES, ActivationWriter
from forge_interp.tap_names import InterpError, TapInfo
from forge_models.generation import evaluating


def record(
    model: nn.Module,
    inputs: Sequence[Tensor],
    folder: Path,
    names: str | Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    positions: Positions = "all",
    batch: int = 8,
    facts: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    report: Callable[[int], None] | None = None,
) -> ActivationWriter:
    """Stores inner values of `inputs`, each (length,) token ids, in a folder; an interrupted capture continues.

    Memory holds one batch and one shard. Selection works as in `capture`.

    Args:
        batch: number of inputs per forward; shorter inputs are padded, and padding is not read.
        facts: further facts about the origin of model and data, for the manifest.
        report: called with the number of inputs that are done.

    Raises:
        InterpError: the selection is invalid (raised before any forward), the folder has another capture, or the disk is full.
    """
    infos = select_taps(model, names, layers, heads)
    check_inputs(model, inputs, positions)
    chosen = {name: stored(one, heads) for name, one in infos.items()}
    said = facts_of(fingerprint(model), inputs, batch, layers, heads, positions)
    writer = ActivationWriter(folder, {**said, **(facts or {})}, chosen, shard_bytes=shard_bytes)
    device = next(model.parameters()).device
    with torch.no_grad(), evaluating(model), capture(model, list(infos), heads=heads, positions=positions, device="cpu") as seen:
        while writer.next_input < len(inputs):
            first = writer.next_input
            rows = inputs[first : first + batch]
            tokens, documents = _padded(rows)
            model(tokens.to(device), documents=None if documents is None else documents.to(device))
            writer.add(*_stored_rows(seen, tokens, first, positions == "mean"), len(rows))
            seen.clear()
            if report is not None:
                report(writer.next_input)
    writer.close()
    return writer


def check_inputs(model: Any, inputs: Sequence[Tensor], positions: Positions) -> None:
    """Checks all inputs before the first one runs.

    Raises:
        InterpError: there are no inputs, an input is empty or too long, an id is outside of the vocabulary, or a position is
            beyond an input.
    """
    if not inputs:
        raise InterpError("inputs is empty; give at least one row of tokens")
    shape = model.shape
    listed = [positions] if isinstance(positions, int) else positions if isinstance(positions, Sequence) else []
    if not isinstance(positions, str):
        Selection(positions)
    for number, row in enumerate(inputs):
        if not 0 < len(row) <= shape.max_length:
            raise InterpError(f"input {number} has {len(row)} tokens; 1 to {shape.max_length} are possible")
        if not 0 <= int(row.min()) <= int(row.max()) < shape.vocab_size:
            raise InterpError(f"input {number} holds token {int(row.max())}; the vocabulary has {shape.vocab_size}")
        for place in listed if not isinstance(positions, str) else ():
            if isinstance(place, int) and not 0 <= place < len(row):
                raise InterpError(f"position {place} is beyond input {number}, of {len(row)} tokens; count from 0, or use 'last'")
    if positions == "last_of_word":
        raise InterpError("positions 'last_of_word' need words of each batch; capture them with `capture`")


def stored(info: TapInfo, heads: Sequence[int] | None) -> dict[str, Any]:
    """Returns the manifest entry of an inner value: alias, shape of a row, dtype."""
    shape = info.shape if heads is None else (len(heads), *info.shape[1:])
    return {"alias": info.alias, "shape": list(shape), "dtype": str(info.dtype).removeprefix("torch.")}


def row_bytes(infos: Mapping[str, TapInfo], heads: Sequence[int] | None) -> int:
    """Returns the number of bytes of one stored row of all inner values."""
    return sum(torch.Size(stored(one, heads)["shape"]).numel() * one.dtype.itemsize for one in infos.values())


def facts_of(
    weights: str,
    inputs: Sequence[Tensor],
    batch: int,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    positions: Positions,
) -> dict[str, Any]:
    """Returns the facts that determine the stored values, for a manifest; `weights` is a `fingerprint`."""
    return {
        "weights": weights,
        "tokens": _digest((f"{len(row)}", row.long()) for row in inputs),
        "inputs": len(inputs),
        "batch": batch,
        "layers": None if layers is None else list(layers),
        "heads": None if heads is None else list(heads),
        "positions": positions if isinstance(positions, str | int) else repr(positions),
    }


def fingerprint(model: nn.Module) -> str:
    """Returns the SHA-256 of all parameters: names, dtypes, shapes and bytes."""
    return fingerprint_of(sorted(model.named_parameters(), key=lambda one: one[0]))


def fingerprint_of(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Returns the `fingerprint` of parameters in order of their names; only one of them must be in memory at a time."""
    return _digest((f"{name} {value.dtype} {tuple(value.shape)}", value) for name, value in parameters)


def _digest(parts: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for text, value in parts:
        held = value.detach().cpu().contiguous()
        digest.update(text.encode())
        digest.update((ctypes.c_char * (held.numel() * held.itemsize)).from_address(held.data_ptr()))
    return digest.hexdigest()


def _padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    longest = max(len(row) for row in rows)
    tokens = torch.stack([torch.nn.functional.pad(row.long(), (0, longest - len(row))) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    if bool((lengths == longest).all()):
        return tokens, None
    behind = torch.arange(longest) >= lengths[:, None]
    return tokens, torch.zeros(tokens.shape, dtype=torch.int32).masked_fill(behind, PADDING)


def _stored_rows(seen: Captured, tokens: Tensor, first: int, mean: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the values (rows, ...) and the index columns (input, position, token) of the rows, input by input."""
    places = seen.tokens[-1].cpu()
    if mean:
        count = len(tokens)
        index = {"input": torch.arange(count) + first, "position": torch.full((count,), -1), "token": torch.full((count,), -1)}
        return {name: value.flatten(0, 1) for name, value in seen.items()}, index
    rows, columns = places.unbind(1)
    # Where inputs have different numbers of tokens, values come as (rows, ...) already.
    values = {
        name: value.flatten(0, 1) if value.dim() - len(seen.infos[name].shape) == 2 else value for name, value in seen.items()
    }
    return values, {"input": rows + first, "position": columns, "token": tokens[rows, columns]}
