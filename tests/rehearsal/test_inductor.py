"""What Forge compiles on CUDA goes through the compiler for an H100: no graph breaks, nothing is compiled twice, every kernel
assembles, and `inductor/kernels.json` has how many there are. More is a fault, and less is a gain that lowers the number."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.pool import World
from rehearsal.inductor import TRITON, NoTriton, environment
from rehearsal.inductor.cases import CASES, EVERYWHERE, compiled
from rehearsal.inductor.record import Record, recorded
from rehearsal.inductor.target import HOPPER

pytestmark = pytest.mark.rehearsal
KNOWN: dict[str, Any] = json.loads((Path(__file__).parent / "inductor" / "kernels.json").read_text())
OF_BF16 = ("dense", "loss head", "documents", "flex documents", "tensor parallel", "flex", "ring")
BROKEN = {"experts of ranks": "torch.compiler.disable"}
"""Cases whose graphs end by intention, and what the compiler says of it."""


@pytest.mark.parametrize("name", CASES)
def test_what_is_compiled_is_known(compilers: World, name: str) -> None:
    (record,) = compilers.run(compiled, 1, name, group=False, timeout=600)
    found = {"graphs": record.graphs(), "stack": max(kernel.stack for kernel in record.kernels)}
    assert found == KNOWN[name], json.dumps(found)
    assert all(BROKEN.get(name, "no reason") in reason for reason in record.breaks), record.breaks
    wanted = {HOPPER, *EVERYWHERE} if name == "AdamW bf16" else {HOPPER}
    for kernel in {each.name for each in record.kernels}:
        assert {each.architecture for each in record.kernels if each.name == kernel} == wanted
    if name in OF_BF16:
        assert not any(graph["with_fp64"] for graph in found["graphs"])


def _faulty() -> Record:
    """A graph that breaks, one in fp64, one that is made again for another shape."""

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    with recorded((80,)) as record:
        run = torch.compile(broken, dynamic=False)
        run(torch.ones(64, device="cuda"))
        for size in (64, 65):
            run(torch.ones(size, device="cuda", dtype=torch.float64))
    return record


def test_faults_are_seen(compilers: World) -> None:
    (record,) = compilers.run(_faulty, 1, group=False, timeout=600)
    graphs = record.graphs()
    assert [graph["with_fp64"] for graph in graphs] == [0, 0, 1, 1, 1, 1]
    assert all(graph["launches"] == 1 and graph["of"] == "inference" for graph in graphs)
    assert len(record.breaks) == 1
    assert [kernel.architecture for kernel in record.kernels] == [80, HOPPER] * 6
    assert all(kernel.registers > 0 and kernel.stack >= 0 for kernel in record.kernels)


def _without_cubin() -> str:
    from rehearsal.inductor.record import _kernel

    try:
        _kernel("empty", HOPPER, b"")
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_kernel_that_does_not_assemble_is_an_error(compilers: World) -> None:
    assert "empty has no cubin for sm90 (0 bytes)" in compilers.run(_without_cubin, 1, group=False)[0]


def test_without_triton_there_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TRITON, str(tmp_path / "none"))
    with pytest.raises(NoTriton, match=f"the directory that {TRITON} names"):
        environment(tmp_path)
