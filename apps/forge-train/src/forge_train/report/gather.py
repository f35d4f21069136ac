"""What a finished run tells its report."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forge_parallel.accelerator import name
from forge_train.report.machine import commit, machine, versions
from forge_train.report.write import write_report

if TYPE_CHECKING:
    from forge_train.recipe.load import Resolved
    from forge_train.run.run import Run


def write(run: "Run", resolved: "Resolved", reason: str, warnings: list[str]) -> Path:
    """Gathers the facts of a run and writes its report; rank 0 only."""
    return write_report(
        run.directory,
        {
            "name": run.job.job.name,
            "status": reason,
            "ended": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "config": resolved.origins(),
            "machine": machine() | _processes(run),
            "versions": versions() | commit(Path()),
            "model": {
                "parameters": run.parameters,
                "layout": str(run.topology.layout),
                "transforms": list(run.model.plan.names()),
            },
            "checkpoints": _checkpoints(run.directory),
            "warnings": [*warnings, *run.health.summary()],
            **facts(run),
        },
    )


def facts(run: "Run") -> dict[str, Any]:
    """What the data say of themselves: entropy of the corpus, bytes that a predicted token of each evaluation set says."""
    sets = {name: found.predicted() for name, found in run.evaluations.items()}
    known = {name: found for name, found in sets.items() if found is not None}
    return {
        "unigram_entropy": run.data.entropy(),
        "bytes_per_token": {name: size / tokens for name, (tokens, size) in known.items() if size > 0},
    }


def _processes(run: "Run") -> dict[str, str]:
    """What the run computed on."""
    return {
        "Device of rank 0": name(run.topology.device),
        "Processes": str(run.topology.size),
        "Threads per process": str(torch.get_num_threads()),
    }


def _checkpoints(directory: Path) -> list[dict[str, Any]]:
    """Committed checkpoints of a store on disk; another store keeps its own list."""
    return [
        {
            "path": folder.name,
            "step": int(folder.name.split("-")[1]),
            "bytes": sum(file.stat().st_size for file in folder.iterdir()),
        }
        for folder in sorted((directory / "checkpoints").glob("step-*"))
    ]
