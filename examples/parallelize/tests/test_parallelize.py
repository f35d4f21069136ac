"""Every program computes on two processes what it computes on one."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1]
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py"))
STEPS = 4


def train(program: str, layout: str) -> list[float]:
    spec = importlib.util.spec_from_file_location(program, FOLDER / f"{program}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train(layout, steps=STEPS)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of all programs and layouts on two processes, started once."""
    out = tmp_path_factory.mktemp("losses") / "losses.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, __file__, str(out)], capture_output=True, text=True, timeout=300)
    assert out.exists(), done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_two_processes_compute_what_one_does(together: dict[str, list[float]], program: str, layout: str) -> None:
    alone = train(program, "1")
    assert len(set(alone)) == STEPS
    assert together[f"{program} {layout}"] == pytest.approx(alone, rel=1e-4)


if __name__ == "__main__":
    import torch.distributed as dist

    dist.init_process_group("gloo")
    losses = {f"{program} {layout}": train(program, layout) for program in PROGRAMS for layout in ("dp2", "tp2")}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)
