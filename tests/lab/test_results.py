"""What a sweep found: the order of its points, the effect of each key, and a best recipe that can be run."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from forge_lab.sweep.files import write_recipes
from forge_lab.sweep.results import BEST, LINES, PAGE, collect_results, write_page, write_results
from forge_train.recipe.load import load_recipe
from lab.fake_runs import METRIC, FakeRuns, run_all, sweep_of

GRID = """
recipe = "debug"
[vary]
optimizer.lr = [1e-3, 2e-3, 4e-3]
model.dim = [32, 64]
"""


def additive(job: Any, step: int) -> float:
    """The mean over one key is the effect of the other plus a constant."""
    return {1e-3: 5.0, 2e-3: 3.0, 4e-3: 4.0}[job.optimizer.lr] + {32: 0.5, 64: 0.1}[job.model.dim]


@pytest.fixture
def trained(tmp_path: Path) -> Any:
    made = sweep_of(tmp_path, GRID)
    write_recipes(made)
    run_all(made, FakeRuns(additive))
    return made


def test_points_are_ranked_and_keys_have_their_effects(trained: Any) -> None:
    found = collect_results(trained)
    assert [(item.rank, item.point.name) for item in found.results] == [
        (1, "lr=0.002_dim=64"),
        (2, "lr=0.002_dim=32"),
        (3, "lr=0.004_dim=64"),
        (4, "lr=0.004_dim=32"),
        (5, "lr=0.001_dim=64"),
        (6, "lr=0.001_dim=32"),
    ]
    effects = {(one.key, one.value): (one.runs, one.mean, one.best) for one in found.effects}
    assert {key: pytest.approx(value) for key, value in effects.items()} == {
        ("optimizer.lr", "0.001"): (2, 5.3, 5.1),
        ("optimizer.lr", "0.002"): (2, 3.3, 3.1),
        ("optimizer.lr", "0.004"): (2, 4.3, 4.1),
        ("model.dim", "32"): (3, 4.5, 3.5),
        ("model.dim", "64"): (3, 4.1, 3.1),
    }


def test_more_is_better_where_the_sweep_says_so(tmp_path: Path) -> None:
    made = sweep_of(tmp_path, GRID + '[search]\nmode = "max"\n')
    write_recipes(made)
    run_all(made, FakeRuns(additive))
    found = collect_results(made)
    assert found.results[0].point.name == "lr=0.001_dim=32" == found.best.point.name  # type: ignore[union-attr]
    assert next(one.best for one in found.effects if one.value == "64") == pytest.approx(5.1)


def test_lines_are_json_and_the_best_recipe_can_be_run_elsewhere(trained: Any, tmp_path: Path) -> None:
    write_results(trained, collect_results(trained))
    lines = [json.loads(line) for line in (tmp_path / "sweep" / LINES).read_text().splitlines()]
    assert [line["rank"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[0]["values"] == {"optimizer.lr": 2e-3, "model.dim": 64} and lines[0][METRIC] == pytest.approx(3.1)
    assert lines[0]["tokens"] == lines[0]["planned_tokens"] == 30 * 8 * 64
    best = load_recipe(tmp_path / "sweep" / BEST, (), 1)
    assert (best.job.job.name, best.job.job.dir) == ("grid-best", None)
    mine, theirs = best.as_json(), trained.resolved["lr=0.002_dim=64"].as_json()
    assert {key: value for key, value in mine.items() if key != "job"} == {k: v for k, v in theirs.items() if k != "job"}


def test_settings_are_compared_by_the_mean_over_seeds(tmp_path: Path) -> None:
    """The best single run is not of the best setting."""
    values = {(1e-3, 0): 1.0, (1e-3, 1): 9.0, (3e-3, 0): 3.0, (3e-3, 1): 5.0}
    made = sweep_of(
        tmp_path, GRID.replace("[1e-3, 2e-3, 4e-3]", "[1e-3, 3e-3]").replace("[32, 64]", "[64]") + "[search]\nrepeats = 2"
    )
    write_recipes(made)
    run_all(made, FakeRuns(lambda job, step: values[job.optimizer.lr, job.job.seed]))
    found = collect_results(made)
    assert [(one.values["optimizer.lr"], one.runs, one.mean) for one in found.settings] == [(3e-3, 2, 4.0), (1e-3, 2, 5.0)]
    assert found.settings[0].deviation == pytest.approx(math.sqrt(2.0))
    assert "job.seed" not in found.settings[0].values
    assert found.best is not None and found.best.point.name == "lr=0.003_dim=64_seed=0"


def test_what_failed_or_was_not_begun_comes_last_and_has_no_rank(tmp_path: Path) -> None:
    made = sweep_of(tmp_path, GRID)
    write_recipes(made)
    assert [item.rank for item in collect_results(made).results] == [None] * 6 and collect_results(made).best is None
    run_all(made, FakeRuns(additive, codes={"lr=0.002_dim=64": [2]}))
    found = collect_results(made)
    assert found.results[-1].point.name == "lr=0.002_dim=64" and found.results[-1].rank is None
    assert found.best is not None and found.best.point.name == "lr=0.002_dim=32"


def test_a_range_with_many_values_is_put_into_parts(tmp_path: Path) -> None:
    vary = 'vary.optimizer.lr = {low = 1e-4, high = 1e-2, scale = "log"}'
    made = sweep_of(tmp_path, f'recipe = "debug"\n{vary}\n[search]\nkind = "random"\nsamples = 12')
    write_recipes(made)
    run_all(made, FakeRuns(lambda job, step: 1 + job.optimizer.lr))
    effects = collect_results(made).effects
    rates = sorted(point.values["optimizer.lr"] for point in made.points)
    assert [one.runs for one in effects] == [3, 3, 3, 3]
    assert [one.mean for one in effects] == pytest.approx([1 + sum(rates[i : i + 3]) / 3 for i in range(0, 12, 3)])


def test_the_page_has_everything_and_fetches_nothing(trained: Any, tmp_path: Path) -> None:
    (trained.folder(trained.points[0]) / "report.html").write_text("a report")
    text = write_page(trained, collect_results(trained), ["<h2>A law</h2>"]).read_text()
    assert (tmp_path / "sweep" / PAGE).is_file()
    for words in (
        "lr=0.002_dim=64",
        "optimizer.lr",
        "<svg",
        "<h2>A law</h2>",
        BEST,
        "139.6k",
        "<strong>lr=0.002_dim=64</strong>",
    ):
        assert words in text
    assert '<a href="points/lr=0.001_dim=32/report.html">' in text
    assert re.findall(r'(?:src|href)="(?!points/)[^"]*"', text) == [] and "http://" not in text and "https://" not in text


def test_the_page_shows_what_a_failed_run_said(tmp_path: Path) -> None:
    made = sweep_of(tmp_path, GRID)
    write_recipes(made)
    run_all(made, FakeRuns(additive, codes={"lr=0.002_dim=64": [2]}))
    assert "it ended with 2" in write_page(made, collect_results(made)).read_text()
