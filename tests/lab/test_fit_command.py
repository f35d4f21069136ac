"""`forge-train fit`: which runs count, what is refused, and what it writes."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge_core.errors import DataError
from forge_lab.scaling.runs import gather
from forge_lab.sweep.files import write_recipes
from forge_train.cli import main
from forge_train.plan import run_size
from forge_train.recipe.load import load_recipe
from forge_train.trackers import METRICS, JsonlTracker
from lab.fake_runs import METRIC, FakeRuns, run_all, sweep_of, write_run
from lab.test_law import CHINCHILLA

GRID = """
recipe = "debug"
[vary]
model.dim = [32, 64, 128]
train.max_steps = [20, 60, 180]
"""


def by_size(job: Any, step: int) -> float:
    """The law of a model's own size."""
    tokens = step * job.train.global_batch * job.data.sequence_length
    return CHINCHILLA.loss(run_size(job).parameters, tokens)


@pytest.fixture
def ladder(tmp_path: Path) -> Path:
    """A finished sweep over sizes and lengths."""
    made = sweep_of(tmp_path, GRID)
    write_recipes(made)
    run_all(made, FakeRuns(by_size))
    return made.directory


def single(folder: Path, name: str, loss: float | Callable[[Any, int], float] = 3.0, step: int | None = None, *more: str) -> Path:
    value = loss if callable(loss) else lambda job, at: loss
    return write_run("debug", value, step, [f"--job.dir={folder / name}", f"--job.name={name}", *more])


def test_runs_of_a_sweep_have_their_own_sizes(ladder: Path) -> None:
    found = gather([ladder])
    assert found.metric == METRIC and found.left_out == () and len(found.runs) == 9
    assert {run.tokens for run in found.runs} == {steps * 8 * 64 for steps in (20, 60, 180)}
    # By hand: two blocks of attention (4 query and 2 key-value heads), a gated MLP and two norms; a table and a head of 320.
    for dim in (32, 64, 128):
        (run,) = (run for run in found.runs if run.name == f"dim={dim}_max_steps=20")
        ffn = run_ffn(dim)
        block = dim * dim + 2 * dim * (dim // 2) + dim * dim + 3 * dim * ffn + 2 * dim
        blocks = 2 * block + dim
        assert run.parameters == blocks + 2 * 320 * dim
        assert {one.name: one.parameters for one in gather([ladder], counted="blocks").runs}[run.name] == blocks
        assert {one.name: one.parameters for one in gather([ladder], counted="active").runs}[run.name] == run.parameters


@pytest.mark.parametrize(
    ("phases", "tokens"),
    [
        ("[]", 30 * 8 * 64),
        ("[{start = 10, global_batch = 16}]", 10 * 8 * 64 + 20 * 16 * 64),
        ("[{start = 10, sequence_length = 32}, {start = 25, sequence_length = 64}]", (10 * 64 + 15 * 32 + 5 * 64) * 8),
        ("[{start = 40, global_batch = 16}]", 30 * 8 * 64),
    ],
)
def test_tokens_follow_the_phases_of_the_data(phases: str, tokens: int) -> None:
    found = run_size(load_recipe("debug", [f"--data.phases={phases}"]).job)
    assert found.tokens == tokens
    # 6 P + 6 L H (Dk + Dv) T a token, of the rows' own length T; 2 layers of 4 heads of 16 and 16.
    matrix = found.parameters - 320 * 64 - 5 * 64
    if "sequence_length" not in phases:
        assert found.flops == pytest.approx(tokens * (6 * matrix + 6 * 2 * 4 * 32 * 64))
    else:
        assert found.flops < tokens * (6 * matrix + 6 * 2 * 4 * 32 * 64)


def run_ffn(dim: int) -> int:
    """Width of the MLP that the decoder's own configuration gives."""
    shape = load_recipe("debug", [f"--model.dim={dim}"]).job.model.shape  # type: ignore[attr-defined]
    return shape.ffn_dim


def test_products_of_images_are_not_guessed() -> None:
    """How many images a run has is not known before its data: the rule of thumb stands, as where nothing is declared."""
    found = run_size(load_recipe("debug-joint", []).job)
    assert found.flops == 6 * found.parameters * found.tokens and found.blocks is found.active is None


def test_what_of_a_sweep_cannot_count_is_left_out_with_the_reason(tmp_path: Path) -> None:
    made = sweep_of(tmp_path, GRID)
    write_recipes(made)
    names = [point.name for point in made.points]
    run_all(made, FakeRuns(by_size, codes={names[0]: [2]}))
    write_run(made.recipe_of(made.points[1]), by_size, 50)
    (made.folder(made.points[1]) / METRICS).unlink()
    write_run(made.recipe_of(made.points[1]), by_size, 50)
    (made.folder(made.points[2]) / METRICS).unlink()
    write_run(made.recipe_of(made.points[2]), lambda job, step: math.nan)
    found = gather([made.directory])
    assert dict(found.left_out).keys() == set(names[:3])
    assert "not begun" in dict(found.left_out)[names[0]]
    assert "step 50 of 60" in dict(found.left_out)[names[1]] and "--unfinished" in dict(found.left_out)[names[1]]
    assert "is nan" in dict(found.left_out)[names[2]]
    among = {run.name: run for run in gather([made.directory], unfinished=True).runs}
    assert among[names[1]].tokens == 50 * 8 * 64


def test_runs_that_are_named_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"step 12 of 30.*--unfinished"):
        gather([single(tmp_path, "a", 3.0, 12)])
    with pytest.raises(DataError, match=rf"it has no 'evaluation/heldout/loss' at step 30; did you mean '{METRIC}'"):
        gather([single(tmp_path, "b")], "evaluation/heldout/loss")
    with pytest.raises(DataError, match=r"neither sweep\.json of a sweep nor config\.toml of a run"):
        gather([tmp_path])
    with pytest.raises(DataError, match="given twice"):
        gather([single(tmp_path, "c"), tmp_path / "b" / ".." / "c"])
    with pytest.raises(DataError, match="d and e have the same recipe and seed"):
        gather([single(tmp_path, "d"), single(tmp_path, "e")])


