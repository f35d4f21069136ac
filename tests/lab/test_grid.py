"""A sweep's file: which points it makes, what they are called, and that everything wrong is told at once."""

import itertools
import math
from pathlib import Path

import pytest

from forge_core.errors import ConfigError
from forge_lab.sweep.grid import read_sweep
from forge_lab.sweep.points import Axis, Range, named, sample_points
from lab.fake_runs import sweep_of

TWO = """
recipe = "debug"
[vary]
optimizer.lr = [1e-3, 3e-3]
model.dim = [32, 64, 128]
"""


def test_a_grid_is_every_combination_the_last_key_fastest(tmp_path: Path) -> None:
    made = sweep_of(tmp_path, TWO)
    expected = [{"optimizer.lr": lr, "model.dim": dim} for lr, dim in itertools.product((1e-3, 3e-3), (32, 64, 128))]
    assert [dict(point.values) for point in made.points] == expected
    assert [point.name for point in made.points][:2] == ["lr=0.001_dim=32", "lr=0.001_dim=64"]
    for point in made.points:
        job = made.resolved[point.name].job
        assert (job.optimizer.lr, job.model.dim) == tuple(point.values.values())  # type: ignore[attr-defined]
        assert (job.job.name, job.job.dir) == (point.name, str(tmp_path / "sweep" / "points" / point.name))


def test_quoted_keys_and_nested_tables_mean_the_same(tmp_path: Path) -> None:
    quoted = TWO.replace("optimizer.lr", '"optimizer.lr"').replace("model.dim = ", "model = {dim = ").replace("128]", "128]}")
    assert sweep_of(tmp_path, quoted).points == sweep_of(tmp_path, TWO).points


def test_keys_vary_together_as_pairs(tmp_path: Path) -> None:
    text = TWO.replace("[32, 64, 128]", "[32, 64]") + "train.max_steps = [20, 40]\n"
    text = text.replace("[vary]", 'together = [["model.dim", "train.max_steps"]]\n[vary]')
    values = [tuple(point.values.values()) for point in sweep_of(tmp_path, text).points]
    assert values == [(1e-3, 32, 20), (1e-3, 64, 40), (3e-3, 32, 20), (3e-3, 64, 40)]


def test_counted_ranges_of_a_grid_have_both_ends_and_are_even(tmp_path: Path) -> None:
    made = sweep_of(
        tmp_path,
        """
recipe = "debug"
[vary]
optimizer.lr = {low = 1e-4, high = 1e-2, scale = "log", count = 3}
optimizer.weight_decay = {low = 0.0, high = 0.3, count = 2}
schedule.warmup = {low = 1, high = 8, scale = "int", count = 4}
""",
    )
    columns = list(zip(*(point.values.values() for point in made.points), strict=True))
    assert sorted(set(columns[0])) == pytest.approx([1e-4, 1e-3, 1e-2])
    assert sorted(set(columns[1])) == pytest.approx([0.0, 0.3])
    assert sorted(set(columns[2])) == [1, 3, 6, 8]
    assert len(made.points) == 3 * 2 * 4 and all(type(value) is int for value in columns[2])


RANGES = (
    Axis(("a",), range=Range(low=1e-4, high=1e-1, scale="log")),
    Axis(("b",), range=Range(low=-2.0, high=6.0)),
    Axis(("c",), range=Range(low=3, high=5, scale="int")),
    Axis(("d", "e"), (("x", 1), ("y", 2))),
)


def test_draws_are_spread_over_their_ranges() -> None:
    """Means of uniform distributions, within five standard errors."""
    points = sample_points(RANGES, 400, 7)
    logs = [math.log10(point["a"]) for point in points]
    assert all(-4 <= value <= -1 for value in logs) and all(-2 <= point["b"] <= 6 for point in points)
    assert sum(logs) / 400 == pytest.approx(-2.5, abs=5 * 3 / math.sqrt(12 * 400))
    assert sum(point["b"] for point in points) / 400 == pytest.approx(2.0, abs=5 * 8 / math.sqrt(12 * 400))
    assert {point["c"] for point in points} == {3, 4, 5}
    assert {(point["d"], point["e"]) for point in points} == {("x", 1), ("y", 2)}


