"""The page of an example works: `python -I example_page.py FOLDER` runs the commands of its README in a copy of the folder.

A block of TOML becomes `recipe.toml`, on top of `debug` if it names no base. Installed is what the example needs.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BLOCK = re.compile(r"^```(bash|toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORT = "--train.max_steps=2 --schedule.warmup=1"
BEFORE = {"forge-mingru": f"forge-train run recipe.toml --job.name=mingru --model.dim=32 --model.layers=2 {SHORT}"}
"""What a reader has done before the commands of an example, in less time."""
DATA = {"forge-fasta": "mkdir genomes && printf '>one\\n%s\\n' ACGTTGCAACGTACGTTGCAAC > genomes/one.fasta"}
"""Files that the recipe of an example names, and that readers bring."""

folder = Path(sys.argv[1])
page = (folder / "README.md").read_text()
with tempfile.TemporaryDirectory() as place:
    here = Path(place) / "examples" / folder.name
    shutil.copytree(folder, here)
    script = [DATA.get(folder.name, "")]
    for language, text in BLOCK.findall(page):
        if language == "toml":
            whole = text if text.startswith("base = ") else f'base = "debug"\n\n{text}'
            # A part that no receipt proves yet is refused; the command that follows records one.
            checks = [] if "--record" in page else ["forge-train check recipe.toml"]
            script += [f"cat > recipe.toml <<'END'\n{whole}END", *checks]
            continue
        lines = [line for line in text.splitlines() if not line.startswith(("pip install ", "sqlite3 "))]
        script += [*([BEFORE[folder.name]] if folder.name in BEFORE and lines else []), *lines]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    commands = "\n".join(filter(None, script))
    done = subprocess.run(["bash", "-euxc", commands], cwd=here, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{folder.name} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
print(f"{folder.name}: the commands of its README run")
