"""`forge-train parity`: what check refuses is refused before a process starts, and what check accepts is measured fairly."""

from pathlib import Path
from typing import Any

import pytest

from forge_parallel.launch import local_processes
from forge_train.cli import main
from train.runs import TINY


def code_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def test_trials_h_layouts_that_check_refuses_start_no_process(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    started: list[Any] = []
    monkeypatch.setattr(local_processes, "spawn_local", lambda *given: started.append(given))
    recipe = str(tmp_path / "tiny.toml")
    assert code_of("parity", recipe, "--layouts", "dp2,tp3,ep2dp2", "--mode", "fp32") == 2
    said = capsys.readouterr().err
    assert "check refuses these layouts" in said and "\n  dp2: " not in said
    assert "tp3: model.heads: 4 heads cannot be divided among parallel.tp = 3" in said
    assert "dp2ep2: parallel.ep: expert parallelism needs a model with experts" in said.replace("ep2dp2", "dp2ep2")
    assert code_of("parity", recipe, "--layouts", "dp2", "--mode", "fp64", "--transforms.float8={}") == 2
    assert "'fp64' is not supported with transforms.float8" in capsys.readouterr().err
    assert not started


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        ["debug-moe", "--layouts=dp4ep2", "--transforms.float8.experts=true"],
        ["debug", "--layouts=dp2", "--transforms.float8={}", "--optimizer.name=muon"],
    ],
)
def test_trials_c8_parity_accepts_the_float8_that_check_accepts(given: list[str], capsys: Any) -> None:
    assert code_of("parity", *given, "--mode=fp32") == 0
    assert "equal, but for the rounding of float8" in capsys.readouterr().out
