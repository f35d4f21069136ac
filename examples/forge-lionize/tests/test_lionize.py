"""All that this plugin promises, in one line; then its command, and a recipe that trains with the optimizer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forge_testing import conforms


def test_lionize_conforms() -> None:
    conforms("forge-lionize")


@pytest.mark.slow
def test_its_command_answers_and_a_recipe_trains_with_it(tmp_path: Path) -> None:
    def forge(*arguments: str) -> str:
        command = [sys.executable, "-m", "forge_train", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, f"{arguments} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    assert "lionize" in forge("plugins", "list")
    settings = json.loads(forge("lionize", "--lr", "3e-3", "--factor", "3", "--json"))
    assert settings["lr"] == pytest.approx(1e-3)
    optimizer = f'[optimizer]\nname = "lionize"\nlr = {settings["lr"]}\n'
    (tmp_path / "recipe.toml").write_text(f'base = "debug"\n{optimizer}[[hooks]]\nname = "save"\n')
    forge("run", "recipe.toml", "--train.max_steps=6")
