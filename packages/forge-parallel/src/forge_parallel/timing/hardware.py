"""Descriptions of GPUs and their links, from a TOML file. Every key has its unit in its name.

    name = "h100"
    memory_gib = 80
    memory_gb_s = 3350      # bandwidth of the GPU's own memory
    bf16_tflops = 989       # dense products, without sparsity
    fp8_tflops = 1979       # leave out what the GPU does not have
    per_node = 8            # GPUs that share the fast links
    node_gb_s = 450         # of one GPU to the others of its node, in one direction
    node_latency_us = 3     # of one hop
    network_gb_s = 50       # of one GPU to other nodes, in one direction: 400 Gbit/s are 50 GB/s
    network_latency_us = 8
    host_gb_s = 40          # of one GPU to the host's memory, in which checkpoints are staged

The files beside this module describe GPUs by their vendor's names, from data sheets, with 400 Gbit/s of network for each GPU
unless they say otherwise.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from forge_core.errors import ForgeError

GIB = 1 << 30

_LIMITS: Mapping[str, tuple[float, float, str]] = {
    "memory_gib": (1, 2000, "GiB of one GPU"),
    "memory_gb_s": (50, 50_000, "GB/s of the GPU's own memory: an H100 has 3350"),
    "bf16_tflops": (1, 50_000, "TFLOP/s of dense products: an H100 has 989"),
    "fp8_tflops": (1, 100_000, "TFLOP/s of dense products: an H100 has 1979"),
    "fp32_tflops": (0.1, 10_000, "TFLOP/s of dense products: an H100 has 67, or 494 in tf32"),
    "per_node": (1, 1024, "GPUs of a node"),
    "node_gb_s": (1, 4000, "GB/s of one GPU in one direction: NVLink 4 has 450"),
    "node_latency_us": (0.1, 1000, "microseconds of one hop"),
    "network_gb_s": (0.1, 400, "GB/s (not Gbit/s) of one GPU in one direction: 400 Gbit/s are 50"),
    "network_latency_us": (0.1, 10_000, "microseconds of one hop"),
    "host_gb_s": (0.1, 1000, "GB/s from one GPU to the host's memory: PCIe 5 has about 50"),
}
"""Key -> smallest and largest value that can be meant, and its unit."""

_OPTIONAL = frozenset({"fp8_tflops", "fp32_tflops"})


class UnknownHardware(ForgeError):
    """Forge does not describe a GPU of this name."""


@dataclass(frozen=True)
class Link:
    """`bandwidth` of one GPU in one direction in bytes per second, and `latency` of one hop in seconds."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Hardware:
    """A kind of GPU in nodes.

    Attributes:
        name: for tables.
        memory: bytes of one GPU.
        bandwidth: bytes per second of its own memory.
        flops: peak operations per second of dense products by dtype: `bf16`, and where it has them `fp8` and `fp32`.
        per_node: GPUs that share the links `node`.
        node, network: links within a node, and between nodes.
        host: bytes per second from a GPU to the memory of its host.
    """

    name: str
    memory: int
    bandwidth: float
    flops: Mapping[str, float]
    per_node: int
    node: Link
    network: Link
    host: float
    note: str = field(default="", compare=False)

    @classmethod
    def load(cls, name: str) -> "Hardware":
        """Returns the GPU with a name of `known_hardware`, or that of a TOML file.

        Raises:
            UnknownHardware: there is neither.
            ForgeError: the file cannot be read, misses keys, has unknown keys, or has values in other units.
        """
        if name in known_hardware():
            return cls.read(files("forge_parallel.timing").joinpath(f"hardware/{name}.toml").read_text(), name)
        path = Path(name)
        if not path.suffix and not path.exists():
            raise UnknownHardware(
                f"unknown hardware {name!r}: choose {', '.join(known_hardware())}, or give the path of a TOML file"
            )
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ForgeError(f"cannot read the hardware file {name}: {error}") from error
        return cls.read(text, name)

    @classmethod
    def read(cls, text: str, place: str) -> "Hardware":
        """Returns the GPU of a TOML text; `place` is named in errors.

        Raises:
            ForgeError: see `load`.
        """
        try:
            given = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ForgeError(f"{place} is not TOML: {error}") from error
        if faults := list(_faults(given)):
            raise ForgeError(f"{place} does not describe hardware: {'; '.join(faults)}")
        tera = {key.removesuffix("_tflops"): 1e12 * given[key] for key in given if key.endswith("_tflops")}
        return cls(
            name=given.get("name", Path(place).stem),
            memory=int(given["memory_gib"] * GIB),
            bandwidth=1e9 * given["memory_gb_s"],
            flops=tera,
            per_node=given["per_node"],
            node=Link(1e9 * given["node_gb_s"], 1e-6 * given["node_latency_us"]),
            network=Link(1e9 * given["network_gb_s"], 1e-6 * given["network_latency_us"]),
            host=1e9 * given["host_gb_s"],
            note=given.get("note", ""),
        )


def known_hardware() -> tuple[str, ...]:
    """Returns the names of the GPUs that Forge describes."""
    folder = files("forge_parallel.timing").joinpath("hardware")
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def _faults(given: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(set(given) - set(_LIMITS) - {"name", "note"}):
        yield f"unknown key {key}; keys are name, note, {', '.join(_LIMITS)}"
    for key in ("name", "note"):
        if not isinstance(given.get(key, ""), str):
            yield f"{key} is a text"
    for key, (least, most, unit) in _LIMITS.items():
        value = given.get(key)
        if value is None:
            if key not in _OPTIONAL:
                yield f"{key} is missing: {unit}"
        elif isinstance(value, bool) or not isinstance(value, int if key == "per_node" else int | float):
            yield f"{key} = {value!r} is not a{' whole' if key == 'per_node' else ''} number: {unit}"
        elif not least <= value <= most:
            yield f"{key} = {value} is not between {least:g} and {most:g} {unit}"
