"""forge-lab with what it declares: a sweep of two points, their comparison, the campaigns, and the law that made some losses."""

import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

from forge_lab import Law, ObservedLosses, fit

FORGE = Path(sys.executable).with_name("forge-train")
SWEEP = """
recipe = "debug"

[vary]
optimizer.lr = [1e-3, 3e-3]

[search]
metric = "loss"
"""

assert "forge-interp" not in {found.name for found in distributions()}
law = Law(irreducible=1.69, a=406.4, b=410.7, alpha=0.34, beta=0.28)
rows = [(n, d, law.loss(n, d)) for n in (1e7, 3e7, 1e8) for d in (1e9, 3e9, 1e10)]
assert abs(fit(ObservedLosses.of(rows), resamples=2).law.alpha - law.alpha) < 1e-3

with tempfile.TemporaryDirectory() as directory:

    def forge(*arguments: str, code: int = 0) -> str:
        command = [str(FORGE), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory)
        assert done.returncode == code, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    (Path(directory) / "steps.toml").write_text(SWEEP)
    forge("sweep", "steps.toml", "--train.max_steps=4")
    forge("compare", "sweeps/steps/points", "--out", "compared.html")
    assert "What differs" in (Path(directory) / "compared.html").read_text()
    forge("report", "sweeps/steps/points", "--out", "again.html")
    assert "What differs" in (Path(directory) / "again.html").read_text()
    assert "mfu_scaling" in forge("bench", "--list-campaigns")  # its files are in the wheel
    assert "dp8tp4" in forge("bench", "mfu_scaling", "--list")
    assert "forge-interp" in forge("similarity", "debug", code=2)
