"""Reads and edits inner values of a model that is sharded over ranks.

A capture selects on each rank from its local share and gathers only the selection; an edit sees whole values, and each rank takes
its share of the result. The local share depends on the layout: rows are split over data ranks, positions over cp ranks (and tp
ranks with sequence parallelism), heads and neurons over tp ranks, layers over pipeline stages. If several ranks hold the same
value, the first of them sends it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_ckpt.world import ProcessGroupWorld, SingleProcessWorld
from forge_core.batch import PADDING
from forge_core.protocols.checkpoint import World
from forge_interp.captures import refuse_recomputation, select_taps
from forge_interp.edits import AcrossRows, Edit, changed, refuse_uneditable
from forge_interp.tap_names import InterpError, TapInfo, as_passed, by_token
from forge_models.inner_values import is_from, listening
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.placement.shares import chunk
from forge_parallel.placement.topology import Topology
from forge_parallel.transforms.context.transform import ContextParallel

Places = str | int | Sequence[int] | slice
"""Positions in a row: `all`, `last`, integers (negative ones count from the end), or a slice with a start of at least 0."""


class LocalShare(NamedTuple):
    """Local share of a value in one forward: t positions of a row, and k entries of the first dimension after the positions.

    Attributes:
        value: (B, t, k, ...) local values.
        rows: (B,) sample numbers.
        places: (t,) positions in the whole row.
        wanted: (B, t) bool mask of the selected tokens.
        start: offset of the k entries in the whole first dimension.
        tokens_cut: whether the tp ranks hold different positions.
        sends: whether this rank sends the share; False if another rank sends the same values.
    """

    value: Tensor
    rows: Tensor
    places: Tensor
    wanted: Tensor
    start: int
    tokens_cut: bool
    sends: bool


class _Running(NamedTuple):
    """Rows, positions and mask of the current forward of a model part."""

    rows: Tensor
    places: Tensor
    wanted: Tensor


class Shares:
    """Computes the local share of each inner value that is read inside `heard_by`.

    Args:
        model: model sharded by any of dp, hsdp, tp, cp, ep and pp.
        infos: inner values to read, as in the whole model.
        positions: see `Places`.
        samples: sample numbers of this rank's rows, one sequence per forward; None numbers them over data ranks and forwards.
        alike: whether all data ranks run the same rows; the first rank then sends the values.
    """

    def __init__(
        self,
        model: ParallelModel,
        infos: Mapping[str, TapInfo],
        positions: Places = "all",
        samples: Sequence[Sequence[int]] | None = None,
        alike: bool = False,
    ) -> None:
        self.model, self.infos = model, infos
        self.positions, self.samples, self.alike = positions, samples, alike
        at, layout = model.topology.coordinates, model.topology.layout
        self.tp, self.tp_rank, self.cp, self.cp_rank = layout.tp, at["tp"], layout.cp, at["cp"]
        self.answers = not alike or model.topology.data_rank == 0
        self.order = next(
            (one.sequence_order(layout.cp) for one in model.plan.transforms if isinstance(one, ContextParallel)), None
        )
        self.counts = [0] * len(model.parts)
        self.running: _Running | None = None

    @contextmanager
    def heard_by(self, hear: Callable[[str, Tensor], Tensor | None]) -> Iterator[None]:
        """Context in which `hear` is called with each inner value of the model's parts, as in
        `forge_models.inner_values.listening`."""
        with listening(hear), ExitStack() as hooks:
            for number, part in enumerate(self.model.parts):
                handles = (
                    part.register_forward_pre_hook(self._before(number), with_kwargs=True),
                    part.register_forward_hook(self._behind, always_call=True),
                )
                for handle in handles:
                    hooks.callback(handle.remove)
            yield

    def of(self, name: str, x: Tensor) -> LocalShare | None:
        """Returns the local share of a value passed to `hear`, or None if the value is not in `infos`.

        Raises:
            InterpError: the local shape of the value does not match any supported sharding.
        """
        if name not in self.infos or self.running is None or not any(is_from(part) for part in self.model.parts):
            return None
        running, info = self.running, self.infos[name]
        value = by_token(x, info.dims, len(running.rows))
        places, wanted = running.places, running.wanted
        cut = value.shape[1] != len(places)
        if cut and value.shape[1] * self.tp == len(places):
            mine = slice(self.tp_rank * value.shape[1], (self.tp_rank + 1) * value.shape[1])
            places, wanted = places[mine], wanted[:, mine]
        elif cut:
            raise InterpError(
                f"{name} has {value.shape[1]} of {len(places)} tokens on this rank, which matches no supported layout"
            )
        start, first_of_copies = self._features(name, value, info)
        return LocalShare(value, running.rows, places, wanted, start, cut, self.answers and (cut or first_of_copies))

    def _features(self, name: str, value: Tensor, info: TapInfo) -> tuple[int, bool]:
        """Returns the offset of the local share in the first dimension after the tokens, and whether this rank is the first."""
        here, all_of = value.shape[2], info.shape[0]
        if value.shape[3:] != torch.Size(info.shape[1:]):
            raise InterpError(f"{name} is {tuple(value.shape[2:])} per token on this rank, but {info.shape} in the whole model")
        if here == all_of:
            return 0, self.tp_rank == 0
        if "kv_heads" in info.dims and all_of < self.tp and here == 1:
            copies = self.tp // all_of
            return self.tp_rank // copies, self.tp_rank % copies == 0
        start, count = chunk(all_of, self.tp, self.tp_rank)
        if count != here:
            raise InterpError(f"{name} has {here} of {all_of} features on this rank, which matches no supported layout")
        return start, True

    def _before(self, number: int) -> Any:
        """Returns a forward pre-hook of part `number`, which records the rows, positions and mask of the forward."""

        def note(_module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            x: Tensor = args[0] if args else given["x"]
            if given.get("cache") is not None:
                raise InterpError(
                    "on several ranks, inner values cannot be read or edited in a forward with a cache; run whole rows"
                )
            positions, documents, token_mask = given.get("positions"), given.get("documents"), given.get("token_mask")
            cut = x.dim() == 3 and positions is not None  # an earlier stage may send hidden states split along the sequence
            length = positions.shape[-1] if cut and positions is not None else x.shape[1]
            forward, self.counts[number] = self.counts[number], self.counts[number] + 1
            places = self._places(length)
            real = token_mask if documents is None else documents != PADDING
            wanted = self._wanted(places, length * self.cp, real, len(x))
            self.running = _Running(self._rows(forward, len(x)), places, wanted)

        return note

    def _behind(self, *_: Any) -> None:
        """Forward hook that ends the record of the current forward."""
        self.running = None

    def _rows(self, forward: int, rows: int) -> Tensor:
        if self.samples is None:
            data_size, data_rank = self.model.topology.data_size, self.model.topology.data_rank
            first = forward * rows if self.alike else (forward * data_size + data_rank) * rows
            return torch.arange(first, first + rows)
        if forward >= len(self.samples) or len(self.samples[forward]) != rows:
            raise InterpError(f"samples does not have {rows} numbers for forward {forward}; give one per row of each forward")
        return torch.tensor(list(self.samples[forward]), dtype=torch.int64)

    def _places(self, length: int) -> Tensor:
        if self.order is None or self.cp == 1:
            return torch.arange(length)
        return torch.cat([torch.arange(one.start, one.stop) for one in self.order.spans(self.cp_rank, length * self.cp)])

    def _wanted(self, places: Tensor, length: int, real: Tensor | None, rows: int) -> Tensor:
        """Returns the (B, T) bool mask of the selected tokens. `real` (B, T) is False for padding; None means no padding."""
        allowed = torch.ones(rows, len(places), dtype=torch.bool) if real is None else real.cpu()
        positions = self.positions
        if positions == "last":
            return allowed & (places == self._ends(places, allowed, real is not None)[:, None])
        if isinstance(positions, str):
            return allowed
        if isinstance(positions, slice):
            chosen = range(length)[positions]
        else:
            chosen = [positions] if isinstance(positions, int) else list(positions)
            if wrong := [place for place in chosen if not -length <= place < length]:
                raise InterpError(f"position {wrong[0]} is beyond the {length} tokens of a row")
        return allowed & torch.isin(places, torch.tensor([place % length for place in chosen], dtype=torch.int64))

    def _ends(self, places: Tensor, allowed: Tensor, padded: bool) -> Tensor:
        """Returns (B,) the last allowed position of each row. Collective over cp if rows may have padding."""
        ends = torch.where(allowed, places, -1).amax(1)
        if self.cp == 1:
            return ends
        if not padded:
            return torch.full_like(ends, self.cp * len(places) - 1)
        ends = ends.to(self.model.topology.device)
        dist.all_reduce(ends, dist.ReduceOp.MAX, self.model.topology.group("cp"))
        return ends.cpu()


class ValuePiece(NamedTuple):
    """Selected local values of one forward.

    Attributes:
        tokens: (n, 2) int64 sample number and position.
        features: (k,) int64 indexes in the first dimension of the whole value.
        value: (n, k, ...) values.
    """

    tokens: Tensor
    features: Tensor
    value: Tensor


def pack(pieces: Sequence[ValuePiece]) -> bytes:
    """Serializes the pieces; skips empty ones."""
    kept = [piece for piece in pieces if piece.value.numel()]
    headers = [
        [list(piece.tokens.shape), len(piece.features), list(piece.value.shape), str(piece.value.dtype).removeprefix("torch.")]
        for piece in kept
    ]
    header = json.dumps(headers).encode()
    return b"".join(
        [len(header).to_bytes(8, "little"), header, *(_bytes(tensor) for piece in kept for tensor in piece)] if kept else []
    )


def unpack(payload: bytes) -> Iterator[ValuePiece]:
    """Yields the pieces that `pack` wrote."""
    if not payload:
        return
    size = int.from_bytes(payload[:8], "little")
    at = 8 + size
    for tokens, features, value, dtype in json.loads(payload[8:at]):
        parts = []
        for shape, kind in ((tokens, torch.int64), ([features], torch.int64), (value, getattr(torch, dtype))):
            length = torch.Size(shape).numel() * kind.itemsize
            parts.append(torch.frombuffer(bytearray(payload[at : at + length]), dtype=kind).view(shape))
            at += length
        yield ValuePiece(*parts)


def assemble_pieces(name: str, pieces: Sequence[ValuePiece], shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns the (n, 2) tokens in ascending order and the value (n, *shape).

    Raises:
        InterpError: a share is missing, or two ranks sent the same one.
    """
    tokens, back = torch.cat([piece.tokens for piece in pieces]).unique(dim=0, return_inverse=True)
    value = torch.empty(len(tokens), *shape, dtype=pieces[0].value.dtype)
    times = torch.zeros(len(tokens), shape[0], dtype=torch.int64)
    for piece, rows in zip(pieces, back.split([len(piece.tokens) for piece in pieces]), strict=True):
        place = (rows[:, None], piece.features[None])
        value[place] = piece.value
        times.index_put_(place, torch.ones((), dtype=torch.int64), accumulate=True)
    if not bool((times == 1).all()):
        raise InterpError(
            f"{name}: a share is missing, or two ranks sent the same one; check that sample numbers are unique, and that `alike` "
            "is set only if all data ranks run the same rows"
        )
    return tokens, value


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class GatheredValues(Mapping[str, Tensor]):
    """Gathered values, the same on all ranks, available after the context has ended. `gathered[name]` is (n, ...), one row per
    token.

    Attributes:
        infos: inner values by name.
        tokens: (n, 2) int64 sample number and position of each token, in ascending order.
    """

    def __init__(self, infos: Mapping[str, TapInfo]) -> None:
        self.infos = dict(infos)
        self.tokens = torch.empty(0, 2, dtype=torch.int64)
        self._values: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        aliases = {one.alias: path for path, one in self.infos.items()}
        path = aliases.get(name, name)
        if path not in self.infos:
            raise InterpError(f"{name} was not captured; captured: {', '.join(self.infos)}")
        if path not in self._values:
            raise InterpError(
                f"{name} is not available: read it after the context has ended. A forward with a loss computes no logits, and "
                "one without images no values of images"
            )
        return self._values[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)


