"""The example plugin installed with Forge: it conforms, is listed, its command answers, and a recipe that names it trains."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from forge_testing import conforms

conforms("forge-lionize")  # as its own test does

FORGE = Path(sys.executable).with_name("forge-train")

with tempfile.TemporaryDirectory() as directory:

    def forge(*arguments: str) -> str:
        done = subprocess.run([str(FORGE), *arguments], capture_output=True, text=True, check=False, cwd=directory)
        assert done.returncode == 0, f"{arguments} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    assert "lionize" in forge("plugins", "list")
    settings = json.loads(forge("lionize", "--json"))
    recipe = Path(directory) / "recipe.toml"
    recipe.write_text(f'base = "debug"\n[optimizer]\nname = "lionize"\nlr = {settings["lr"]}\n[[hooks]]\nname = "save"\n')
    forge("run", str(recipe), "--train.max_steps=6")
