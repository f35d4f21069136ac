"""Upcycling: experts from a dense model's feed-forward layers (Komatsuzaki et al., 2023; He et al., 2024).

If experts are as wide as the dense layer, each is a copy of it. If they are G times narrower, each has one of its G slices, and
the G experts of one copy are adjacent and have equal rows in the router, so that they are chosen together. Outputs are divided by
the sum of the combine weights. Without noise, the new model therefore equals the dense model up to rounding, as long as capacity
drops nothing. Shared experts start with an output projection of zero.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from forge_core.errors import ForgeError
from forge_core.protocols.weights import StoredTensor, Weights
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SigmoidTopKConfig
from forge_models.shape import MoEShape


class Upcycled:
    """`Weights` of the sparse model, computed from those of the dense model when they are read."""

    def __init__(self, dense: Weights, moe: MoEConfig, noise: float = 0.0, seed: int = 0) -> None:
        """
        Args:
            dense: weights of a decoder without experts.
            moe: experts of the new model.
            noise: standard deviation of the noise added to each expert's matrices, relative to that of the matrix.
            seed: seed of the noise and of the router.

        Raises:
            ForgeError: the sizes do not give whole copies, or the sum of the combine weights is not constant.
        """
        if type(dense.model) is not DecoderConfig or dense.model.moe is not None:
            raise ForgeError(f"{dense.facts.origin} is not a dense decoder; upcycling needs one")
        ffn_dim = dense.model.shape.ffn_dim
        if getattr(dense.model.shape.mlp, "bias", False):
            raise ForgeError("the feed-forward layers of the dense model have biases, which are not divided among experts")
        self._dense, self._seed, self._noise = dense, seed, noise
        shape = moe.shape(ffn_dim)
        self._width = shape.ffn_dim
        self._slices = _slices(shape, ffn_dim)
        router: Any = shape.router
        self._scale = self._slices / router.total
        try:
            self.model = replace(dense.model, moe=moe, ffn_dim=ffn_dim, from_hf=None)
        except ValueError as cause:
            raise ForgeError(str(cause)) from cause
        self.facts = replace(dense.facts, family="")
        with torch.device("meta"):
            module = self.model.build()
        self._shapes = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
        self._buffers = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in module.named_buffers()}
        held = {
            name: StoredTensor(tuple(zero.shape), str(zero.dtype).removeprefix("torch.")) for name, zero in self._buffers.items()
        }
        self.tensors: Mapping[str, StoredTensor] = {
            name: self._stored(name, shape) for name, shape in self._shapes.items()
        } | held

    def _stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        kept = self._dense.tensors.get(name)
        return StoredTensor(shape, kept.dtype if kept else self._dense.tensors[f"{_layer(name)}.down_proj.weight"].dtype)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns whole tensors by global name."""
        return {name: self._read(name) for name in names}

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
        """Returns the box of one tensor that begins at `offset`."""
        whole = self._read(name)
        return whole[tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))]

    def _read(self, name: str) -> Tensor:
        if name in self._buffers and name not in self._dense.tensors:
            return self._buffers[name].clone()
        if name in self._dense.tensors:
            return self._dense.read([name])[name]
        part, _, rest = name.partition(".mlp.")[2].partition(".")
        if part == "router":
            return self._router(name)
        if part == "shared_gate":
            drawn = self._draw(name, self._shapes[name], self.model.init_std)
            return drawn.to(getattr(torch, self.tensors[name].dtype))
        matrix = rest.removesuffix(".weight")
        source = f"{_layer(name)}.{matrix}.weight"
        whole = self._dense.read([source])[source]
        if part == "experts":
            return self._experts(name, whole, leaves=matrix == "down_proj")
        if matrix == "down_proj":
            return whole.new_zeros(self._shapes[name])
        return whole[torch.arange(self._shapes[name][0]) % whole.shape[0]].clone()

    def _experts(self, name: str, whole: Tensor, leaves: bool) -> Tensor:
        parts = [part * self._scale for part in whole.split(self._width, 1)] if leaves else list(whole.split(self._width))
        made = whole.new_empty(self._shapes[name])
        for expert in range(len(made)):
            part = parts[expert % self._slices]
            made[expert] = part
            if self._noise:
                made[expert] += self._draw(f"{name}[{expert}]", part.shape, self._noise * float(part.float().std())).to(
                    part.dtype
                )
        return made

    def _router(self, name: str) -> Tensor:
        experts, dim = self._shapes[name]
        rows = self._draw(name, (experts // self._slices, dim), self.model.init_std)
        return rows.repeat_interleave(self._slices, 0).to(getattr(torch, self.tensors[name].dtype))

    def _draw(self, name: str, shape: Sequence[int], std: float) -> Tensor:
        digest = blake2b(f"{self._seed}/{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        return torch.randn(tuple(shape), generator=generator) * std


def _layer(name: str) -> str:
    return f"{name.partition('.mlp.')[0]}.mlp"


def _slices(moe: MoEShape, ffn_dim: int) -> int:
    """Returns the number of experts that make one copy of the dense layer.

    Raises:
        ForgeError: see `Upcycled`.
    """
    router: Any = moe.router
    if moe.branch_norms:
        raise ForgeError("a dense model has no norms of branches: set model.moe.branch_norms = false")
    if moe.latent_dim is not None:
        raise ForgeError("a dense model's feed-forward layers have the width of the model: remove model.moe.latent_dim")
    if getattr(router, "hash_layers", ()):
        raise ForgeError("a table of experts is drawn with the weights of a new model: remove model.moe.router.hash_layers")
    if getattr(router, "total", None) is None:
        how = "set model.moe.router.normalize = true" if hasattr(router, "normalize") else "choose router softmax_topk"
        raise ForgeError(f"the combine weights of a token must add up to one number: {how}")
    if ffn_dim % moe.ffn_dim:
        raise ForgeError(f"model.moe.ffn_dim {moe.ffn_dim} must divide the dense model's ffn_dim {ffn_dim}")
    slices = ffn_dim // moe.ffn_dim
    for key, value in (("experts", moe.experts), ("top_k", moe.top_k)):
        if value % slices:
            raise ForgeError(f"model.moe.{key} {value} must be a multiple of {slices}, the experts that make one dense part")
    if slices > 1 and not getattr(router, "learned", True):
        raise ForgeError(f"{type(router).__name__} cannot choose the {slices} experts of a dense part together")
    if isinstance(router, SigmoidTopKConfig) and (moe.experts // router.n_group) % slices:
        raise ForgeError(f"a group of model.moe.router.n_group {router.n_group} must hold whole copies of {slices} experts")
    return slices
