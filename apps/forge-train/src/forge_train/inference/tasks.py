"""What libraries of tasks have in common: an index of tasks by name, seeds, and results on all ranks."""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy
import torch

from forge_core.errors import ForgeError
from forge_parallel import accelerator
from forge_parallel.placement.topology import Topology

Results = dict[str, dict[str, float]]
"""Metrics by the names of tasks."""


def results_of_first(results: Results, topology: Topology) -> Results:
    """Collective: returns the results of rank 0 on all ranks."""
    if topology.size == 1:
        return results
    payload = torch.tensor(list(json.dumps(results).encode()), dtype=torch.uint8)
    size = int(topology.from_first(torch.tensor(len(payload))))
    return json.loads(
        bytes(topology.from_first(payload if topology.rank == 0 else torch.zeros(size, dtype=torch.uint8)).tolist())
    )


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restores the random generators of Python, numpy and torch after the `with` block, because libraries of tasks seed them."""
    python, array = random.getstate(), numpy.random.get_state()
    try:
        with accelerator.random_states_kept():
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(array)


def task_index(library: str, index: Callable[..., Any], names: Iterable[str], folder: Path | None) -> Any:
    """Returns the index of a library's tasks, including those in a folder of task files.

    Args:
        library: name of the library, for messages.
        index: the class `TaskManager` of the library.
        names: names of tasks, groups or tags.
        folder: folder with own task files.

    Raises:
        ForgeError: a name is not a task; the error suggests similar names.
    """
    if folder is not None:
        if not folder.is_dir():
            raise ForgeError(f"the folder of tasks {folder} does not exist; create it, or set another folder")
        own = index(include_path=str(folder), include_defaults=False)
        if all(name in own.all_tasks for name in names):
            return own  # loading the tasks of the library would read thousands of files
    manager = index(include_path=None if folder is None else str(folder))
    for name in names:
        if name not in manager.all_tasks:
            near = get_close_matches(name, manager.all_tasks, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ForgeError(f"task {name!r} is neither in {library} nor in {folder or 'a folder of your own'}{hint}")
    return manager


def metric_values(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the metrics of a task by name: `acc,none` becomes `acc`; other filters stay in the name."""
    for key, value in metrics.items():
        metric, _, filtered = key.partition(",")
        if isinstance(value, int | float) and not isinstance(value, bool) and "_stderr" not in metric and filtered:
            yield metric if filtered == "none" else key, float(value)
