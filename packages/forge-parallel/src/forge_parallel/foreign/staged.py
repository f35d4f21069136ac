"""A foreign module as a pipeline can run it: what a stage does not have lets the hidden states pass.

A part is the whole module in which absent modules hand on what they are given. That is right only if the module computes
nothing on the hidden states between its modules, so this is tried: with everything left out, it has to be the identity.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.errors import PlanError
from forge_core.specs import Specs
from forge_parallel.foreign.describe import describe
from forge_parallel.foreign.example import Example
from forge_parallel.foreign.handed import ADVICE, changed, must_hand_on, must_not_reach, units_of, visits


class Passing(nn.Module):
    """Stands where another stage's module would."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """The first argument."""
        return hidden


class PipelineModule(nn.Module):
    """Mixed into the class of a foreign module: describes itself, leaves modules out, and takes what a pipeline gives."""

    unit_paths: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    width: int
    first_input: str | None
    """Of the arguments of forward, what the first stage gets; None: the only one."""
    last_inputs: frozenset[str]
    """What the last stage gets, such as labels."""

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

    def split_inputs(self, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """What the first stage gets of a batch, and what the last one gets.

        Raises:
            PlanError: an argument was not in the example that the module was laid out by.
        """
        others = dict(batch)
        first = others.pop(self.first_input if self.first_input in others else next(iter(others), ""), None)
        if first is None or others.keys() - self.last_inputs:
            raise PlanError(
                "a pipeline hands one input to the first stage, and to the last one what parallelize's example has besides, but "
                f"a batch has {', '.join(sorted(batch)) or 'nothing'}; name all of them in parallelize(..., example={{...}}), "
                "give what only the loss needs as targets=, or set pp to 1"
            )
        return first, others

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
        others = {} if objective is None else objective.arguments(labels)
        out = super().forward(x) if self.first_input is None else super().forward(**{self.first_input: x}, **others)
        if objective is not None:
            return objective(self, out, labels)
        return out if isinstance(out, Tensor) else out[0]


@cache
def _staged(original: type[nn.Module]) -> type[nn.Module]:
    return type(f"{original.__name__}Staged", (PipelineModule, original), {})


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
    first_input, last_inputs = _inputs(module, example)
    one, other = (visits(module, units, blocks, changed(example, seed, last_inputs)) for seed in (1, 2))
    must_hand_on(module, one, other, units, blocks)
    for name in sorted(last_inputs):
        must_not_reach(name, one, visits(module, units, blocks, changed(example, 1, last_inputs, name)))
    order = [visit.path for visit in one]
    start = order.index(blocks[0])
    entry, leaving = tuple(order[:start]), tuple(order[start + len(blocks) :])
    hidden = one[start - 1].out
    given = example if first_input is None else example[first_input]  # type: ignore[index]
    if not isinstance(given, Tensor) or given.dim() != 2 or hidden.shape[:-1] != given.shape:
        shape = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise PlanError(
            "parallelize: a pipeline needs one input (rows, length), such as token ids, and hidden states (rows, length, width); "
            f"{type(module).__name__} is called with {shape}, and {entry[-1]} makes {tuple(hidden.shape)}; set pp to 1"
        )
    width = hidden.shape[-1]
    module.__class__ = _staged(type(module))
    module.unit_paths, module.width = (entry, tuple(blocks), leaving), width  # type: ignore[assignment]
    module.first_input, module.last_inputs = first_input, last_inputs  # type: ignore[assignment]
    _must_pass(module, (*entry, *blocks, *leaving), width)


def _inputs(module: nn.Module, example: Example) -> tuple[str | None, frozenset[str]]:
    """Of the example's arguments that are tensors, the first one of forward, and the others."""
    if isinstance(example, Tensor):
        return None, frozenset()
    tensors = [name for name in signature(module.forward).parameters if isinstance(example.get(name), Tensor)]
    tensors += [name for name, value in example.items() if isinstance(value, Tensor) and name not in tensors]  # of **kwargs
    return next(iter(tensors or example)), frozenset(tensors[1:])


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