def test_more_samples_and_other_keys_leave_draws_as_they_are() -> None:
    few, more = sample_points(RANGES, 5, 0), sample_points(RANGES, 12, 0)
    assert more[:5] == few
    assert [point["b"] for point in sample_points(RANGES[1:2], 5, 0)] == [point["b"] for point in few]
    assert sample_points(RANGES, 5, 1) != few
    three = Axis(("d",), (("x",), ("y",), ("z",)))
    assert all(len(sample_points([three], 3, seed)) == 3 for seed in range(5)), "one that was drawn before is drawn again"
    assert len(sample_points([Axis(("d",), (("x",), ("y",)))], 10, 0)) == 2, "a space has no more points than it has"


def test_names_do_not_depend_on_other_values() -> None:
    alone = named([{"optimizer.lr": 0.1, "model.dim": 8}])[0].name
    among = [point.name for point in named([{"optimizer.lr": lr, "model.dim": 8} for lr in (0.2, 0.1)])]
    assert among[1] == alone == "lr=0.1_dim=8"


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"optimizer.lr": 1, "parameters.groups.0.lr": 2}, "optimizer.lr=1_0.lr=2"),
        ({"optimizer.name": "adamw", "model.name": "decoder"}, "optimizer.name=adamw_model.name=decoder"),
        ({"model.dim": -4}, "dim=-4"),
    ],
)
def test_keys_that_end_alike_are_told_apart(values: dict, name: str) -> None:
    assert named([values])[0].name == name


def test_values_that_look_alike_get_different_names_that_are_paths() -> None:
    lists = [[{"a": 1}], [{"a": 2}], "x=y", "x/y", "x y", "../up", "k" * 300, "k" * 299 + "l"]
    names = [point.name for point in named([{"hooks": value} for value in lists])]
    assert len(set(names)) == len(names)
    assert all("/" not in name and not name.startswith(".") and len(name) < 120 for name in names)


def test_repeats_are_seeds_from_that_of_the_recipe(tmp_path: Path) -> None:
    made = sweep_of(tmp_path, TWO + "[search]\nrepeats = 2\n", ["--job.seed=5"])
    assert [made.resolved[point.name].job.job.seed for point in made.points[:4]] == [5, 6, 5, 6]
    assert [point.name for point in made.points[:2]] == ["lr=0.001_dim=32_seed=5", "lr=0.001_dim=32_seed=6"]
    assert made.points[0].setting == made.points[1].setting != made.points[2].setting


