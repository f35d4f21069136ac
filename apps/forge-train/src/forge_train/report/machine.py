"""What a run ran on, for the report: without the machine's name, addresses or environment."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from forge_core.machine import processor_name, usable_cores
from forge_core.terminal import size

_PACKAGES = ("torch", "numpy", "tokenizers", "pydantic")
_OURS = ("forge-train", "forge-core", "forge-parallel", "forge-models", "forge-data", "forge-ckpt", "forge-vlm")


def machine() -> dict[str, str]:
    """Processor, cores, memory and operating system."""
    found = {
        "Processor": processor_name(),
        "CPU cores": str(usable_cores()),
        "System": f"{platform.system()} {platform.release()}",
    }
    if "SC_PHYS_PAGES" in os.sysconf_names:
        found["Memory"] = size(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return found


def versions() -> dict[str, str]:
    """Python, the libraries that decide numbers, and Forge."""
    found = {"Python": platform.python_version()}
    for name in (*_PACKAGES, *_OURS):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit(directory: Path) -> dict[str, str]:
    """The commit that git has for a working directory, with `-dirty` where files differ from it; empty outside of a repository,
    or without git."""
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return {"Commit of the working directory": told.stdout.strip()} if told.returncode == 0 else {}
