"""Facts about a finished run and its machine for the report, without the machine's name, addresses or environment variables."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.machine import processor_name, usable_cores
from forge_core.terminal import size
from forge_train.report.page import write_report

if TYPE_CHECKING:
    from forge_train.recipe.load import Resolved
    from forge_train.run.run import Run


def write_run_report(run: "Run", resolved: "Resolved", reason: str, warnings: list[str]) -> Path:
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
                "parameters": run.training.parameters,
                "layout": str(run.topology.layout),
                "transforms": list(run.model.plan.names()),
            },
            "checkpoints": _checkpoints(run.directory),
            "warnings": [*warnings, *run.health.summary()],
            **data_facts(run),
        },
    )


def data_facts(run: "Run") -> dict[str, Any]:
    """Returns the unigram entropy of the corpus, and the mean bytes of text per predicted token of each held-out set."""
    sets = {name: found.predicted() for name, found in run.evaluations.items()}
    known = {name: found for name, found in sets.items() if found is not None}
    return {
        "unigram_entropy": run.data.entropy(),
        "bytes_per_token": {name: size / tokens for name, (tokens, size) in known.items() if size > 0},
    }


def _processes(run: "Run") -> dict[str, str]:
    """Returns the device of rank 0, the number of processes, and the threads per process."""
    import torch

    from forge_parallel.accelerator import name

    return {
        "Device of rank 0": name(run.topology.device),
        "Processes": str(run.topology.size),
        "Threads per process": str(torch.get_num_threads()),
    }


def _checkpoints(directory: Path) -> list[dict[str, Any]]:
    """Returns the committed checkpoints in the run's directory; a remote store is not listed."""
    return [
        {
            "path": folder.name,
            "step": int(folder.name.split("-")[1]),
            "bytes": sum(file.stat().st_size for file in folder.iterdir()),
        }
        for folder in sorted((directory / "checkpoints").glob("step-*"))
    ]


_PACKAGES = ("torch", "numpy", "tokenizers", "pydantic")
_OURS = (
    "forge-train",
    "forge-core",
    "forge-parallel",
    "forge-models",
    "forge-data",
    "forge-ckpt",
    "forge-vlm",
    "forge-interp",
    "forge-lab",
)


def machine() -> dict[str, str]:
    """Returns processor, cores, memory and operating system."""
    found = {
        "Processor": processor_name(),
        "CPU cores": str(usable_cores()),
        "System": f"{platform.system()} {platform.release()}",
    }
    if "SC_PHYS_PAGES" in os.sysconf_names:
        found["Memory"] = size(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return found


def versions() -> dict[str, str]:
    """Returns the versions of Python, of libraries that affect numbers, and of Forge."""
    found = {"Python": platform.python_version()}
    for name in (*_PACKAGES, *_OURS):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit(directory: Path) -> dict[str, str]:
    """Returns the git commit of a directory, with `-dirty` if files differ from it; empty outside a repository or without git."""
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return {"Commit of the working directory": told.stdout.strip()} if told.returncode == 0 else {}