class LocalShares:
    """Collects the selected local shares of every forward, for a gather.

    Attributes:
        pieces: pieces by inner value.
    """

    def __init__(self, shares: Shares, heads: Sequence[int] | None) -> None:
        self.shares, self.heads = shares, None if heads is None else list(heads)
        self.pieces: dict[str, list[ValuePiece]] = {name: [] for name in shares.infos}

    def hear(self, name: str, x: Tensor) -> None:
        """Stores the selected part of the local share, if this rank sends it."""
        share = self.shares.of(name, x.detach())
        if share is None or not share.sends:
            return
        value, chosen = share.value, list(range(share.start, share.start + share.value.shape[2]))
        if self.heads is not None:
            here = [head for head in self.heads if head in chosen]
            value = value[:, :, [head - share.start for head in here]]
            chosen = [self.heads.index(head) for head in here]
        tokens = share.wanted.nonzero()
        rows = torch.stack([share.rows[tokens[:, 0]], share.places[tokens[:, 1]]], 1)
        self.pieces[name].append(ValuePiece(rows, torch.tensor(chosen), value[share.wanted].cpu()))

    def gathered(self, world: World) -> GatheredValues:
        """Collective: gathers the pieces of all ranks of the world and clears the local ones.

        Raises:
            InterpError: a share is missing, or two ranks sent the same one.
        """
        found = GatheredValues(self.shares.infos)
        for name, info in found.infos.items():
            sent = [piece for payload in world.all_gather(pack(self.pieces[name])) for piece in unpack(payload)]
            self.pieces[name].clear()
            if not sent:
                continue
            shape = info.shape if self.heads is None else (len(self.heads), *info.shape[1:])
            tokens, found._values[name] = assemble_pieces(name, sent, shape)
            if len(found.tokens) and not torch.equal(tokens, found.tokens):
                raise InterpError(f"{name} has other tokens than the values before it; capture it separately")
            found.tokens = tokens
        return found


