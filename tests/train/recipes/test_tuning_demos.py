"""What the demos of fine-tuning promise: held-out exercises that the model could not solve before, and solves after."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forge_train.recipe.load import load_recipe


@pytest.mark.parametrize("preset", ["sft-demo", "lora-demo", "dpo-demo", "classify-demo"])
def test_recipes_have_no_fault(preset: str) -> None:
    assert load_recipe(preset).job.job.name == preset


@pytest.mark.slow
def test_held_out_exercises_are_solved_after_an_adapter_of_the_first_demo(tmp_path: Path) -> None:
    solved(tmp_path, "sft-demo", 0.8, 800)
    solved(tmp_path, "lora-demo", 0.5, 400)


@pytest.mark.slow
def test_held_out_exercises_are_solved_after_preferences(tmp_path: Path) -> None:
    solved(tmp_path, "dpo-demo", 0.5, 800)


def solved(tmp_path: Path, preset: str, least: float, steps: int) -> None:
    command = [sys.executable, "-m", "forge_train", "run", preset, "--train.threads=1"]
    environment = {**os.environ, "NO_COLOR": "1"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1500)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs" / preset / "metrics.jsonl").read_text().splitlines()]
    shares = [line["held_out/exact_match"] for line in lines if "held_out/exact_match" in line]
    assert len(shares) == 2 and shares[0] < 0.05 and shares[1] >= least
    assert "step 0  held_out/exact_match" in result.stdout and "(right)" in result.stdout
    if preset == "dpo-demo":
        accuracies = [line["evaluation/held_out/accuracy"] for line in lines if "evaluation/held_out/accuracy" in line]
        assert accuracies[0] == 0 and accuracies[-1] > 0.95
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and f"resuming after step {steps}" in again.stdout
