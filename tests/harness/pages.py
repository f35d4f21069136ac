"""Code blocks of pages, run as a reader runs them: from top to bottom in one directory."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"# ([\w.-]+\.(?:py|toml))\n")
"""First line of a block that is a file."""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def script_of(page: Path) -> str:
    """Shell that writes the files of a page where their blocks stand, and runs its shell and Python blocks in their order."""
    parts = []
    for number, (language, text) in enumerate(BLOCK.findall(page.read_text())):
        if named := NAMED.match(text):
            parts.append(f"cat > {named[1]} <<'FORGE_PAGE'\n{text}FORGE_PAGE\n")
        elif language == "python":
            parts.append(f"cat > block_{number}.py <<'FORGE_PAGE'\n{text}FORGE_PAGE\npython block_{number}.py\n")
        elif language == "bash":
            parts.append(text)
    return "".join(parts)


def run_shell(commands: str, directory: Path) -> str:
    """Runs commands in one shell, so that what a reader would set stays set; returns what they printed.

    Raises:
        AssertionError: a command failed; has the ends of both outputs.
    """
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
    }
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", commands],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
