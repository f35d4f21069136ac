"""Experts over ranks as a user first meets them: the preset under torchrun, then alone; and what is said about wrong keys."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forge_core.errors import ConfigError
from forge_train.recipe.load import load_recipe

HOOKS = '--hooks=[{name="log",every=1},{name="save"},{name="sample",prompts=["def "],max_tokens=4}]'
FEW = ["--schedule.name=constant", "--data.sequence_length=32", "--train.micro_batch=2", "--data.evaluation={}", HOOKS]


def forge(directory: Path, *arguments: str, ranks: int = 1) -> str:
    """What `forge-train` printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "forge_train", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def losses(directory: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (directory / "runs/debug-moe/metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.slow
def test_the_preset_under_torchrun_goes_on_alone(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "alone").mkdir()
    said = forge(tmp_path / "shared", "run", "debug-moe", *FEW, "--train.max_steps=3", "--parallel.ep=2", ranks=2)
    assert "layout dp2ep2" in said
    said = forge(tmp_path / "shared", "run", "debug-moe", *FEW, "--train.max_steps=4")
    assert "resuming after step 3" in said
    forge(tmp_path / "alone", "run", "debug-moe", *FEW, "--train.max_steps=4")
    found, expected = losses(tmp_path / "shared"), losses(tmp_path / "alone")
    assert found.keys() == expected.keys() == {1, 2, 3, 4}
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-3)
    assert forge(tmp_path / "shared", "generate", "runs/debug-moe", "--prompt", "def ", "--max-tokens", "4")


@pytest.mark.parametrize(
    ("given", "world", "messages"),
    [
        (["--parallel.ep=3"], 6, ["model.moe.experts: 8 experts do not divide over parallel.ep = 3 ranks", "may be 1, 2, 4, 8"]),
        (
            ["--parallel.ep=4"],
            6,
            ["ep * parallel.etp = 4 does not divide", "legal values of parallel.ep with etp = 1: 1, 2, 3, 6"],
        ),
        (["--parallel.ep=2", "--transforms.expert.dispatcher=hierarchical"], 2, ["needs ranks_per_node, the number of ep ranks"]),
        (
            ["--parallel.ep=2", "--transforms.expert.ranks_per_node=2"],
            2,
            ["'all_to_all' does not use ranks_per_node; remove it"],
        ),
        (
            ["--parallel.ep=4", "--transforms.expert.dispatcher=hierarchical", "--transforms.expert.ranks_per_node=3"],
            4,
            ["transforms.expert.ranks_per_node", "3 ranks do not divide parallel.ep = 4", "it may be 2"],
        ),
        (["--parallel.ep=2", "--transforms.expert.dispatcher=alltoall"], 2, ["transforms.expert.dispatcher", "all_to_all"]),
        (["--parallel.etp=2"], 2, ["parallel.etp", "parallel.tp = 1"]),
        (
            ["--parallel.tp=2", "--model.moe.losses.sequence=1e-4"],
            2,
            ["model.moe.losses.sequence", "set parallel.tp = 1", "losses.global_batch"],
        ),
        (["--parallel.ep=2", "--model.moe=none"], 2, ["parallel.ep: expert parallelism needs a model with experts"]),
    ],
)
def test_a_recipe_that_cannot_share_its_experts_is_refused(given: list[str], world: int, messages: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_recipe("debug-moe", ["--train.micro_batch=1", *given], world)
    for message in messages:
        assert message in str(refusal.value)
