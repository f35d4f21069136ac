"""A model with other weights for a while, such as their average."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from forge_parallel.build.parallel_model import ParallelModel
from forge_parallel.placement.boxes import local_box


@contextmanager
def other_weights(model: ParallelModel, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, parameters have `values`, by global name and laid out as they are, rounded to their dtype; afterwards their own,
    bit by bit. What has no value keeps its own. This rank holds its share of the parameters twice meanwhile.

    For forwards without backward: nothing of an earlier forward may be pending.
    """
    model.reshard()  # a gathered copy would still have the other values
    held = [(local_box(tensor).local, local_box(values[name]).local) for name, tensor in model.tensors() if name in values]
    own = [here.clone() for here, _ in held]
    try:
        for here, value in held:
            here.copy_(value)
        yield
    finally:
        model.reshard()
        for (here, _), kept in zip(held, own, strict=True):
            here.copy_(kept)
