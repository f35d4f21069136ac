"""The hook `inside`: its numbers are those of the checkpoints, in every layout, and a run with it is the run without it."""

import json
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_ckpt.checkpoint.verification import open_manifest
from forge_ckpt.store.local import LocalStore
from forge_core.batch import IGNORE
from forge_core.errors import ForgeError
from forge_core.protocols.run import Hook
from forge_core.registry import Registry, installed
from forge_interp.attention_scores import capture_qk
from forge_interp.captures import capture
from forge_interp.commands.inside import Inside, agreement
from forge_interp.methods.probes import effective_rank
from forge_interp.similarity import Moments, gram, gram_cka, gram_rank, unbiased_cka
from forge_train.inference.stored import load_model, open_weights
from forge_train.recipe.load import load_recipe
from forge_train.report.charts import FAMILIES
from forge_train.report.page import report
from forge_train.run.loop import fit
from harness.pool import World
from harness.siblings import fast
from train.runs import TINY, prepared, train

RECIPE = (
    TINY.replace('[[hooks]]\nname = "save"', "")
    + """
[data.evaluation.held_out]
name = "random"
vocab_size = 61
tokens = 200
seed = 1
"""
)
EXPERTS = RECIPE.replace("[data]", "[model.moe]\nexperts = 4\nfirst_dense = 1\n\n[data]", 1)
Whole = tuple[dict[str, Any], dict[int, dict[str, float]]]
SAVE = '{name="save"}'
LOOK = '{name="inside", every=2, rows=3, tokens=24'


def hooks(statistics: str = "") -> str:
    return f"--hooks=[{LOOK}{statistics}}}, {SAVE}]"


def written(directory: Path) -> dict[int, dict[str, float]]:
    """By step what the hook logged, without what it took."""
    found: dict[int, dict[str, float]] = {}
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        inside = {name: value for name, value in entry.items() if name.startswith("inside/") and name != "inside/seconds"}
        if inside:
            found[entry["step"]] = inside  # a line behind a resume takes the place of an older one
    return found


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(RECIPE)
    return tmp_path / "tiny.toml"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """What an uninterrupted run with the hook ended with, and what the hook logged."""
    file = tmp_path_factory.mktemp("whole") / "tiny.toml"
    file.write_text(RECIPE)
    return run(file, "whole", hooks()), written(file.parent / "whole")


def run(recipe: Path, name: str, *more: str) -> dict[str, Any]:
    return train(recipe, [f"--job.dir={recipe.parent / name}", *more])


def test_the_numbers_are_those_of_the_checkpoints(recipe: Path) -> None:
    recipe.write_text(EXPERTS)
    run(recipe, "run", hooks(), "--train.max_steps=4", "--checkpoint.every=2", "--checkpoint.keep=9", "--optimizer.lr=0.1")
    found = written(recipe.parent / "run")
    assert sorted(found) == [0, 2, 4]
    held_out = prepared(recipe, [f"--job.dir={recipe.parent / 'other'}", "--hooks=[]"])[0].evaluations["held_out"]
    batch = next(iter(held_out.batches(0, 1, 3)))
    assert batch.documents is not None
    places = [1, 3, 5, 7, 9, 11, 13, 15]  # 8 of each of 3 rows
    seen: dict[int, tuple[Any, Any]] = {}
    for step in (2, 4):
        [place] = (recipe.parent / "run" / "checkpoints").glob(f"step*{step}")
        model = load_model(open_weights(place, Registry()))
        names = ["blocks.*.residual_after", "blocks.1.router.experts"]
        with torch.no_grad(), capture_qk(model) as kept, capture(model, names) as read:
            model(batch.tokens, documents=batch.documents)
        streams = [read[f"blocks.{layer}.residual_after"][:, places].flatten(0, 1) for layer in range(2)]
        seen[step] = streams, read["blocks.1.router.experts"][:, places].flatten(0, 1)
        losses = lens_losses_with_documents(model, batch)
        for layer, stream in enumerate(streams):
            mine = {name.rpartition("/")[2]: value for name, value in found[step].items() if f"blocks.{layer}/" in name}
            assert mine["effective_rank"] == pytest.approx(float(effective_rank(stream)), rel=1e-4)
            assert mine["attention_entropy"] == pytest.approx(float(kept.entropy(layer, queries=places).mean()), rel=1e-5)
            assert mine["max_score"] == pytest.approx(float(kept.max_logit(layer, queries=places).max()), rel=1e-5)
            assert mine["lens_loss"] == pytest.approx(losses[layer], rel=1e-5)
    for layer in range(2):
        expected = float(unbiased_cka(Moments.of(seen[4][0][layer], seen[2][0][layer])))
        assert found[4][f"inside/blocks.{layer}/cka_previous"] == pytest.approx(expected, abs=1e-5)
        assert found[2][f"inside/blocks.{layer}/cka_previous"] == found[2][f"inside/blocks.{layer}/cka_first"]
        assert found[4][f"inside/blocks.{layer}/cka_first"] < found[2][f"inside/blocks.{layer}/cka_first"] < 1
        assert f"inside/blocks.{layer}/cka_first" not in found[0]
    kept = json.loads((recipe.parent / "run" / "similarity.json").read_text())
    assert kept["step"] == 4
    now, first = kept["maps"]
    assert now["rows"] == now["columns"] == first["rows"] == first["columns"] == ["blocks.0", "blocks.1"]
    expected = float(unbiased_cka(Moments.of(*seen[4][0])))
    assert now["values"] == [[1.0, pytest.approx(expected, abs=1e-4)], [pytest.approx(expected, abs=1e-4), 1.0]]
    for layer in range(2):
        since = found[4][f"inside/blocks.{layer}/cka_first"]
        assert first["values"][layer][layer] == pytest.approx(since, abs=1e-4)
    page = report([recipe.parent / "run"]).read_text()
    assert f"<title>blocks.0, blocks.1: {now['values'][0][1]:.3f}</title>" in page
    same = [len(set(a) & set(b)) / len(a) for a, b in zip(seen[4][1].tolist(), seen[2][1].tolist(), strict=True)]
    assert found[4]["inside/blocks.1/router_agreement"] == pytest.approx(sum(same) / len(same))
    assert "inside/blocks.0/router_agreement" not in found[4]


