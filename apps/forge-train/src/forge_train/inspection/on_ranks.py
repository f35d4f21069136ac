"""Reads inner values of a model that is cut over ranks: each selects what it has, and what was selected is gathered."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from forge_ckpt.world import ProcessGroupWorld, SingleProcessWorld
from forge_core.protocols.checkpoint import World
from forge_models.interp.capture import checked
from forge_models.interp.taps import InterpError, TapInfo
from forge_parallel.model.parallel_model import ParallelModel
from forge_train.inspection.pieces import Piece, assembled, packed, unpacked
from forge_train.inspection.shares import Places, Shares


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
            raise InterpError(
                f"{name} is there once the context has ended, if a forward passed it: one with a loss makes no logits, and one "
                "without images nothing of them"
            )
        return self._values[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)


class Kept:
    """The shares of this rank that are selected, of every forward, for a gather.

    Attributes:
        pieces: by inner value.
    """

    def __init__(self, shares: Shares, heads: Sequence[int] | None) -> None:
        self.shares, self.heads = shares, None if heads is None else list(heads)
        self.pieces: dict[str, list[Piece]] = {name: [] for name in shares.infos}

    def hear(self, name: str, x: Tensor) -> None:
        """Keeps this rank's share of what is selected."""
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
        self.pieces[name].append(Piece(rows, torch.tensor(chosen), value[share.wanted].cpu()))

    def gathered(self, world: World) -> Gathered:
        """Collective over the world: what its ranks kept, put together. Nothing stays here.

        Raises:
            InterpError: some rank had no share, or two had the same one.
        """
        found = Gathered(self.shares.infos)
        for name, info in found.infos.items():
            sent = [piece for payload in world.all_gather(packed(self.pieces[name])) for piece in unpacked(payload)]
            self.pieces[name].clear()
            if not sent:
                continue
            shape = info.shape if self.heads is None else (len(self.heads), *info.shape[1:])
            tokens, found._values[name] = assembled(name, sent, shape)
            if len(found.tokens) and not torch.equal(tokens, found.tokens):
                raise InterpError(f"{name} was passed for other tokens than the values before it; capture it apart")
            found.tokens = tokens
        return found


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
    kept = Kept(Shares(model, infos, positions, samples, alike), heads)
    found = Gathered(infos)
    with kept.shares.heard_by(kept.hear):
        yield found
    every = kept.gathered(ProcessGroupWorld(device=model.topology.device) if model.topology.size > 1 else SingleProcessWorld())
    found.tokens, found._values = every.tokens, every._values
