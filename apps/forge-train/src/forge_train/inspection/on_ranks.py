"""Inner values of a model that is cut over ranks: each selects what it has, and what was selected is gathered.

What a rank hears depends on the layout. Rows differ over data ranks; places of a row over ranks of cp, and of tp where the stream
is cut along the sequence; heads and neurons over ranks of tp; layers over stages. A value that several ranks have alike is sent
by the first of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forge_ckpt.ranks.world import Group, SingleProcessWorld
from forge_core.batch import PADDING
from forge_core.protocols.ckpt import World
from forge_models.interp.capture import checked
from forge_models.interp.listing import InterpError, TapInfo
from forge_models.interp.names import by_token
from forge_models.interp.tap import listening, speaks
from forge_parallel.build.parallel_model import ParallelModel
from forge_parallel.context.transform import ContextParallel
from forge_parallel.placement.shares import chunk
from forge_train.inspection.pieces import Piece, assembled, packed, unpacked

Places = str | int | Sequence[int] | slice
"""`all`, `last`, or places of a row: integers, negative ones from its end, or a slice from 0 or later."""


class Gathered(Mapping[str, Tensor]):
    """What was read, alike on all ranks once the context has ended. `gathered[name]` is (n, ...), a row for each token.

    Attributes:
        infos: the inner values by name.
        tokens: (n, 2) int64: sample number and place in its row of each token, in ascending order.
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
            raise InterpError(f"{name} is there once the context has ended, if a forward passed it")
        return self._values[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)


class _Running(NamedTuple):
    """One forward of a part.

    Attributes:
        rows: (B,) sample numbers.
        places: (T,) of this rank in the whole row.
        wanted: (B, T) bool.
    """

    rows: Tensor
    places: Tensor
    wanted: Tensor


@contextmanager
def capture_on_ranks(
    model: ParallelModel,
    whole: nn.Module,
    names: str | Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    positions: Places = "all",
    samples: Sequence[Sequence[int]] | None = None,
    alike: bool = False,
) -> Iterator[Gathered]:
    """Collective: reads inner values of every forward of `model` inside, and gathers what was selected where the context ends.

    Selections are those of `forge_models.interp.capture.capture`. Forwards are those of a step, of its evaluation, or of the
    model itself; the numbers of the run stay the same bits.

    Args:
        model: laid out by any of dp, hsdp, tp, cp, ep and pp.
        whole: the same model on the meta device, which knows shapes; `run.job.model.build()` there.
        samples: for each forward inside the sample number of each of this rank's rows, such as `batch.samples`; None = they are
            counted over data ranks and forwards.
        alike: all data ranks run the same rows, and the first one answers.

    Raises:
        InterpError: before a forward, what cannot be selected; what has a shape that no rule explains.
    """
    infos = checked(whole, names, layers, heads)
    if isinstance(positions, str) and positions not in ("all", "last"):
        raise InterpError(f"positions {positions!r} are not gathered from ranks; take 'all', and make it of what comes")
    listener = _Listener(model, infos, heads, positions, samples, alike)
    found = Gathered(infos)
    with listening(listener.hear), ExitStack() as hooks:
        for number, part in enumerate(model.parts):
            handles = (
                part.register_forward_pre_hook(listener.before(number), with_kwargs=True),
                part.register_forward_hook(listener.behind, always_call=True),
            )
            for handle in handles:
                hooks.callback(handle.remove)
        yield found
    world = Group(device=model.topology.device) if model.topology.size > 1 else SingleProcessWorld()
    _gather(found, listener.pieces, heads, world)


def _gather(found: Gathered, pieces: Mapping[str, list[Piece]], heads: Sequence[int] | None, world: World) -> None:
    for name, info in found.infos.items():
        sent = [piece for payload in world.all_gather(packed(pieces[name])) for piece in unpacked(payload)]
        if not sent:
            continue
        shape = info.shape if heads is None else (len(heads), *info.shape[1:])
        tokens, found._values[name] = assembled(name, sent, shape)
        if len(found.tokens) and not torch.equal(tokens, found.tokens):
            raise InterpError(f"{name} was passed for other tokens than the values before it; capture it apart")
        found.tokens = tokens


