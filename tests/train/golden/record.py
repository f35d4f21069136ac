"""Records the curves that `test_golden.py` compares with, where a change of numbers is wanted: its commit says why.

PYTHONPATH=tests python -m train.golden.record
"""

import json
import tempfile
from pathlib import Path

from train.golden.small import names, small
from train.runs import train

CURVES = Path(__file__).parent / "curves.json"


def curve(name: str, folder: Path) -> list[float]:
    """The loss of each step of a small preset."""
    return train(small(name, folder), [])["losses"]


def main() -> None:
    """Writes the curves of all presets."""
    found = {}
    for name in names():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = [round(loss, 7) for loss in curve(name, Path(folder))]
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(losses)}" for name, losses in found.items())
    CURVES.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
