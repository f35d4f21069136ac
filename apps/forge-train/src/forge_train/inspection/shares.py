"""What one rank has of the inner values of a model that is cut over ranks.

What a rank hears depends on the layout. Rows differ over data ranks; places of a row over ranks of cp, and of tp where the stream
is cut along the sequence; heads and neurons over ranks of tp; layers over stages. For a value that several ranks have alike the
first of them answers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_core.batch import PADDING
from forge_models.inner_values import is_from, listening
from forge_models.interp.taps import InterpError, TapInfo, by_token
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.placement.shares import chunk
from forge_parallel.transforms.context.transform import ContextParallel

Places = str | int | Sequence[int] | slice
"""`all`, `last`, or places of a row: integers, negative ones from its end, or a slice from 0 or later."""


class Share(NamedTuple):
    """What one rank has of a value in one forward: t places of a row, k of the first dimension behind them.

    Attributes:
        value: (B, t, k, ...).
        rows: (B,) sample numbers.
        places: (t,) of this rank in the whole row.
        wanted: (B, t) bool, which of them are selected.
        start: which of the first dimension is this rank's first.
        tokens_cut: whether ranks of tp have other places.
        sends: whether this rank is the one that answers for its share.
    """

    value: Tensor
    rows: Tensor
    places: Tensor
    wanted: Tensor
    start: int
    tokens_cut: bool
    sends: bool


class _Running(NamedTuple):
    """One forward of a part."""

    rows: Tensor
    places: Tensor
    wanted: Tensor


class Shares:
    """Tells what this rank has of each inner value that it hears, inside of `heard_by`.

    Args:
        model: laid out by any of dp, hsdp, tp, cp, ep and pp.
        infos: the inner values that are meant, of the whole model.
        positions: see `Places`.
        samples: for each forward the sample number of each of this rank's rows; None = counted over data ranks and forwards.
        alike: all data ranks run the same rows, and the first one answers.
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
        self.order = next((one.order(layout.cp) for one in model.plan.transforms if isinstance(one, ContextParallel)), None)
        self.counts = [0] * len(model.parts)
        self.running: _Running | None = None

    @contextmanager
    def heard_by(self, hear: Callable[[str, Tensor], Tensor | None]) -> Iterator[None]:
        """`hear` is called with each value that the parts of the model pass inside, as `forge_models.inner_values.listening`."""
        with listening(hear), ExitStack() as hooks:
            for number, part in enumerate(self.model.parts):
                handles = (
                    part.register_forward_pre_hook(self._before(number), with_kwargs=True),
                    part.register_forward_hook(self._behind, always_call=True),
                )
                for handle in handles:
                    hooks.callback(handle.remove)
            yield

    def of(self, name: str, x: Tensor) -> Share | None:
        """This rank's share of a value that was heard; None where it is not one that is meant.

        Raises:
            InterpError: it has a shape that no rule explains.
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
            raise InterpError(f"{name} has {value.shape[1]} of {len(places)} tokens on this rank, which no layout explains")
        start, first_of_copies = self._features(name, value, info)
        return Share(value, running.rows, places, wanted, start, cut, self.answers and (cut or first_of_copies))

    def _features(self, name: str, value: Tensor, info: TapInfo) -> tuple[int, bool]:
        """Of the first dimension behind tokens: where this rank's share begins, and whether it is the first with this share."""
        here, all_of = value.shape[2], info.shape[0]
        if value.shape[3:] != torch.Size(info.shape[1:]):
            raise InterpError(f"{name} is {tuple(value.shape[2:])} a token on this rank, and {info.shape} in the whole model")
        if here == all_of:
            return 0, self.tp_rank == 0
        if "kv_heads" in info.dims and all_of < self.tp and here == 1:
            copies = self.tp // all_of
            return self.tp_rank // copies, self.tp_rank % copies == 0
        start, count = chunk(all_of, self.tp, self.tp_rank)
        if count != here:
            raise InterpError(f"{name} has {here} of {all_of} features on this rank, which no layout explains")
        return start, True

    def _before(self, number: int) -> Any:
        """A hook of part `number`: what its forward is about."""

        def note(_module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            x: Tensor = args[0] if args else given["x"]
            if given.get("cache") is not None:
                raise InterpError("a forward with a cache is not gathered from ranks, nor edited there; run rows as a whole")
            positions, documents, token_mask = given.get("positions"), given.get("documents"), given.get("token_mask")
            cut = x.dim() == 3 and positions is not None  # the stream of an earlier stage may be cut along the sequence
            length = positions.shape[-1] if cut and positions is not None else x.shape[1]
            forward, self.counts[number] = self.counts[number], self.counts[number] + 1
            places = self._places(length)
            real = token_mask if documents is None else documents != PADDING
            wanted = self._wanted(places, length * self.cp, real, len(x))
            self.running = _Running(self._rows(forward, len(x)), places, wanted)

        return note

    def _behind(self, *_: Any) -> None:
        """A hook behind the forward of any part."""
        self.running = None

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

    def _wanted(self, places: Tensor, length: int, real: Tensor | None, rows: int) -> Tensor:
        """(B, T) bool: the tokens that are meant. `real` (B, T) is False for padding; None = there is none."""
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
        """(B,) the last place of each row that is allowed; where rows may have padding, ranks that share rows ask each other."""
        ends = torch.where(allowed, places, -1).amax(1)
        if self.cp == 1:
            return ends
        if not padded:
            return torch.full_like(ends, self.cp * len(places) - 1)
        ends = ends.to(self.model.topology.device)
        dist.all_reduce(ends, dist.ReduceOp.MAX, self.model.topology.group("cp"))
        return ends.cpu()
