"""The scripts of `examples/parallelize`, against themselves on one process and against plain torch."""

import importlib.util
import inspect
import os
import runpy
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from forge_parallel import parallelize
from harness.pool import World
from harness.siblings import fast

FOLDER = Path(__file__).parents[3] / "examples" / "parallelize"


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _losses(name: str, layout: str) -> list[float]:
    return _script(name).train(layout, steps=4)


@pytest.mark.parametrize("name", fast("plain_module", of=["plain_module", "transformers_model"]))
def test_a_script_gives_the_losses_of_one_process(world: World, name: str) -> None:
    alone = _losses(name, "1")
    for found in world.run(_losses, 4, name, "dp2tp2", timeout=180):
        assert found == pytest.approx(alone, rel=1e-4)


def test_the_plain_script_trains_as_plain_torch_does() -> None:
    script = _script("plain_module")
    losses: list[float] = []
    module = script.build()
    start = parallelize(script.build, "1").state_dict(whole=True)
    module.load_state_dict(start)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for step in range(4):
        rows = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        loss = F.mse_loss(module(rows), rows.sin().sum(1, keepdim=True))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert _losses("plain_module", "1") == pytest.approx(losses, rel=1e-4)


def test_the_plain_script_verifies_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As the script's first lines say."""
    monkeypatch.setattr(sys, "argv", ["plain_module.py", "verify"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / "plain_module.py"), run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out == "every axis gives the step of one process\n"


def test_the_example_of_parallelize_runs() -> None:
    """As its docstring has it."""
    paragraphs = inspect.cleandoc(parallelize.__doc__ or "").split("\n\n")
    lines = [line for text in paragraphs if text.startswith("    ") for line in text.splitlines()]
    names: dict[str, Any] = {"parallelize": parallelize, "torch": torch}
    exec(textwrap.dedent("\n".join(lines)), names)  # noqa: S102 (the docstring of our own)
    plain = names["build"]()
    plain.load_state_dict(parallelize(names["build"], "1", seed=1).state_dict(whole=True))
    tokens = names["tokens"]
    torch.testing.assert_close(names["logits"], plain(tokens), rtol=0, atol=0)
    F.cross_entropy(plain(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert float(names["norm"]) == pytest.approx(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)), rel=1e-6)
    torch.optim.AdamW(plain.parameters(), lr=0.01).step()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(dict(names["model"].named_parameters())[name], parameter, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    """As the script's first line says."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(FOLDER / "plain_module.py"), "tp2"]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
        if "terminate called without an active exception" not in done.stderr:
            break
        warnings.warn("a crash, after which the script ran once more: gloo's threads aborted its exit", stacklevel=1)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 20
    assert losses[:4] == pytest.approx(_losses("plain_module", "1"), rel=1e-3)
