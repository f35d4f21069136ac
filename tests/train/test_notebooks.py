"""The notebooks of `examples/` run from the first cell to the last, in an empty folder."""

import os
import warnings
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_the_first_cell_to_the_last(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Jupyter's
        nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
        monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
        monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("FORGE_TEST_THREADS", "1"))
        book = nbformat.read(notebook, as_version=4)
        nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()


def test_notebooks_are_kept_without_outputs() -> None:
    import json

    assert len(NOTEBOOKS) == 10
    for path in NOTEBOOKS:
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