@contextmanager
def capture_sharded(
    model: ParallelModel,
    whole: nn.Module,
    names: str | Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    positions: Places = "all",
    samples: Sequence[Sequence[int]] | None = None,
    alike: bool = False,
) -> Iterator[GatheredValues]:
    """Collective: context that reads inner values of every forward of `model` and gathers the selected ones at its end.

    Selection works as in `forge_interp.captures.capture`. A forward may be part of a training step, of an evaluation, or a direct
    call of the model; the results of the run stay bitwise identical.

    Args:
        model: model sharded by any of dp, hsdp, tp, cp, ep and pp.
        whole: the same model on the meta device, for the shapes: `run.job.model.build()` under `torch.device("meta")`.
        samples: sample numbers of this rank's rows, one sequence per forward, such as `batch.samples`; None numbers them over
            data ranks and forwards.
        alike: whether all data ranks run the same rows; the first rank then sends the values.

    Raises:
        InterpError: the selection is invalid (raised before any forward), or the local shape of a value does not match any
            supported sharding.
    """
    infos = select_taps(whole, names, layers, heads)
    if isinstance(positions, str) and positions not in ("all", "last"):
        raise InterpError(f"positions {positions!r} are not supported on several ranks; use 'all', and select from the result")
    kept = LocalShares(Shares(model, infos, positions, samples, alike), heads)
    found = GatheredValues(infos)
    with kept.shares.heard_by(kept.hear):
        yield found
    every = kept.gathered(ProcessGroupWorld(device=model.topology.device) if model.topology.size > 1 else SingleProcessWorld())
    found.tokens, found._values = every.tokens, every._values


