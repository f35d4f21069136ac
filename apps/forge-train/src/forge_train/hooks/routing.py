"""Hook `routing`: router statistics of every layer for the trackers, and the load of every expert for the report."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Gt

from forge_ckpt.world import ProcessGroupWorld, SingleProcessWorld
from forge_core.component import FREE
from forge_core.files import replace_file
from forge_core.protocols.model import Observer
from forge_core.protocols.run import Run
from forge_train.directory import ROUTING
from forge_train.hooks.periodic import Periodic

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RoutingStatistics(Periodic):
    """Logs router statistics: load, entropy, dropped slots and bias of every layer, and a heat map for the report.

    Per layer: `routing/blocks.3/load_max` and `load_min` (load of an expert relative to the mean load; 1 when balanced),
    `entropy` (of the router's probabilities, nats per token), `dropped` (share of slots dropped because of the capacity), `loss`
    (the router's own loss, per token) and, with bias-based balancing, `bias_max` and `bias_min`. Of attention with an indexer
    `routing/blocks.3.attention/kl`, its divergence from the attention weights in nats per token. Counts cover the whole batch of
    all ranks. A measurement costs two all-gathers and waits for the device.
    """

    key_class: ClassVar = FREE
    observes = True

    every: Annotated[int, Gt(0)] = 100
    """Optimizer steps between two measurements; the last step is always measured."""

    def start(self, run: Run) -> None:
        """Collective: checks whether any part of the model reports statistics."""
        self.world = ProcessGroupWorld() if run.topology.size > 1 else SingleProcessWorld()
        self.reports = any(self.world.all_gather(b"1" if _observers(run) else b""))
        if not self.reports:  # allowed, so that a dense variant of a recipe can keep its hooks
            _log.info("hook 'routing' has nothing to report: the model has neither [model.moe] nor an indexer")
        super().start(run)

    def act(self, run: Run) -> None:
        """Collective: gathers the reports from the ranks of their layers, and writes them."""
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


def _plain(report: "Mapping[str, Tensor]") -> dict[str, Any]:
    return {name: value.tolist() for name, value in report.items()}


def _observers(run: Run) -> dict[str, Observer]:
    """Returns the observers in this rank's parts of the model, by path."""
    return {path: module for part in run.model.parts for path, module in part.named_modules() if isinstance(module, Observer)}


def _place(names: list[str], path: str) -> int:
    """Returns the index of a module's first tensor in the model."""
    return next((at for at, name in enumerate(names) if name.startswith(f"{path}.")), len(names))
