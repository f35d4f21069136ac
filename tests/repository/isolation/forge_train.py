"""forge-train with what it declares: checks a recipe, trains it for a few steps, resumes, and reports."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

FORGE = Path(sys.executable).with_name("forge-train")
RECIPE = """
base = "debug"

[train]
max_steps = 4

[checkpoint]
every = 2

[[hooks]]
name = "log"
every = 1

[[hooks]]
name = "save"
"""

with tempfile.TemporaryDirectory() as directory:

    def forge(*arguments: str, code: int = 0) -> str:
        command = [str(FORGE), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory)
        assert done.returncode == code, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    assert json.loads(forge("plugins", "list", "--json"))
    forge("check", "debug", "--world", "2")
    assert "max_step" in forge("check", "debug", "--train.max_step=3", code=2)
    (Path(directory) / "recipe.toml").write_text(RECIPE)
    forge("run", "recipe.toml")
    forge("run", "recipe.toml", "--train.max_steps=6")
    run = Path(directory) / "runs" / "debug"
    assert "uPlot" in (run / "report.html").read_text()
    forge("report", str(run), "--out", "again.html")
    assert (Path(directory) / "again.html").stat().st_size > 50_000
    assert "pip install forge-lab" in forge("sweep", "recipe.toml", code=2)
    assert "pip install forge-interp" in forge("probe", "debug", "--list", code=2)
    forge("run", "recipe.toml", f"--job.dir={Path(directory) / 'other'}")
    assert "pip install forge-lab" in forge("report", str(run), "other", code=2)
    names = {entry["step"] for entry in json.loads(forge("ckpt", "list", str(run / "checkpoints"), "--json"))}
    assert 6 in names, names