@contextmanager
def edit_sharded(
    model: ParallelModel,
    whole: nn.Module,
    names: str | Sequence[str],
    how: Edit,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    positions: Places = "all",
) -> Iterator[None]:
    """Collective: context that edits inner values in every forward of `model`, as `forge_interp.edits.edit` does on one process.

    Each edit receives values (B, T, ...) with all positions and features: of this rank's rows, or, for an `AcrossRows` edit, of
    the rows of all data ranks, concatenated. Missing shares are gathered from the other ranks in each forward, so an edit of a
    sharded value has no gradient and each rank holds the whole value. A function passed to `replace` must return the same on all
    ranks.

    Args:
        model: model sharded by any of dp, hsdp, tp, cp, ep and pp.
        whole: the same model on the meta device, see `capture_sharded`.
        how: an edit from `forge_interp.edits`, or a function with the same signature.

    Raises:
        InterpError: the selection is invalid (raised before any forward), the result of an edit does not fit, or a sharded value
            would need a gradient.
    """
    infos = select_taps(whole, names, layers, heads)
    refuse_uneditable(infos, positions)
    if isinstance(positions, str) and positions not in ("all", "last"):
        raise InterpError(f"positions {positions!r} are not supported on several ranks; use 'all', 'last' or integers")
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
                f"{name} is split over ranks, so an edit of it has no gradient; edit it in evaluation, or use a layout that does "
                "not split it"
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
    """A value with all positions and features.

    Attributes:
        value: (B, T, ...).
        wanted: (B, T) bool.
        rows: (B,) sample numbers, ascending.
    """

    value: Tensor
    wanted: Tensor
    rows: Tensor


