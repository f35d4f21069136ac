"""Tensor parallelism of a recipe's model whose class comes with a plan of styles, such as those of transformers.

Embeddings and head are split along the vocabulary, as in every model; the plan says how the layers between them are split. The
model is traced before, because a plan names layers and not what happens between them (`foreign.tensor_trace`).
"""

from dataclasses import replace

import torch
from torch import nn

from forge_core.specs import Specs
from forge_parallel.foreign.description import followers, rules_of
from forge_parallel.foreign.tensor_trace import follow
from forge_parallel.transforms.tensor.rules import Role, Rules, tensor_parallel_rules

LENGTH = 8
"""Tokens of the rows that are traced."""


def planned_rules(part: nn.Module, specs: Specs, whole: Specs, tp: int) -> Rules:
    """Returns how a part, on the meta device, is split over `tp` ranks; `whole` are the specs of the whole model.

    Raises:
        PlanError: the plan does not fit the part, or the part computes across features that the plan splits.
    """
    ends = tensor_parallel_rules(specs, tp, sequence=False)
    if not specs.blocks:
        return ends
    layers = rules_of(part, specs.tp_plan or {})
    first = bool(specs.entry) or not whole.entry  # a class that no pipeline splits names no entry
    x = torch.zeros(2, LENGTH, dtype=torch.int64) if first else torch.zeros(2, LENGTH, specs.units["embed"])
    partial = follow(part, layers, {"x": x}, tp) | layers.summed | followers(part, layers)
    vocabulary = {path: role for path, role in ends.roles.items() if role in (Role.TABLE, Role.HEAD)}
    cut = {name: dim for name, dim in ends.cut.items() if name.rpartition(".")[0] in vocabulary}
    return replace(
        layers, cut={**layers.cut, **cut}, roles={**layers.roles, **vocabulary}, partial=frozenset(partial), summed=frozenset()
    )
