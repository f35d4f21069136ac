"""Lenses: predictions of the head from inner layers, directly or through a trained affine map per layer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.batch import IGNORE
from forge_interp.captures import Captured, capture
from forge_interp.selection import mask_argument
from forge_interp.tap_names import InterpError
from forge_models.generation import evaluating

Unembed = Callable[[Tensor], Tensor]
"""Stream (..., dim) after the last block -> logits (..., vocab)."""
STREAMS = ["blocks.*.residual", "residual"]
LensPositions = int | Sequence[int] | Literal["last", "all"]
"""Positions at which a lens predicts: one integer or several, from 0 or negative from the end of the tokens; `last`, the last
token of each row that is not padding; or `all`. With `all` and padding, results have (tokens,) in place of (B, n), row by row."""


@torch.no_grad()
def logit_lens(model: nn.Module, tokens: Tensor, positions: LensPositions = -1, *, token_mask: Tensor | None = None) -> Tensor:
    """Returns (layers + 1, B, n, vocab): the model's final norm and head applied to the input stream of each block, and to the
    last stream, which gives the model's logits (nostalgebraist, 2020).

    Args:
        positions: see `LensPositions`.
        token_mask: (B, T) bool, False for padding, as in `Batch.token_mask`; padding is left out. None = no row is padded.

    Raises:
        InterpError: a position is beyond the tokens or padding, or the mask does not fit the tokens.
    """
    decoder: Any = model
    return torch.stack([decoder.head(decoder.norm(stream)) for stream in _captured(model, tokens, positions, token_mask)])


def _captured(model: nn.Module, tokens: Tensor, positions: LensPositions, token_mask: Tensor | None) -> list[Tensor]:
    """Returns the input stream of each block and the last stream at some positions, (B, n, dim) each."""
    _refuse_streams(model)
    mask = mask_argument(tokens, token_mask)
    numbers = positions if isinstance(positions, Sequence) else [positions]
    for position in numbers if token_mask is not None and not isinstance(positions, str) else ():
        if -tokens.shape[1] <= position < tokens.shape[1] and not bool(token_mask[:, position].all()):  # type: ignore[index]
            row = int((~token_mask[:, position]).nonzero()[0])  # type: ignore[index]
            raise InterpError(
                f"position {position} is padding in row {row}; give positions='last' for the last token of each row, or 'all'"
            )
    with capture(model, STREAMS, positions=positions) as seen:
        model(tokens, **mask)
    return list(seen.values())


def _refuse_streams(model: Any) -> None:
    if getattr(model.shape, "streams", None) is not None:
        raise InterpError(
            "a lens reads one residual stream, but the model has several (model.streams); capture 'blocks.*.residual', which has "
            "all of them, and train a probe"
        )


@torch.no_grad()
def lens_losses(model: nn.Module, tokens: Tensor, labels: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
    """Returns (layers + 1,) fp64: mean negative log-likelihood of the labels under the logit lens by layer; the last is the loss.

    Args:
        labels: (B, T), already shifted; -100 = no loss.
        token_mask: (B, T) bool, False for padding, which has no loss. None = no row is padded, or padding has no labels.

    Raises:
        InterpError: the mask does not fit the tokens.
    """
    decoder: Any = model
    kept = torch.ones_like(tokens, dtype=torch.bool) if token_mask is None else token_mask
    losses = []
    for stream in _captured(model, tokens, "all", token_mask):
        logits = decoder.head(decoder.norm(stream)).flatten(0, -2).double()
        losses.append(F.cross_entropy(logits, labels[kept], ignore_index=IGNORE))
    return torch.stack(losses)


class Attributed(NamedTuple):
    """Contributions of the parts of a model to a logit, or to a difference of logits.

    Attributes:
        names: names of the parts: embeddings, then each head (`blocks.0.attention.heads.3`), the rest of each attention (its bias
            and norm), and each feed-forward part.
        parts: (parts, B) contribution of each part; they sum to `total`.
        total: (B,) logit, or difference of logits.
    """

    names: tuple[str, ...]
    parts: Tensor
    total: Tensor


@torch.no_grad()
def direct_logit_attribution(
    model: nn.Module, tokens: Tensor, right: Tensor, wrong: Tensor | None = None, position: int = -1
) -> Attributed:
    """Splits the logit of `right` (B,) at one position, or its difference to that of `wrong`, into the contribution of each part
    (Elhage et al., 2021), with the scale of the final norm held fixed.

    This needs linearity: a final RMSNorm or LayerNorm, no norm after the attention to split heads, and no cap on logits.

    Raises:
        InterpError: the model has a norm or a cap that cannot be split.
    """
    decoder: Any = model
    shape = decoder.shape
    _refuse_streams(model)
    if shape.soft_cap is not None:
        raise InterpError("a cap on logits is not linear, so a logit is not a sum over parts")
    if shape.layer_scalar:
        raise InterpError("model.layer_scalar = true scales the stream between blocks, so a logit is not a sum over parts")
    if shape.layer_inputs is not None:
        raise InterpError("model.layer_inputs add to the stream of each block, which is not split; choose a model without them")
    names = ["embeddings", "*.attention.heads", "*.attention.added", "*.mlp.added", "residual", "norm"]
    with capture(model, names, positions=position) as seen:
        model(tokens)
    direction = decoder.head.weight[right]
    if wrong is not None:
        direction = direction - decoder.head.weight[wrong]
    direction = direction * shape.logit_multiplier
    stream = seen["residual"][:, 0].double()
    read, constant = _linear_norm(decoder.norm, stream, direction.double())
    kept: dict[str, Tensor] = {"embeddings": seen["embeddings"][:, 0]}
    for layer in range(shape.layers):
        added = seen[f"blocks.{layer}.attention.added"][:, 0]
        if shape.norm_placement == "pre":
            heads = seen[f"blocks.{layer}.attention.heads"][:, 0]
            weight = decoder.blocks[str(layer)].attention.o_proj.weight.unflatten(1, (heads.shape[1], -1))
            written = torch.einsum("bhd,ehd->hbe", heads, weight) * shape.residual_multiplier
            kept |= {f"blocks.{layer}.attention.heads.{head}": one for head, one in enumerate(written)}
            added = added - written.sum(0)  # the bias, if there is one, and rounding errors
        kept[f"blocks.{layer}.attention.added"] = added
        if shape.has_feed_forward(layer):
            kept[f"blocks.{layer}.mlp.added"] = seen[f"blocks.{layer}.mlp.added"][:, 0]
    parts = torch.stack([(value.double() * read).sum(1) for value in kept.values()])
    if constant is not None:
        kept["norm"], parts = torch.empty(0), torch.cat([parts, constant[None]])
    return Attributed(tuple(kept), parts, (seen["norm"][:, 0].double() * direction.double()).sum(1))


def _linear_norm(norm: Any, stream: Tensor, direction: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns (B, dim) r and (B,) c with direction . norm(x) = r . x + c, for the scale that the norm has at `stream`."""
    read = direction if norm.weight is None else direction * (norm.weight.double() + getattr(norm, "offset", 0))
    if getattr(norm, "bias", None) is None and not isinstance(norm, nn.LayerNorm) and type(norm).__name__ == "RMSNorm":
        return read * (stream.square().mean(1, keepdim=True) + norm.eps).rsqrt(), None
    if type(norm).__name__ != "LayerNorm":
        raise InterpError(f"the final norm is {type(norm).__name__}; a logit is split behind RMSNorm and LayerNorm only")
    read = read * (stream.var(1, unbiased=False, keepdim=True) + norm.eps).rsqrt()
    constant = None if norm.bias is None else direction @ norm.bias.double()
    return read - read.mean(1, keepdim=True), constant