def test_seeds_count_each_and_of_other_keys_the_best_run(tmp_path: Path) -> None:
    one, two = single(tmp_path, "one", 3.0), single(tmp_path, "two", 3.2, None, "--job.seed=1")
    worse, better = (
        single(tmp_path, name, loss, None, f"--optimizer.lr={lr}") for name, loss, lr in (("w", 3.5, 1), ("b", 2.9, 2))
    )
    found = gather([one, two, worse, better])
    assert {run.name: run.loss for run in found.runs} == {"two": 3.2, "b": 2.9}
    assert {name for name, _ in found.left_out} == {"one", "w"}


def test_a_pause_in_a_metric_is_not_the_end(tmp_path: Path) -> None:
    """A loss evaluated before the last step is not taken as the final loss, unless unfinished runs count."""
    folder = single(tmp_path, "a")
    JsonlTracker(folder / METRICS).write(30, {"loss": 1.0, "tokens": 30 * 512})
    assert gather([folder]).runs[0].loss == 3.0
    lines = '{"step": 20, "evaluation/held_out/loss": 4.0, "tokens": 10240}\n{"step": 30, "loss": 1.0, "tokens": 15360}\n'
    (folder / METRICS).write_text(lines)
    with pytest.raises(DataError, match="it has no"):
        gather([folder])
    run = gather([folder], unfinished=True).runs[0]
    assert (run.loss, run.tokens) == (4.0, 10240)


def test_the_law_of_a_sweep_is_written_and_shown(ladder: Path, capsys: Any) -> None:
    code, _ = say(capsys, "fit", str(ladder), "--budget", "1e18", "--resamples", "100")
    assert code == 0
    found = json.loads((ladder / "fit.json").read_text())
    for name, value in (("E", 1.69), ("A", 406.4), ("B", 410.7), ("alpha", 0.34), ("beta", 0.28)):
        assert found["law"][name]["value"] == pytest.approx(value, rel=1e-3)
        assert found["law"][name]["low"] <= found["law"][name]["high"]
    (budget,) = found["budgets"]
    assert budget["parameters"]["value"] == pytest.approx(CHINCHILLA.best_parameters(1e18), rel=1e-3)
    assert budget["tokens"]["value"] == pytest.approx(CHINCHILLA.best_tokens(1e18), rel=1e-3)
    ratio = CHINCHILLA.best_tokens(1e18) / CHINCHILLA.best_parameters(1e18)
    assert budget["tokens_per_parameter"]["value"] == pytest.approx(ratio, rel=1e-3)
    assert max(abs(run["residual"]) for run in found["runs"]) < 1e-6
    assert found["intervals"]["resamples"] == 100 and found["parameters_counted"] == "all" and found["flops"] == "C = 6 N D"
    page = (ladder / "fit.html").read_text()
    assert page.count("<svg") == 4 and "src=" not in page and not re.search(r"https?://", page)
    assert "NaN" not in page and "nan" not in re.findall(r'(?:cx|cy|points)="([^"]*)"', page)
    code, _ = say(capsys, "sweep", str(ladder.parent / "grid.toml"), "--dir", str(ladder), "--results")
    assert code == 0 and "Compute-optimal sizes" in (ladder / "index.html").read_text()


def test_json_is_one_document_and_a_budget_a_positive_number(ladder: Path, tmp_path: Path, capsys: Any) -> None:
    code, out = say(capsys, "fit", str(ladder), "--json", "--resamples", "100", "--output", str(tmp_path / "elsewhere"))
    found = json.loads(out)
    assert code == 0 and found["law"]["E"]["value"] == pytest.approx(1.69, rel=1e-3)
    assert (tmp_path / "elsewhere" / "fit.html").is_file() and not (ladder / "fit.json").exists()
    assert [item["times_the_largest_run"] for item in found["budgets"]] == pytest.approx([1, 10, 100])
    for budget in ("0", "-1", "inf", "nan"):
        code, out = say(capsys, "fit", str(ladder), "--json", "--budget", budget)
        assert code == 2 and "--budget" in json.loads(out)["message"]


def say(capsys: Any, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0), capsys.readouterr().out