def lens_losses_with_documents(model: Any, batch: Any) -> list[float]:
    """Head and norm on each stream, by torch's cross-entropy."""
    with torch.no_grad(), capture(model, "blocks.*.residual_after", keep="graph") as seen:
        model(batch.tokens, documents=batch.documents)
        return [
            float(
                torch.nn.functional.cross_entropy(
                    model.head(model.norm(stream)).flatten(0, 1).double(), batch.labels.flatten(), ignore_index=IGNORE
                )
            )
            for stream in seen.values()
        ]


def test_a_run_with_it_is_the_run_without_it_also_when_it_is_cut_in_two(recipe: Path, whole: Whole) -> None:
    without = run(recipe, "without", f"--hooks=[{SAVE}]")
    ended, expected = whole[0], deepcopy(whole[1])
    assert ended["losses"] == without["losses"]
    assert ended["weights"] == without["weights"]
    run(recipe, "cut", hooks(), "--train.stop_at=5")
    rest = run(recipe, "cut", hooks())
    assert rest["weights"] == without["weights"]
    found = written(recipe.parent / "cut")
    assert found.pop(5)  # where it stopped, and what the look at step 6 has before it
    for values in (found[6], expected[6]):
        assert values.pop("inside/blocks.0/cka_previous")
        assert values.pop("inside/blocks.1/cka_previous")
    assert found == expected
    kept = {path.name for path in (recipe.parent / "cut" / "inside").iterdir()}
    assert "first.safetensors" in kept
    assert len(kept) <= 7


def test_a_run_goes_back_to_what_its_checkpoint_was_compared_with(recipe: Path, whole: Whole) -> None:
    """Looks behind the checkpoint that a run goes on from are void."""
    cut = recipe.parent / "cut"
    with pytest.raises(KeyboardInterrupt):
        interrupted(recipe, 5)
    run(recipe, "cut", hooks())  # from step 3, behind which there was a look already
    assert written(cut) == whole[1]
    for file in (cut / "inside").iterdir():
        file.unlink()
    run(recipe, "cut", hooks(), "--train.max_steps=10")
    found = written(cut)
    assert "inside/blocks.0/cka_first" not in found[10]
    assert "inside/blocks.0/cka_previous" not in found[10]
    assert "inside/blocks.0/effective_rank" in found[10]


def interrupted(recipe: Path, step: int) -> None:
    from forge_train.run.loop import fit

    made, _ = prepared(recipe, [f"--job.dir={recipe.parent / 'cut'}", hooks()])

    class Stops(Hook):
        def after_step(self, run: Any, result: Any) -> None:
            if run.state.step == step:
                made.saves.finish()
                raise KeyboardInterrupt

    made.hooks.append(Stops())
    fit(made)