class TunedLens(NamedTuple):
    """Affine maps x + x A' + b of the input stream of each block.

    Attributes:
        weight: (layers, dim, dim) A.
        bias: (layers, dim) b.
        before: (layers,) KL divergence of the model's distribution from that of the logit lens, in nats per held-out token.
        after: (layers,) the same divergence with the maps.
    """

    weight: Tensor
    bias: Tensor
    before: Tensor
    after: Tensor

    def __call__(self, layer: int, x: Tensor) -> Tensor:
        """Maps the input stream (..., dim) of block `layer` to a prediction of the stream after the last block."""
        return x + F.linear(x, self.weight[layer].to(x), self.bias[layer].to(x))

    @torch.no_grad()
    def logits(
        self, model: nn.Module, tokens: Tensor, positions: LensPositions = -1, *, token_mask: Tensor | None = None
    ) -> Tensor:
        """Returns (layers + 1, B, n, vocab) logits; the last ones are those of the model. Arguments and errors are those of
        `logit_lens`."""
        decoder: Any = model
        *streams, last = _captured(model, tokens, positions, token_mask)
        mapped = [self(layer, stream) for layer, stream in enumerate(streams)]
        return torch.stack([decoder.head(decoder.norm(stream)) for stream in (*mapped, last)])

    def save(self, path: Path, facts: dict[str, str] | None = None) -> None:
        """Writes the lens as safetensors, with facts about its origin.

        Raises:
            InterpError: the file cannot be written.
        """
        from safetensors.torch import save

        from forge_core.files import replace_file

        try:
            replace_file(path, save({name: value.contiguous() for name, value in self._asdict().items()}, facts))
        except OSError as cause:
            raise InterpError(f"{path} cannot be written: {cause.strerror}; choose another file") from cause

    @classmethod
    def load(cls, path: Path) -> "TunedLens":
        """Reads a file of `save`.

        Raises:
            InterpError: the file cannot be read.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return cls(**load_file(path))
        except (OSError, SafetensorError, TypeError) as cause:
            raise InterpError(f"{path} is not a tuned lens: {cause}") from cause


def tuned_lens(
    model: nn.Module,
    inputs: Sequence[Tensor],
    *,
    steps: int = 250,
    batch: int = 8,
    lr: float = 1e-3,
    held_out: float = 0.2,
    seed: int = 0,
) -> TunedLens:
    """Fits the maps of all layers at once: minimizes the mean over tokens of KL(model | lens) by Adam with a learning rate that
    falls to zero. The maps start at the identity, which is the logit lens.

    Args:
        inputs: (length,) token ids of each input.
        batch: number of inputs per step.
        held_out: fraction of the inputs to hold out.
        seed: seed of the split and of the order.

    Raises:
        InterpError: there are fewer than two inputs, or no steps.
    """
    _refuse_streams(model)
    if len(inputs) < 2 or steps < 1:
        raise InterpError(f"a tuned lens needs at least 2 inputs and 1 step, not {len(inputs)} and {steps}")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(inputs), generator=generator).tolist()
    count = min(max(round(held_out * len(inputs)), 1), len(inputs) - 1)
    tested, fitted = order[:count], order[count:]
    decoder: Any = model
    device = next(model.parameters()).device
    layers, dim = decoder.shape.layers, decoder.shape.dim
    weight = torch.zeros(layers, dim, dim, device=device, requires_grad=True)
    bias = torch.zeros(layers, dim, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([weight, bias], lr=lr)

    def unembed(stream: Tensor) -> Tensor:
        return decoder.head(decoder.norm(stream))

    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        with evaluating(model), capture(model, STREAMS) as seen, torch.enable_grad():
            for step in range(steps):
                for group in optimizer.param_groups:
                    group["lr"] = lr * (1 - step / steps)
                chosen = torch.randint(len(fitted), (min(batch, len(fitted)),), generator=generator).tolist()
                streams, target = _streams(model, seen, [inputs[fitted[one]] for one in chosen], unembed)
                losses = divergences(streams, target, weight, bias, unembed)
                optimizer.zero_grad()
                losses.sum().backward()
                optimizer.step()
            with torch.no_grad():
                found = [torch.zeros(layers, dtype=torch.float64), torch.zeros(layers, dtype=torch.float64)]
                tokens = 0
                for at in tested:
                    streams, target = _streams(model, seen, [inputs[at]], unembed)
                    tokens += len(target)
                    for sums, maps in zip(found, ((0 * weight, 0 * bias), (weight, bias)), strict=True):
                        sums += divergences(streams, target, *maps, unembed).double().cpu() * len(target)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    before, after = (sums / tokens for sums in found)
    return TunedLens(weight.detach().cpu(), bias.detach().cpu(), before, after)


def divergences(streams: Tensor, target: Tensor, weight: Tensor, bias: Tensor, unembed: Unembed) -> Tensor:
    """Returns (layers,) the mean KL(target | lens) in nats.

    Args:
        streams: (layers, n, dim) input streams of the blocks.
        target: (n, vocab) log probabilities of the model.
        weight, bias: weight and bias of the maps.
    """
    found = []
    for stream, matrix, shift in zip(streams, weight, bias, strict=True):
        logs = unembed((stream.to(matrix.dtype) + F.linear(stream.to(matrix.dtype), matrix, shift)).to(stream.dtype)).float()
        found.append((target.exp() * (target - logs.log_softmax(-1))).sum(-1).mean())
    return torch.stack(found)


@torch.no_grad()
def _streams(model: nn.Module, seen: Captured, rows: Sequence[Tensor], unembed: Unembed) -> tuple[Tensor, Tensor]:
    """Returns the (layers, n, dim) streams of all tokens and the model's (n, vocab) log probabilities. Rows of equal length share
    a forward."""
    device = next(model.parameters()).device
    for length in sorted({len(row) for row in rows}):
        model(torch.stack([row.long() for row in rows if len(row) == length]).to(device))
    every = torch.stack([torch.cat([value.flatten(0, 1) for value in seen.each(name)]) for name in seen])
    seen.clear()
    return every[:-1], unembed(every[-1]).float().log_softmax(-1)
