"""Sparse autoencoders: activations as sums of a few directions out of many (Bricken et al., 2023; Gao et al., 2024)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.batch import IGNORE
from forge_interp.edits import edit, replace, zero
from forge_interp.selection import mask_argument
from forge_interp.store import ActivationStore
from forge_interp.tap_names import InterpError, require_finite

CHUNK = 1024
"""Number of rows read at a time."""
MIXED = 16
"""Number of chunks whose rows are shuffled together, which bounds memory."""


class SAE(NamedTuple):
    """The k largest of relu((x - b) E' + e), times D, plus b.

    Attributes:
        encoder: (latents, width) E; `encoder_bias` (latents,) e.
        decoder: (latents, width) D, rows of length 1; `decoder_bias` (width,) b.
        k: maximum number of active latents of a row.
    """

    encoder: Tensor
    encoder_bias: Tensor
    decoder: Tensor
    decoder_bias: Tensor
    k: int

    def encode(self, x: Tensor) -> Tensor:
        """Returns the (..., latents) activations of x (..., width); at most k of a row are not zero."""
        return largest(F.linear(x.to(self.encoder.dtype) - self.decoder_bias, self.encoder, self.encoder_bias).relu(), self.k)

    def reconstruct(self, x: Tensor) -> Tensor:
        """Returns the (..., width) reconstruction in the dtype of x, for `edit` with `replace`."""
        return (self.encode(x) @ self.decoder + self.decoder_bias).to(x.dtype)

    def save(self, path: Path, facts: dict[str, Any] | None = None) -> None:
        """Writes the autoencoder as safetensors.

        Raises:
            InterpError: the file cannot be written.
        """
        from safetensors.torch import save

        from forge_core.files import replace_file

        tensors = {name: value.contiguous() for name, value in self._asdict().items() if isinstance(value, Tensor)}
        try:
            replace_file(path, save(tensors, {"facts": json.dumps({**(facts or {}), "k": self.k})}))
        except OSError as cause:
            raise InterpError(f"{path} cannot be written: {cause.strerror}; choose another file") from cause

    @classmethod
    def load(cls, path: Path) -> "SAE":
        """Reads a file of `save`.

        Raises:
            InterpError: the file cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                k = json.loads((file.metadata() or {})["facts"])["k"]
                return cls(**{name: file.get_tensor(name) for name in file.keys()}, k=k)  # noqa: SIM118 (not a mapping)
        except (OSError, SafetensorError, TypeError, KeyError, ValueError) as cause:
            raise InterpError(f"{path} is not a sparse autoencoder: {cause}") from cause


class Quality(NamedTuple):
    """Quality on held-out rows.

    Attributes:
        explained: explained fraction of the variance: 1 - sum |x - x'|^2 / sum |x - mean|^2.
        l0: mean number of active latents of a row.
        dead: number of latents that are active in no row.
        rows: number of rows.
    """

    explained: float
    l0: float
    dead: int
    rows: int


def train_sae(
    store: ActivationStore,
    name: str,
    *,
    latents: int,
    k: int = 32,
    steps: int = 2000,
    batch: int = 512,
    lr: float = 1e-3,
    held_out: float = 0.1,
    revive: int = 200,
    seed: int = 0,
) -> tuple[SAE, Quality]:
    """Trains a sparse autoencoder: minimizes |x - x'|^2 over stored rows by Adam. Latents that were inactive for `revive` steps
    are trained on the residual with an auxiliary loss of weight 1/32 (Gao et al., 2024). Reads MIXED * CHUNK rows at a time.

    Args:
        latents: number of directions, usually a multiple of the width.
        k: maximum number of active latents of a row.
        held_out: fraction of the rows to hold out, from the end.

    Raises:
        InterpError: a size is invalid, there are too few rows, the rows do not vary, or values are not finite.
    """
    stop = store.rows - round(held_out * store.rows)
    if not 0 < k <= latents or steps < 1 or batch < 1:
        raise InterpError(f"k = {k}, steps = {steps} and batch = {batch} must be at least 1, and k at most {latents} latents")
    if stop < 2 or store.rows - stop < 2:
        raise InterpError(f"{store.rows} rows with {held_out:g} held out leave one side fewer than two; capture more")
    generator = torch.Generator().manual_seed(seed)
    first = _rows(store, name, 0, min(stop, CHUNK * MIXED))
    mean = first.mean(0)
    scale = (first - mean).square().sum(1).mean().sqrt()
    if not bool(((first - mean).abs() > len(first) * torch.finfo(first.dtype).eps * first.abs().amax(0)).any()):
        raise InterpError(f"all rows of {name} are equal; a sparse autoencoder needs rows that vary")
    decoder = F.normalize(torch.randn(latents, first.shape[1], generator=generator), dim=1)
    parameters = [nn.Parameter(one) for one in (decoder.clone(), torch.zeros(latents), decoder, torch.zeros(first.shape[1]))]
    optimizer = torch.optim.Adam(parameters, lr=lr)
    idle = torch.zeros(latents, dtype=torch.int64)
    with torch.enable_grad():
        for step, rows in zip(range(steps), _batches(store, name, stop, batch, generator), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, 5 * (1 - step / steps))  # falls to zero over the last fifth
            encode, shift, directions, center = parameters
            x = (rows - mean) / scale
            active = F.linear(x - center, encode, shift).relu()
            kept = largest(active, k)
            left = x - (kept @ directions + center)
            loss = left.square().sum(1).mean()
            idle = torch.where((kept.detach() > 0).any(0), 0, idle + 1)
            if bool((dead := idle > revive).any()):
                again = largest(active * dead, min(2 * k, int(dead.sum())))
                loss = loss + (left.detach() - again @ directions).square().sum(1).mean() / 32
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                directions.copy_(F.normalize(directions, dim=1))
    encode, shift, directions, center = (one.detach() for one in parameters)
    sae = SAE(encode, shift * scale, directions, mean + center * scale, k)  # undoes the normalization
    return sae, quality(sae, store, name, stop)


@torch.no_grad()
def quality(sae: SAE, store: ActivationStore, name: str, start: int = 0, stop: int | None = None) -> Quality:
    """Measures the quality over rows start to stop - 1, one chunk at a time."""
    stop = store.rows if stop is None else stop
    if stop - start < 2:
        raise InterpError(f"rows {start} to {stop} are too few to have a variance")
    width = sae.decoder.shape[1]
    total, square, left, count = torch.zeros(width, dtype=torch.float64), 0.0, 0.0, 0.0
    seen = torch.zeros(len(sae.decoder), dtype=torch.bool)
    for at in range(start, stop, CHUNK):
        x = _rows(store, name, at, min(at + CHUNK, stop))
        latents = sae.encode(x)
        total += x.double().sum(0)
        square += float(x.double().square().sum())
        left += float((x.double() - (latents @ sae.decoder + sae.decoder_bias).double()).square().sum())
        count += float((latents > 0).sum())
        seen |= (latents > 0).any(0)
    rows = stop - start
    spread = square - float(total.square().sum()) / rows
    return Quality(1 - left / max(spread, 1e-300), count / rows, int((~seen).sum()), rows)


@torch.no_grad()
def loss_recovered(
    model: nn.Module, name: str, sae: SAE, tokens: Tensor, labels: Tensor, *, token_mask: Tensor | None = None
) -> float:
    """Returns (zeroed - reconstructed) / (zeroed - clean), from the model's losses with an inner value set to zero, replaced by
    its reconstruction, and unchanged: 1 if the reconstruction has everything that the model uses.

    Args:
        labels: (B, T), already shifted; -100 = no loss.
        token_mask: (B, T) bool, False for padding, as in `Batch.token_mask`; padding is not edited and has no loss. None = no row
            is padded, or padding has no labels.

    Raises:
        InterpError: the mask does not fit the tokens.
    """
    mask = mask_argument(tokens, token_mask)
    if token_mask is not None:
        labels = labels.masked_fill(~token_mask.to(labels.device), IGNORE)

    def loss() -> float:
        return float(F.cross_entropy(model(tokens, **mask).flatten(0, 1).double(), labels.flatten(), ignore_index=IGNORE))

    clean = loss()
    with edit(model, name, zero()):
        zeroed = loss()
    with edit(model, name, replace(lambda x: sae.reconstruct(x.flatten(2)).view_as(x))):
        return (zeroed - loss()) / (zeroed - clean)


def largest(x: Tensor, k: int) -> Tensor:
    """Returns x (..., latents) with all but the k largest of each row set to 0."""
    values, places = x.topk(min(k, x.shape[-1]), dim=-1)
    return torch.zeros_like(x).scatter(-1, places, values)


def _rows(store: ActivationStore, name: str, start: int, stop: int) -> Tensor:
    """Reads (stop - start, width) fp32 rows of a store; raises `InterpError` for values that are not finite."""
    rows = store.read(name, start, stop).flatten(1).float()
    require_finite(f"stored activations {name} from row {start} on", rows)
    return rows


def _batches(store: ActivationStore, name: str, stop: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yields batches of rows in random order without end: draws chunks, and shuffles the rows of `MIXED` chunks together."""
    chunks = range(0, stop, CHUNK)
    while True:
        order = torch.randperm(len(chunks), generator=generator).tolist()
        for at in range(0, len(order), MIXED):
            picked = [chunks[one] for one in order[at : at + MIXED]]
            rows = torch.cat([_rows(store, name, one, min(one + CHUNK, stop)) for one in picked])
            yield from rows[torch.randperm(len(rows), generator=generator)].split(batch)
