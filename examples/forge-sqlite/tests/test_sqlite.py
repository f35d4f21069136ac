"""The tracker against the JSON lines of the same run, through a resume."""

import sqlite3
from pathlib import Path

from forge_sqlite.tracker import SqliteTracker

from forge_testing import conforms
from forge_train import JobRanks, Run, load_recipe, read_metrics, train

RECIPE = """
base = "debug"

[train]
max_steps = 4

[[data.sources]]
name = "random"
vocab_size = 257
tokens = 4000
document = 23

[data.evaluation.held_out]
name = "random"
vocab_size = 257
tokens = 400
seed = 1

[schedule]
name = "constant"

[checkpoint]
every = 2

[[trackers]]
name = "jsonl"

[[trackers]]
name = "sqlite"

[[hooks]]
name = "log"
every = 1

[[hooks]]
name = "save"
"""


def trained(folder: Path, *overrides: str) -> Run:
    """Trains the recipe in a folder, from where it stands."""
    (folder / "recipe.toml").write_text(RECIPE)
    recipe = load_recipe(str(folder / "recipe.toml"), [f"--job.dir={folder / 'run'}", *overrides], world=1)
    run, _ = train(recipe, JobRanks())
    run.saves.close()
    return run


def test_it_conforms() -> None:
    conforms("forge-sqlite")


def rows_of(path: Path, name: str) -> list[tuple[str, int, float]]:
    with sqlite3.connect(path) as database:
        return database.execute("SELECT run, step, value FROM metrics WHERE name = ? ORDER BY run, step", (name,)).fetchall()


def test_it_has_the_numbers_of_the_run(tmp_path: Path) -> None:
    trained(tmp_path, "--train.max_steps=3")
    run = trained(tmp_path)  # goes on after step 3
    assert run.resumed
    wanted = [(row["step"], row["loss"]) for row in read_metrics(run.directory / "metrics.jsonl") if "loss" in row]
    assert [step for step, _ in wanted] == [1, 2, 3, 4]
    assert [row[1:] for row in rows_of(tmp_path / "metrics.sqlite", "loss")] == wanted


def test_a_rewind_deletes_later_steps_of_this_run_only(tmp_path: Path) -> None:
    for name in ("a", "b"):
        tracker = SqliteTracker(tmp_path / "all.sqlite", name)
        tracker.rewind(0)
        for step in (1, 2, 3):
            tracker.write(step, {"loss": float(step)})
        tracker.close()
    again = SqliteTracker(tmp_path / "all.sqlite", "a")
    again.rewind(1)
    again.write(2, {"loss": 20.0})
    again.close()
    assert rows_of(tmp_path / "all.sqlite", "loss") == [("a", 1, 1.0), ("a", 2, 20.0), *(("b", step, step) for step in (1, 2, 3))]
