"""Router statistics of every layer for the trackers, and the load of every expert for the report."""

import json
import logging
from typing import Any

import torch

from forge_core.durable import replace_file
from forge_core.protocols.run import Run
from forge_train.hooks.periodic import Periodic

_log = logging.getLogger(__name__)

ROUTING = "routing.json"
"""Loads at the newest look: {"step": ..., "layers": {"blocks.3": [load of each expert / mean load]}}."""

STACK = ".experts.up_proj"
"""End of the name of a tensor that every layer of experts has."""


class RoutingHook(Periodic):
    """Every N steps, of the step before: per layer `routing/blocks.3/load_max` and `load_min` (of an expert, in units of the
    mean load; 1 when even), `entropy` (of the router's probabilities, nats per token), `dropped` (share of the slots that
    capacity took away), `loss` (of the router's own, per token) and, where a bias balances, `bias_max` and `bias_min`.

    The counts are those of the whole batch of all ranks; a measurement costs one all-reduce and waits for the device.
    """

    experts: int

    def __init__(self, every: int = 100) -> None:
        super().__init__(every)

    def start(self, run: Run) -> None:
        """Looks whether the model has experts."""
        self.experts = getattr(getattr(run.job.model, "moe", None), "experts", 0)
        if not self.experts:  # one table makes a recipe dense; its hooks need not change with it
            _log.info("hook 'routing' has nothing to report: the model has no [model.moe]")
        super().start(run)

    def act(self, run: Run) -> None:
        """Gathers the counts, which lie where each layer lives, and writes them."""
        if not self.experts:
            return
        paths = [name.removesuffix(STACK) for name in run.model.specs.tensors if name.endswith(STACK)]
        table = torch.zeros(len(paths), 3 * self.experts + 4, dtype=torch.float64, device=run.topology.device)
        if all(at == 0 for axis, at in run.topology.coordinates.items() if axis != "pp"):
            for part in run.model.parts:
                for path, module in part.named_modules():
                    if path in paths and getattr(module, "totals", None) is not None:
                        table[paths.index(path)] = self._row(module)
        table = run.topology.all_reduce(table).cpu()
        if run.topology.rank != 0 or not bool(table[:, -1].any()):
            return
        shown = {path.removesuffix(".mlp"): row for path, row in zip(paths, table, strict=True)}
        run.log(
            {
                f"routing/{path}/{name}": value
                for path, row in shown.items()
                for name, value in _numbers(row, self.experts).items()
            }
        )
        loads = {path: [round(load, 4) for load in _relative(row[: self.experts]).tolist()] for path, row in shown.items()}
        replace_file(run.directory / ROUTING, json.dumps({"step": run.state.step, "layers": loads}).encode())

    def _row(self, module: Any) -> torch.Tensor:
        """Load, dropped slots and bias of each expert; tokens, entropy, loss, and whether there is a bias (2) or none (1)."""
        totals, bias = module.totals, getattr(module.router, "bias", None)
        row = [totals.load, totals.dropped, torch.zeros_like(totals.load) if bias is None else bias.double()]
        known = torch.full_like(totals.tokens, 1.0 if bias is None else 2.0)
        return torch.cat([*row, torch.stack([totals.tokens, totals.entropy, totals.loss, known])])


def _numbers(row: torch.Tensor, experts: int) -> dict[str, float]:
    load, dropped, bias, (tokens, entropy, loss, known) = *row[: 3 * experts].split(experts), row[3 * experts :].tolist()
    relative, tokens = _relative(load), max(tokens, 1.0)
    found = {
        "load_max": float(relative.max()),
        "load_min": float(relative.min()),
        "entropy": entropy / tokens,
        "dropped": float(dropped.sum() / load.sum().clamp(min=1)),
        "loss": loss / tokens,
    }
    return found | ({"bias_max": float(bias.max()), "bias_min": float(bias.min())} if known == 2.0 else {})


def _relative(load: torch.Tensor) -> torch.Tensor:
    return load / load.mean().clamp(min=1e-9)
