"""Builds the library of the device once per source, torch, Python and compiler. Imports no torch."""

import importlib.util
import os
import runpy
import shutil
import subprocess
import sysconfig
import tempfile
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

CACHE = "FORGE_REHEARSAL_CACHE"
"""The environment variable with the directory of built libraries; else it is in the user's cache directory."""

MODULE = "forge_rehearsal_device"
SOURCES = sorted((Path(__file__).parent / "csrc").iterdir())
OPTIONS = (
    "-O1",
    "-w",
    "-std=c++20",
    "-shared",
    "-fPIC",
    "-DUSE_DISTRIBUTED",
    "-DUSE_C10D_GLOO",
    f"-DTORCH_EXTENSION_NAME={MODULE}",
)


class NoCompiler(Exception):
    """The library cannot be built here; the message says why."""


def torch_directory() -> Path:
    """Of the torch that this Python would import."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def library() -> Path:
    """The built library; building takes a minute of one core.

    Raises:
        NoCompiler: there is no g++, or it fails.
    """
    if runpy.run_path(str(torch_directory() / "version.py"))["cuda"] is not None:
        raise NoCompiler(f"the rehearsal takes the place of CUDA in a torch built without it; this is torch {version('torch')}")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NoCompiler("no g++ on the path, nor a compiler in CXX")
    directory = _cache() / _key(compiler)
    built = directory / f"{MODULE}.so"
    if built.exists():
        return built
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as own:
        fresh = Path(own) / built.name
        _compile(compiler, fresh)
        fresh.replace(built)  # whole or not at all: another process may build, or look for it, right now
    return built


def _cache() -> Path:
    if (given := os.environ.get(CACHE)) is not None:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forge-rehearsal"


def _key(compiler: str) -> str:
    told = subprocess.run((compiler, "--version"), capture_output=True, text=True, check=True).stdout
    key = sha256("\0".join((version("torch"), sysconfig.get_config_var("SOABI"), told, *OPTIONS)).encode())
    for source in SOURCES:
        key.update(source.read_bytes())
    return f"torch-{version('torch')}-{key.hexdigest()[:16]}"


def _compile(compiler: str, into: Path) -> None:
    torch = torch_directory()
    folders = (torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    source = Path(__file__).parent / "csrc" / "module.cpp"
    command = [compiler, *OPTIONS, *(f"-I{folder}" for folder in folders), str(source), f"-L{torch / 'lib'}"]
    command += ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-o", str(into)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoCompiler(f"{compiler} cannot build the device:\n{done.stderr[-4000:]}")
