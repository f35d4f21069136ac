"""Router statistics of every layer for the trackers, and the load of every expert for the report."""

import json
import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from forge_ckpt.world import ProcessGroupWorld, SingleProcessWorld
from forge_core.durable_files import replace_file
from forge_core.protocols.checkpoint import World
from forge_core.protocols.model import Observer
from forge_core.protocols.run import Run
from forge_train.directory import ROUTING
from forge_train.hooks.periodic import Periodic

_log = logging.getLogger(__name__)


class RoutingHook(Periodic):
    """Every N steps, what layers of experts report of the step before. Per layer: `routing/blocks.3/load_max` and `load_min` (of
    an expert, in units of the mean load; 1 when even), `entropy` (of the router's probabilities, nats per token), `dropped`
    (share of the slots that capacity took away), `loss` (of the router's own, per token) and, where a bias balances, `bias_max`
    and `bias_min`.

    The counts are those of the whole batch of all ranks; a measurement costs two all-gathers and waits for the device.
    """

    observes = True

    world: World
    reports: bool

    def __init__(self, every: int = 100) -> None:
        super().__init__(every)

    def start(self, run: Run) -> None:
        """Collective: looks whether any part of the model reports."""
        self.world = ProcessGroupWorld() if run.topology.size > 1 else SingleProcessWorld()
        self.reports = any(self.world.all_gather(b"1" if _observers(run) else b""))
        if not self.reports:  # one table makes a recipe dense; its hooks need not change with it
            _log.info("hook 'routing' has nothing to report: the model has no [model.moe]")
        super().start(run)

    def act(self, run: Run) -> None:
        """Collective: gathers the reports, which are where each layer lives, and writes them."""
        if not self.reports:
            return
        counts = all(at == 0 for axis, at in run.topology.coordinates.items() if axis != "pp")
        mine = {path: _plain(module.report()) for path, module in _observers(run).items()} if counts else {}
        found: dict[str, Any] = {}
        for reports in self.world.all_gather(json.dumps(mine).encode()):
            found |= json.loads(reports)
        if run.topology.rank != 0 or not any(found.values()):
            return
        names = list(run.model.specs.tensors)
        shown = {path.removesuffix(".mlp"): found[path] for path in sorted(found, key=lambda path: _place(names, path))}
        run.log(
            {
                f"routing/{path}/{name}": value
                for path, report in shown.items()
                for name, value in report.items()
                if not isinstance(value, list)
            }
        )
        loads = {path: [round(load, 4) for load in report["load"]] for path, report in shown.items() if "load" in report}
        replace_file(run.directory / ROUTING, json.dumps({"step": run.state.step, "layers": loads}).encode())


def _plain(report: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: value.tolist() for name, value in report.items()}


def _observers(run: Run) -> dict[str, Observer]:
    """Those of this rank's parts, by path."""
    return {path: module for part in run.model.parts for path, module in part.named_modules() if isinstance(module, Observer)}


def _place(names: list[str], path: str) -> int:
    """Where the tensors of a module begin in the model."""
    return next((at for at, name in enumerate(names) if name.startswith(f"{path}.")), len(names))