class _Listener:
    """What one rank hears."""

    def __init__(
        self,
        model: ParallelModel,
        infos: Mapping[str, TapInfo],
        heads: Sequence[int] | None,
        positions: Places,
        samples: Sequence[Sequence[int]] | None,
        alike: bool,
    ) -> None:
        self.model, self.infos, self.heads = model, infos, heads
        self.positions, self.samples = positions, samples
        at, layout = model.topology.coordinates, model.topology.layout
        self.tp, self.tp_rank, self.cp, self.cp_rank = layout.tp, at["tp"], layout.cp, at["cp"]
        self.answers = not alike or model.topology.data_rank == 0
        self.alike = alike
        self.order = next((one.order(layout.cp) for one in model.plan.transforms if isinstance(one, ContextParallel)), None)
        self.pieces: dict[str, list[Piece]] = {name: [] for name in infos}
        self.counts = [0] * len(model.parts)
        self.running: _Running | None = None

    def before(self, number: int) -> Any:
        """A hook of part `number`: what its forward is about."""

        def note(_module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            x: Tensor = args[0] if args else given["x"]
            if given.get("cache") is not None:
                raise InterpError("a forward with a cache is not gathered from ranks; run rows as a whole")
            positions, documents = given.get("positions"), given.get("documents")
            cut = x.dim() == 3 and positions is not None  # the stream of an earlier stage may be cut along the sequence
            length = positions.shape[-1] if cut and positions is not None else x.shape[1]
            forward, self.counts[number] = self.counts[number], self.counts[number] + 1
            places = self._places(length)
            self.running = _Running(
                self._rows(forward, len(x)), places, self._wanted(places, length * self.cp, documents, len(x))
            )

        return note

    def behind(self, *_: Any) -> None:
        """A hook behind the forward of any part."""
        self.running = None

    def hear(self, name: str, x: Tensor) -> None:
        """Keeps this rank's share of what is selected."""
        if name not in self.infos or self.running is None or not any(speaks(part) for part in self.model.parts):
            return
        running, info = self.running, self.infos[name]
        value = by_token(x.detach(), info.dims, len(running.rows))
        places, wanted = running.places, running.wanted
        if value.shape[1] == len(places):
            share = False
        elif value.shape[1] * self.tp == len(places):
            share, first = True, self.tp_rank * value.shape[1]
            places, wanted = places[first : first + value.shape[1]], wanted[:, first : first + value.shape[1]]
        else:
            raise InterpError(f"{name} has {value.shape[1]} of {len(places)} tokens on this rank, which no layout explains")
        start, count, first_of_copies = self._features(name, value, info)
        if not self.answers or not (share or first_of_copies):
            return
        chosen = list(range(start, start + count))
        if self.heads is not None:
            chosen = [head for head in self.heads if start <= head < start + count]
            value = value[:, :, [head - start for head in chosen]]
            chosen = [self.heads.index(head) for head in chosen]
        tokens = wanted.nonzero()
        rows = torch.stack([running.rows[tokens[:, 0]], places[tokens[:, 1]]], 1)
        self.pieces[name].append(Piece(rows.cpu(), torch.tensor(chosen), value[wanted].cpu()))

    def _features(self, name: str, value: Tensor, info: TapInfo) -> tuple[int, int, bool]:
        """Of the first dimension behind tokens: where this rank's share begins, its size, and whether this is the rank that
        sends it."""
        here, all_of = value.shape[2], info.shape[0]
        if value.shape[3:] != torch.Size(info.shape[1:]):
            raise InterpError(f"{name} is {tuple(value.shape[2:])} a token on this rank, and {info.shape} in the whole model")
        if here == all_of:
            return 0, here, self.tp_rank == 0
        if "kv_heads" in info.dims and all_of < self.tp and here == 1:
            copies = self.tp // all_of
            return self.tp_rank // copies, 1, self.tp_rank % copies == 0
        start, count = chunk(all_of, self.tp, self.tp_rank)
        if count != here:
            raise InterpError(f"{name} has {here} of {all_of} features on this rank, which no layout explains")
        return start, count, True

    def _rows(self, forward: int, rows: int) -> Tensor:
        if self.samples is None:
            data_size, data_rank = self.model.topology.data_size, self.model.topology.data_rank
            first = forward * rows if self.alike else (forward * data_size + data_rank) * rows
            return torch.arange(first, first + rows)
        if forward >= len(self.samples) or len(self.samples[forward]) != rows:
            raise InterpError(f"samples have no {rows} numbers for forward {forward}; give one for each row of each forward")
        return torch.tensor(list(self.samples[forward]), dtype=torch.int64)

    def _places(self, length: int) -> Tensor:
        if self.order is None or self.cp == 1:
            return torch.arange(length)
        return torch.cat([torch.arange(one.start, one.stop) for one in self.order.spans(self.cp_rank, length * self.cp)])

    def _wanted(self, places: Tensor, length: int, documents: Tensor | None, rows: int) -> Tensor:
        allowed = torch.ones(rows, len(places), dtype=torch.bool)
        if documents is not None:
            allowed = documents.cpu() != PADDING
        positions = self.positions
        if positions == "last":
            if not bool(allowed.all()):
                raise InterpError("positions 'last' of rows with padding are not gathered from ranks; take places")
            return allowed & (places == length - 1)
        if isinstance(positions, str):
            return allowed
        if isinstance(positions, slice):
            chosen = range(length)[positions]
        else:
            chosen = [positions] if isinstance(positions, int) else list(positions)
            if wrong := [place for place in chosen if not -length <= place < length]:
                raise InterpError(f"position {wrong[0]} is beyond the {length} tokens of a row")
        return allowed & torch.isin(places, torch.tensor([place % length for place in chosen], dtype=torch.int64))
