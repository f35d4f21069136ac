"""Changes inner values of a model that is cut over ranks: an edit sees them whole, each rank takes its share of the result."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from forge_ckpt.world import ProcessGroupWorld, SingleProcessWorld
from forge_core.protocols.checkpoint import World
from forge_models.interp.capture import checked, refuse_recomputation
from forge_models.interp.edit import AcrossRows, Edit, changed, refuse_uneditable
from forge_models.interp.taps import InterpError, TapInfo, as_passed
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.placement.topology import Topology
from forge_train.inspection.pieces import Piece, assembled, packed, unpacked
from forge_train.inspection.shares import Places, Share, Shares


@contextmanager
def edit_on_ranks(
    model: ParallelModel,
    whole: nn.Module,
    names: str | Sequence[str],
    how: Edit,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    positions: Places = "all",
) -> Iterator[None]:
    """Collective: changes inner values in every forward of `model` inside, as `forge_models.interp.edit.edit` on one process.

    Each edit sees values (B, T, ...) with all places and features: of the rows of this rank, or of an `AcrossRows` those of all
    data ranks, one after another. What a rank lacks comes from the others in each forward, so an edit of a value that ranks cut
    has no gradient, and costs the bytes of the whole on each of them. Functions for `replace` make the same on all ranks.

    Args:
        model: laid out by any of dp, hsdp, tp, cp, ep and pp.
        whole: the same model on the meta device, see `capture_on_ranks`.
        how: one of those in `forge_models.interp.edit`, or a function like theirs.

    Raises:
        InterpError: before a forward, what cannot be selected; in it, an edit that does not fit, or that would need a gradient.
    """
    infos = checked(whole, names, layers, heads)
    refuse_uneditable(infos, positions)
    if isinstance(positions, str) and positions not in ("all", "last"):
        raise InterpError(f"positions {positions!r} are not edited on ranks; take 'all', 'last' or places")
    shares = Shares(model, infos, positions)
    across = isinstance(how, AcrossRows)
    world = _world(model.topology, across)

    def hear(name: str, x: Tensor) -> Tensor | None:
        share = shares.of(name, x)
        if share is None:
            return None
        if torch.is_grad_enabled():
            for part in model.parts:
                refuse_recomputation(part)
        info = infos[name]
        if world.size == 1 or (not across and _is_whole(share, info, model.topology)):
            if not bool(share.wanted.any()):
                return None
            return as_passed(changed(name, share.value, share.wanted.to(x.device), how, heads), info.dims)
        if torch.is_grad_enabled():
            raise InterpError(
                f"{name} is cut over ranks, and an edit of it has no gradient; edit it in evaluation, or in a layout that does "
                "not cut it"
            )
        every = _together(name, share, info, world)
        if not bool(every.wanted.any()):
            return None
        made = changed(name, every.value.to(x.device), every.wanted.to(x.device), how, heads)
        rows = torch.searchsorted(every.rows, share.rows).to(x.device)
        made = made[rows][:, share.places.to(x.device)][:, :, share.start : share.start + share.value.shape[2]]
        return as_passed(made, info.dims).contiguous()

    with shares.heard_by(hear):
        yield


class _Together(NamedTuple):
    """A value with all places and features.

    Attributes:
        value: (B, T, ...).
        wanted: (B, T) bool.
        rows: (B,) sample numbers, ascending.
    """

    value: Tensor
    wanted: Tensor
    rows: Tensor


def _world(topology: Topology, across: bool) -> World:
    """Collective: the ranks that bring what this one lacks."""
    axes = ("dp_replicate", "dp_shard", "cp", "tp") if across else ("cp", "tp")
    cut = tuple(axis for axis in axes if topology.layout.size(axis) > 1)
    return ProcessGroupWorld(topology.across(cut), topology.device) if cut else SingleProcessWorld()


def _is_whole(share: Share, info: TapInfo, topology: Topology) -> bool:
    """Alike on all ranks that share a row."""
    return topology.layout.cp == 1 and not share.tokens_cut and share.value.shape[2] == info.shape[0]


def _together(name: str, share: Share, info: TapInfo, world: World) -> _Together:
    """Collective over the world: the shares of its ranks, put together."""
    value = share.value.detach()
    tokens = torch.cartesian_prod(share.rows, share.places).view(-1, 2)
    features = torch.arange(share.start, share.start + value.shape[2])
    mine = [Piece(tokens, features, value.flatten(0, 1).cpu())] if share.sends else []
    # Which places are meant is known where a place is; ranks of tp may have it alike.
    first = share.sends and share.start == 0
    marks = [Piece(tokens, torch.zeros(1, dtype=torch.int64), share.wanted.reshape(-1, 1))] if first else []
    values, wanted = [], []
    for payload in world.all_gather(_joined(packed(mine), packed(marks))):
        size = int.from_bytes(payload[:8], "little")
        values += unpacked(payload[8 : 8 + size])
        wanted += unpacked(payload[8 + size :])
    where, found = assembled(name, values, info.shape)
    _, meant = assembled(name, wanted, (1,))
    rows = where[:, 0].unique()
    return _Together(found.unflatten(0, (len(rows), -1)), meant.view(len(rows), -1), rows)


def _joined(first: bytes, second: bytes) -> bytes:
    return len(first).to_bytes(8, "little") + first + second
