"""A foreign module as a pipeline can run it: what a stage does not have lets the hidden states pass.

A part is the whole module in which absent modules hand on what they are given. That is right only if the module computes
nothing on the hidden states between its modules, so this is tried: with everything left out, it has to be the identity.
"""

from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.errors import PlanError
from forge_core.specs import Specs
from forge_parallel.foreign.describe import describe
from forge_parallel.foreign.example import Example
from forge_parallel.foreign.handed import ADVICE, must_hand_on, units_of, visits
from forge_parallel.torch_private import tree_iter


class Passing(nn.Module):
    """Stands where another stage's module would."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """The first argument."""
        return hidden


class Staged(nn.Module):
    """Mixed into the class of a foreign module: describes itself, leaves modules out, and takes what a pipeline gives."""

    unit_paths: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    width: int

    def specs(self) -> Specs:
        """Of the modules that are here."""
        entry, blocks, leaving = (tuple(path for path in paths if self._here(path)) for paths in self.unit_paths)
        return replace(describe(self, blocks), units={"embed": self.width}, entry=entry, exit=leaving)

    def _here(self, path: str) -> bool:
        return not isinstance(self.get_submodule(path), Passing)

    def leave_out(self, path: str) -> None:
        """Puts a module in the place of another one that hands on what it is given; no other changes its name."""
        above, _, name = path.rpartition(".")
        self.get_submodule(above)._modules[name] = Passing()

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
        objective: Any = None,
    ) -> Any:
        """Inputs or hidden states -> hidden states, or what `objective` makes of the output."""
        out = super().forward(x)
        out = out if isinstance(out, Tensor) else out[0]
        return out if objective is None else objective(self, out, labels)


@cache
def _staged(original: type[nn.Module]) -> type[nn.Module]:
    return type(f"{original.__name__}Staged", (Staged, original), {})


def stage(module: nn.Module, blocks: list[str], example: Example) -> None:
    """Makes a foreign module, on the meta device but for its buffers, one that a pipeline can cut.

    Raises:
        PlanError: it is not clear what comes before and after the blocks, a block is given more than the hidden states, or the
            module does more than to call its modules.
    """
    units = units_of(module, blocks)
    if own := [
        path for path in units if path not in blocks and any(not path or block.startswith(f"{path}.") for block in blocks)
    ]:
        raise PlanError(
            f"parallelize: {own[0] or 'the root'} holds parameters outside the blocks directly, which no single stage can hold; "
            f"{ADVICE}"
        )
    one, other = (visits(module, units, blocks, example, seed) for seed in (1, 2))
    must_hand_on(module, one, other, units, blocks)
    order = [visit.path for visit in one]
    start = order.index(blocks[0])
    entry, leaving = tuple(order[:start]), tuple(order[start + len(blocks) :])
    hidden = one[start - 1].out
    given = [tuple(leaf.shape) for leaf in tree_iter(example) if isinstance(leaf, Tensor)]
    if len(given) != 1 or len(given[0]) != 2 or tuple(hidden.shape[:-1]) != given[0]:
        raise PlanError(
            "parallelize: a pipeline needs one input (rows, length), such as token ids, and hidden states (rows, length, width); "
            f"{type(module).__name__} is called with {', '.join(map(str, given))}, and {entry[-1]} makes {tuple(hidden.shape)}; "
            "set pp to 1"
        )
    width = hidden.shape[-1]
    module.__class__ = _staged(type(module))
    module.unit_paths, module.width = (entry, tuple(blocks), leaving), width  # type: ignore[assignment]
    _must_pass(module, (*entry, *blocks, *leaving), width)


def _must_pass(module: Any, paths: tuple[str, ...], width: int) -> None:
    empty = deepcopy(module)
    for path in paths:
        empty.leave_out(path)
    given = torch.randn(2, 4, width, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            found = empty(given.clone())
    except Exception as cause:
        raise PlanError(
            f"parallelize: {type(module).__name__} cannot be cut into stages: without its modules its forward fails: {cause}; "
            f"{ADVICE}"
        ) from cause
    if found.shape != given.shape or not torch.equal(found, given):
        raise PlanError(
            f"parallelize: {type(module).__name__} cannot be cut into stages: it computes something on the hidden states between "
            f"its modules, which every stage would repeat; {ADVICE}"
        )