def _world(topology: Topology, across: bool) -> World:
    """Collective: returns the world of the ranks that hold the missing shares of this rank."""
    axes = ("dp_replicate", "dp_shard", "cp", "tp") if across else ("cp", "tp")
    cut = tuple(axis for axis in axes if topology.layout.size(axis) > 1)
    return ProcessGroupWorld(topology.across(cut), topology.device) if cut else SingleProcessWorld()


def _is_whole(share: LocalShare, info: TapInfo, topology: Topology) -> bool:
    """Whether the share is the whole value of its rows; the result is the same on all ranks that share a row."""
    return topology.layout.cp == 1 and not share.tokens_cut and share.value.shape[2] == info.shape[0]


def _together(name: str, share: LocalShare, info: TapInfo, world: World) -> _Together:
    """Collective: gathers and assembles the shares of all ranks of the world."""
    value = share.value.detach()
    tokens = torch.cartesian_prod(share.rows, share.places).view(-1, 2)
    features = torch.arange(share.start, share.start + value.shape[2])
    mine = [ValuePiece(tokens, features, value.flatten(0, 1).cpu())] if share.sends else []
    # The mask is sent by the rank with the first features, because tp ranks may hold the same positions.
    first = share.sends and share.start == 0
    marks = [ValuePiece(tokens, torch.zeros(1, dtype=torch.int64), share.wanted.reshape(-1, 1))] if first else []
    values, wanted = [], []
    for payload in world.all_gather(_joined(pack(mine), pack(marks))):
        size = int.from_bytes(payload[:8], "little")
        values += unpack(payload[8 : 8 + size])
        wanted += unpack(payload[8 + size :])
    where, found = assemble_pieces(name, values, info.shape)
    _, meant = assemble_pieces(name, wanted, (1,))
    rows = where[:, 0].unique()
    return _Together(found.unflatten(0, (len(rows), -1)), meant.view(len(rows), -1), rows)


def _joined(first: bytes, second: bytes) -> bytes:
    return len(first).to_bytes(8, "little") + first + second