def faults(folder: Path, text: str, *overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        sweep_of(folder, text, overrides)
    assert not (folder / "sweep").exists(), "nothing is made"
    return {fault.key: str(fault) for fault in caught.value.faults}


def test_every_fault_is_told_at_once_with_the_nearest_names(tmp_path: Path) -> None:
    told = faults(
        tmp_path,
        """
recipe = "debug"
proceses = 2
[vary]
optimizer.lrr = [1e-3, 3e-3]
model.dim = [32, -64]
model.heads = [3]
schedule.warmpu = [3]
train.max_steps = {low = 10, hihg = 20}
optimizer.weight_decay = 0.1
[search]
kind = "gird"
""",
    )
    assert "did you mean 'processes'?" in told["proceses"]
    assert "did you mean 'lr'?" in told["optimizer.lrr"] and "grid.toml:5" in told["optimizer.lrr"]
    assert "not -64 (point dim=-64) [grid.toml:6]" in told["model.dim"].replace(str(tmp_path) + "/", "")
    assert "kv_heads 2 must divide heads 3" in told["model.kv_heads"]
    assert "did you mean 'warmup'" in told["schedule.warmpu"]
    assert "did you mean 'high'?" in told["vary.train.max_steps.hihg"]
    assert "expected a list of values or a range, not 0.1" in told["vary.optimizer.weight_decay"]
    assert "did you mean 'grid'?" in told["search.kind"]
    assert len(told) == 9, sorted(told)


BAD = {
    'recipe = "debgu"': ("recipe", "did you mean 'debug'?"),
    'search.metric = "evaluation/heldout/loss"': ("search.metric", "did you mean 'evaluation/held_out/loss'"),
    'search.metric = "lss"': ("search.metric", "did you mean 'loss'"),
    'search.kind = "random"': ("search.samples", "is missing"),
    "search.samples = 3": ("search.samples", "has no effect with kind = 'grid'"),
    "search.rungs = [10]": ("search.rungs", "has an effect only with kind = 'halving'"),
    'search.kind = "halving"': ("search.rungs", "is missing"),
    'search.kind = "halving"\nsearch.rungs = [20, 10]': ("search.rungs", "must increase"),
    'search.kind = "halving"\nsearch.rungs = [30]': ("search.rungs", "is not before the end of the run (train.max_steps = 30)"),
    'search.kind = "halving"\nsearch.rungs = [10]\nsearch.repeats = 2': (
        "search.repeats",
        "is not supported with kind = 'halving'",
    ),
    'search.kind = "halving"\nsearch.rungs = [10]\nvary.train.max_steps = [20, 30]': ("vary.train.max_steps", "of one length"),
    "search.repeats = 2\nvary.job.seed = [1]": ("search.repeats", "already varies"),
    "search.keep = 1.0": ("search.keep", "less than 1"),
    'vary.job.dir = ["a"]': ("vary.job.dir", "set by the sweep itself"),
    "vary.train.stop_at = [3]": ("vary.train.stop_at", "set by the sweep itself"),
    "vary.model.layers = []": ("vary.model.layers", "is an empty list"),
    "vary.model.layers = [1, 2, 1]": ("vary.model.layers", "1 is given twice"),
    "vary.model.layers = {low = 3, high = 3, count = 2}": ("vary.model.layers", "low = 3 is not below high = 3"),
    "vary.model.layers = {low = 1.5, high = 3, count = 2, scale = 'int'}": ("vary.model.layers", "not both integers"),
    "vary.optimizer.weight_decay = {low = 0, high = 3, count = 2, scale = 'log'}": (
        "vary.optimizer.weight_decay",
        "no logarithm",
    ),
    "vary.optimizer.weight_decay = {low = 0, high = 3}": ("vary.optimizer.weight_decay", "count = N"),
    "vary.optimizer.weight_decay = {low = 0, high = 0.1, count = 600}": ("vary", "1,200 runs exceed the maximum of 1,000"),
    'together = [["model.dim", "optimizer.lr"]]\nvary.model.dim = [32]': ("together.0", "different lengths"),
    'together = [["optimizer.lr", "model.dmi"]]': ("together.0", "'model.dmi' does not vary"),
    'together = [["optimizer.lr"]]': ("together.0", "at least two keys"),
    "vary.train.max_steps = [2]": ("schedule.warmup", "a warm-up of 3 steps is longer than the run"),
    "vary.data.sequence_length = [128]": ("data.sequence_length", "exceed model.max_length = 64"),
}


@pytest.mark.parametrize("line", BAD)
def test_what_is_refused(tmp_path: Path, line: str) -> None:
    key, words = BAD[line]
    base = "" if line.startswith("recipe") else 'recipe = "debug"\n'
    told = faults(tmp_path, f"{base}{line}\nvary.optimizer.lr = [1e-3, 3e-3]\n")
    assert words in told[key], told


def test_overrides_are_of_every_point_and_have_faults_too(tmp_path: Path) -> None:
    made = sweep_of(tmp_path, TWO, ["--train.max_steps=7"])
    assert {resolved.job.train.max_steps for resolved in made.resolved.values()} == {7}
    told = faults(tmp_path, TWO, "--train.max_stepz=7")
    assert list(told) == ["train.max_stepz"] and "[--train.max_stepz]" in told["train.max_stepz"]
    assert "is given twice" in faults(tmp_path, TWO, "--optimizer.lr=1")["optimizer.lr"]


def test_nothing_varies(tmp_path: Path) -> None:
    assert "is missing" in faults(tmp_path, 'recipe = "debug"')["vary"]
    assert "no key varies" in faults(tmp_path, 'recipe = "debug"\n[vary]')["vary"]


def test_the_recipe_of_a_sweep_is_relative_to_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "mine.toml").write_text('base = "debug"\ntrain.max_steps = 12\n')
    (tmp_path / "below" / "lr.toml").write_text(TWO.replace('"debug"', '"mine.toml"'))
    monkeypatch.chdir(tmp_path)
    made = read_sweep(Path("below/lr.toml"))
    assert made.steps(made.points[0]) == 12
    assert made.directory == Path("sweeps/lr")


def test_metrics_of_hooks_of_others_are_not_known_and_so_not_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom forge_core.component import Component\n"
        "from forge_core.protocols.run import Hook\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(Component):\n    '''Logs a score.'''\n"
        "    def build(self):\n        return Hook()\n"
    )
    hook = f"--hooks=[{{name = '{tmp_path}/mine.py:Mine'}}, {{name = 'save'}}]"
    assert sweep_of(tmp_path, TWO + "[search]\nmetric = 'score'\n", [hook]).grid.search.metric == "score"