def test_a_run_of_before_the_hook_moved_to_this_package_goes_on(
    recipe: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint names forge-train as the distribution of the hook, and keeps the state of the hook under that name."""
    today = list(installed())
    before = [replace(part, distribution="forge-train") if part.name == "inside" else part for part in today]
    with monkeypatch.context() as earlier:
        earlier.setattr("forge_core.registry.installed", lambda: iter(before))
        run(recipe, "cut", hooks(), "--train.stop_at=3")
    facts = open_manifest(LocalStore(recipe.parent / "cut" / "checkpoints"), "step-00000003")[0].meta
    (part,) = (item for item in facts["plugins"] if item["name"] == "inside")
    states = dict(facts["hooks"])
    assert part["distribution"] == "forge-train"
    assert states["forge-train:inside"] == {"last": 2} and "forge-interp:inside" not in states
    made, _ = prepared(recipe, [f"--job.dir={recipe.parent / 'cut'}", hooks()])
    assert next(hook.last for hook in made.hooks if isinstance(hook, Inside)) == 2
    fit(made)
    found, expected = written(recipe.parent / "cut"), whole[1]
    assert found[6]["inside/blocks.0/cka_first"] == expected[6]["inside/blocks.0/cka_first"]
    assert "inside/blocks.0/cka_previous" in found[4], "compared with the look of the checkpoint"
    facts = open_manifest(LocalStore(recipe.parent / "cut" / "checkpoints"), "step-00000006")[0].meta
    (part,) = (item for item in facts["plugins"] if item["name"] == "inside")
    assert part["distribution"] == "forge-interp" and "forge-interp:inside" in dict(facts["hooks"])


def test_a_recipe_may_name_the_former_distribution(recipe: Path) -> None:
    """A resume takes both names for the same hook."""
    former = hooks().replace('"inside"', '"forge-train:inside"')
    run(recipe, "cut", former, "--train.stop_at=3")
    assert run(recipe, "cut", hooks())["step"] == 8
    assert run(recipe, "cut", former, "--train.max_steps=9")["step"] == 9


LAYOUTS = {
    "dp2": ("--parallel.dp_shard=2",),
    "tp2": ("--parallel.tp=2",),
    "pp2": ("--parallel.pp=2",),
    "cp2": ("--parallel.cp=2",),
}


@pytest.mark.parametrize("layout", fast("tp2", of=LAYOUTS))
def test_layouts_say_the_same_and_train_the_same(recipe: Path, world: World, layout: str) -> None:
    refused = {"pp2": "lens", "cp2": "attention"}.get(layout)
    kept = [name for name in ("cka", "effective_rank", "attention", "lens", "routing") if name != refused]
    look = hooks(f", statistics={json.dumps(kept)}")
    more = ["--train.max_steps=4", "--precision.compute=fp32"]
    run(recipe, "one", look, *more)
    arguments = [*more, *LAYOUTS[layout]]
    with_it = world.run(train, 2, recipe, [f"--job.dir={recipe.parent / 'with'}", look, *arguments])
    without = world.run(train, 2, recipe, [f"--job.dir={recipe.parent / 'without'}", f"--hooks=[{SAVE}]", *arguments])
    for mine, plain in zip(with_it, without, strict=True):
        assert mine["losses"] == plain["losses"]
        assert mine["weights"] == plain["weights"]
    one, found = (written(recipe.parent / name) for name in ("one", "with"))
    assert found.keys() == one.keys()
    for step, values in one.items():
        assert found[step] == pytest.approx(values, rel=2e-3, abs=1e-4)
    assert f"inside/blocks.1/{'lens_loss' if refused != 'lens' else 'max_score'}" in found[2]


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["--data.evaluation={}"], "'inside' needs a held-out set"),
        ([hooks(', held_out="other"')], "'other' is not a held-out set"),
        (["--parallel.cp=2"], "'attention' cannot be measured: parallel.cp = 2"),
        (["--parallel.pp=2"], "'lens' cannot be measured: parallel.pp = 2"),
        (["--model.streams.count=2"], "'lens' reads one residual stream, but model.streams"),
        ([hooks(', statistics=["cca"]')], "statistics"),
    ],
)
def test_what_cannot_be_measured_is_refused(recipe: Path, overrides: list[str], match: str) -> None:
    if "data.evaluation" in overrides[0]:
        recipe.write_text(RECIPE[: RECIPE.index("[data.evaluation")])
        overrides = []
    given = overrides if "hooks" in str(overrides) else [hooks(), *overrides]
    with pytest.raises(ForgeError, match=match):
        load_recipe(recipe, given, 2 if "parallel" in str(overrides) else 1, Registry())


def test_measures_of_products_are_those_of_the_rows() -> None:
    x, y = torch.randn(20, 50, dtype=torch.float64) + 3, torch.randn(20, 7, dtype=torch.float64)
    y[:, :2] += x[:, :2]
    assert float(gram_cka(gram(x), gram(y))) == pytest.approx(float(unbiased_cka(Moments.of(x, y))), rel=1e-9)
    assert float(gram_rank(gram(x))) == pytest.approx(float(effective_rank(x)), rel=1e-9)
    assert float(gram_rank(gram(y))) == pytest.approx(float(effective_rank(y)), rel=1e-6)
    assert gram_cka(gram(x), torch.zeros(20, 20)).isnan()
    assert agreement(torch.tensor([[0, 1], [2, 3]]), torch.tensor([[1, 4], [3, 2]])) == 0.75


def test_every_number_has_a_chart() -> None:
    for name in (
        "cka_first",
        "cka_previous",
        "effective_rank",
        "attention_entropy",
        "max_score",
        "lens_loss",
        "router_agreement",
    ):
        assert any(re.fullmatch(family.pattern, f"inside/blocks.0/{name}") for family in FAMILIES)
