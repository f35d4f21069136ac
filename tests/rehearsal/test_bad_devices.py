"""Nodes that cannot train as they are: each is named before a step, with what to do."""

import os
import warnings
from pathlib import Path

import pytest
import torch

from forge_core.errors import LayoutError, PlanError
from forge_core.layout import Layout
from forge_models.components.decoder import DecoderConfig
from forge_parallel import accelerator
from forge_parallel.launch.environment import read_launcher
from forge_parallel.launch.meeting import RanksDiffer
from forge_parallel.launch.process_group import destroy_process_groups, init_process_groups
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.placement.topology import Topology
from forge_parallel.transforms.compile import Compile
from harness.pool import World
from rehearsal import device
from rehearsal.ranks import own_device

pytestmark = pytest.mark.rehearsal
DECODER = DecoderConfig(dim=32, layers=1, heads=4, kv_heads=2, ffn_dim=32, vocab_size=50, max_length=64)


def _started(changes: list[dict[str, object]]) -> str:
    """What a rank says whose device is like that of the rehearsal but for `changes`."""
    where = read_launcher(os.environ)
    there = torch.cuda.get_device_properties(0)
    vars(there).update(changes[where.rank])
    warnings.simplefilter("error")
    try:
        init_process_groups(where, timeout=120)
    except (LayoutError, RanksDiffer) as refusal:
        return str(refusal)
    finally:
        destroy_process_groups()
    return ""


def test_ranks_whose_gpus_have_other_kernels_refuse_in_the_same_words(devices: World) -> None:
    old = {"major": 8, "minor": 0, "name": "NVIDIA A100"}
    one, other = devices.run(_started, 2, [{}, old], group=False, fresh=True)
    assert one == other and one.startswith(
        "ranks have devices of different capabilities: rank 0 has NVIDIA H100 (rehearsal) of 9.0"
    )
    assert "rank 1 has NVIDIA A100 of 8.0" in one
    assert devices.run(_started, 2, [{}, {}], group=False, fresh=True) == ["", ""]


def _without_a_gpu() -> str:
    where = read_launcher(os.environ)
    if where.rank == 1:
        torch.cuda.is_available = lambda: False
    try:
        init_process_groups(where, timeout=120)
    except (LayoutError, RanksDiffer) as refusal:
        return str(refusal)
    finally:
        destroy_process_groups()
    return ""


def test_a_rank_whose_driver_is_too_old_does_not_join_on_its_cpu(devices: World) -> None:
    one, other = devices.run(_without_a_gpu, 2, group=False, fresh=True)
    assert one == other and "ranks have devices of different kinds: rank 0 has NVIDIA H100" in one
    assert "rank 1 has cpu" in one and "says why torch uses no GPU there" in one


def _compiled(state: str) -> str:
    warnings.simplefilter("ignore")  # the compiler's own imports warn
    at = Layout()
    with own_device() as here:
        transforms = [Compile()] if state == "fp32" else []
        try:
            model = realize(Blueprint.of(DECODER.build), Plan.of(transforms, at), Topology.of(at, here), 0, "bf16", state)
            from forge_parallel.optim.optimizers import AdamWConfig

            AdamWConfig().build(model)
        except PlanError as refusal:
            return str(refusal)
    return ""


def test_without_triton_what_has_to_be_compiled_is_refused_before_a_step() -> None:
    """The compiler itself fails, as it does on a GPU."""
    try:
        pool = World({**device.environment(devices=1), device.COMPILER: "1"})
    except device.NoCompiler as reason:
        pytest.skip(str(reason))
    try:
        (found,) = pool.run(_compiled, 1, "fp32", group=False)
        (of_state,) = pool.run(_compiled, 1, "bf16", group=False)
    finally:
        pool.close()
    assert found.startswith("transforms.compile needs a compiler for NVIDIA H100 (rehearsal), and there it fails: ")
    assert found.endswith("Triton is not installed: pip install triton, in the version that this torch requires (pip show torch)")
    assert of_state.startswith("the update of this optimizer needs a compiler for")


def test_what_the_compiler_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(accelerator, "find_spec", lambda name: object())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "neither gcc nor clang is on the path: install gcc, or set CC" in accelerator.missing_for_compiler()
    monkeypatch.setenv("CC", "icc")
    assert "CC names 'icc', which does not exist" in accelerator.missing_for_compiler()
    (tmp_path / "gcc").write_text("")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.delenv("CC")
    monkeypatch.setattr(accelerator.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "Python's headers: install python3-dev" in accelerator.missing_for_compiler()
    (tmp_path / "Python.h").write_text("")
    assert "TORCH_LOGS" in accelerator.missing_for_compiler()
