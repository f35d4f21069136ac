"""`data mix --plan` and the checks of a recipe's phases."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_core.errors import ConfigError
from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_data.__main__ import main
from forge_data.checks import phases_fit
from forge_data.commands.mix import mix
from forge_data.components import RandomTokens
from forge_data.section import Data, Phase

RECIPE = """
[job]
seed = 4

[model]
name = "decoder"
dim = 64

[data]
sequence_length = 32

[[data.sources]]
name = "random"
vocab_size = 100
tokens = 3201
label = "web"
weight = 0.75

[[data.sources]]
name = "random"
vocab_size = 100
tokens = 641
label = "code"
weight = 0.25

[[data.phases]]
start = 10
weights = { code = 0.75 }

[[data.phases]]
start = 20
sequence_length = 16
global_batch = 16
lr_scale = 0.1

[train]
max_steps = 40
global_batch = 8
micro_batch = 2

[optimizer]
name = "adamw"
lr = 1.0
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return "recipe.toml"


def exit_code(arguments: list[str]) -> int | str | None:
    try:
        return main(arguments)
    except SystemExit as end:  # how the command line library ends
        return end.code


def test_the_plan_counts_tokens_and_epochs_of_each_phase(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["mix", recipe, "--plan", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [(phase["start"], phase["stop"]) for phase in plan["phases"]] == [(0, 10), (10, 20), (20, 40)]
    # 100 and 20 samples make an epoch; a step has 8 samples of 32 tokens in every phase.
    web, code = ([phase["sources"][label] for phase in plan["phases"]] for label in ("web", "code"))
    assert [entry["tokens"] for entry in web] == [60 * 32, 40 * 32, 80 * 32]
    assert [entry["tokens"] for entry in code] == [20 * 32, 40 * 32, 80 * 32]
    assert [entry["epochs_so_far"] for entry in web] == pytest.approx([0.6, 1.0, 1.8])
    assert [entry["epochs"] for entry in code] == pytest.approx([1.0, 2.0, 4.0])
    assert [entry["planned_tokens"] for entry in code] == pytest.approx([640, 1280, 2560])
    assert [(phase["sequence_length"], phase["global_batch"], phase["lr_scale"]) for phase in plan["phases"]] == [
        (32, 8, 1.0),
        (32, 8, 1.0),
        (16, 16, 0.1),
    ]
    assert plan["tokens"] == 40 * 256 and plan["warnings"] == [
        "source 'code' is read 7.0 times; epochs beyond 4 have little value"
    ]


def test_w7_the_plan_says_what_is_drawn(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    weights = ["--data.sources.0.weight=1.0", "--data.sources.1.weight=1e-7", "--data.phases=[]", "--steps=1250000"]
    assert exit_code(["mix", recipe, "--plan", "--json", *weights]) == 0
    (phase,) = json.loads(capsys.readouterr().out)["phases"]
    web, code = (phase["sources"][label] for label in ("web", "code"))
    assert (web["samples"], code["samples"]) == (9_999_999, 1)  # of 10 million; 153 with weights of a period of 65,536
    assert code["tokens"] == 32 and code["planned_tokens"] == pytest.approx(32 * 10**7 / 10_000_001)
    # Before sample 5,000,000 none was drawn, where the weights ask for half a sample.
    assert 0.48 < abs(phase["largest_deviation"]["samples"]) <= 0.5
    assert exit_code(["mix", recipe, "--plan", *weights]) == 0
    said = capsys.readouterr().out
    assert " 1e-05% " in said and "largest deviation from the weights: " in said and "  0.00%" not in said


def test_w7_the_plan_compares_draws_with_the_weights_since_the_start(recipe: str) -> None:
    """3 to 1 in steps of 3 samples; from step 10 on 1 to 1; a ramp to 1 to 3 from step 20 on."""
    phases = "--data.phases=[{start=10,weights={code=0.75}},{start=20,ramp=5,weights={web=0.25}}]"
    plan = mix(recipe, [phases, "--train.global_batch=3", "--train.micro_batch=1"], None, None, print)
    found = [phase["largest_deviation"] for phase in plan["phases"]]
    assert [abs(entry["samples"]) for entry in found] == [0.5, 1.0, pytest.approx(0.5, abs=1.2)]
    for phase, entry in zip(plan["phases"], found, strict=True):
        assert phase["start"] < entry["step"] <= phase["stop"] and entry["source"] in ("web", "code")
    asked = [0.75 * 30, 0.5 * 30, 3 * sum(0.5 - 0.25 * (stair + 0.5) / 5 for stair in range(5)) + 0.25 * 45]
    assert [phase["sources"]["web"]["planned_tokens"] for phase in plan["phases"]] == pytest.approx([32 * a for a in asked])


def test_the_largest_deviation_may_be_a_lack_and_is_that_after_the_last_step(recipe: str) -> None:
    third = "{name='random',vocab_size=100,tokens=641,label='c',weight=0.1}"
    sources = third.replace("'c',weight=0.1", "'a',weight=0.7"), third.replace("'c',weight=0.1", "'b',weight=0.2"), third
    seen = set()
    for batch in range(1, 10):
        changes = [f"--data.sources=[{','.join(sources)}]", "--data.phases=[]", f"--train.global_batch={batch}"]
        (phase,) = mix(recipe, [*changes, "--train.micro_batch=1"], 1, None, print)["phases"]
        shares = {"a": 0.7, "b": 0.2, "c": 0.1}
        found = {label: entry["samples"] - batch * shares[label] for label, entry in phase["sources"].items()}
        farthest = phase["largest_deviation"]
        assert abs(farthest["samples"]) == pytest.approx(max(map(abs, found.values())))
        assert farthest["samples"] == pytest.approx(found[farthest["source"]]) and farthest["step"] == 1
        seen.add(farthest["samples"] < 0)
    assert seen == {True, False}


def test_the_plan_as_text_with_overrides(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["mix", recipe, "--plan", "--steps=30", "--data.epochs=2"]) == 0
    said = capsys.readouterr().out
    assert "steps 0 to 10: 2,560 tokens, 8 rows of 32, lr x 1" in said
    assert "web" in said and "75.00%" in said and "1.000 epochs, 1.000 so far" in said
    assert "warning: the data end after step 15, before the 30 steps of the run" in said


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--data.phases.0.weights.cod=1"], r"weights\.cod: no source has the label 'cod'; did you mean 'code'"),
        (["--train.max_steps=15"], r"phases\.1\.start: step 20 is never reached"),
        (["--data.phases.0.wieghts={}"], "wieghts"),
        (["--data.packing=best"], "best"),
        (["--data.phases.0.start=0"], r"phases\.0\.start"),
    ],
)
def test_faults_of_the_recipe_are_found_before_anything_is_opened(recipe: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mix(recipe, overrides, None, None, print)


def test_the_command_says_what_it_needs(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["mix", recipe]) == 2
    assert "--plan" in capsys.readouterr().err


def job(*phases: Phase, **model: Any) -> Any:
    sources = [RandomTokens(vocab_size=9, label=label) for label in ("web", "code")]
    data = Data(sequence_length=16, sources=sources, phases=list(phases))
    train = SimpleNamespace(max_steps=100, global_batch=8, micro_batch=2)
    return SimpleNamespace(data=data, train=train, model=SimpleNamespace(**model))


def test_the_check_is_registered_and_sees_layout_and_model() -> None:
    entry = Registry().find("forge.checks", "phases_fit")
    assert entry.distribution == "forge-data" and Registry().load_entry(entry) is phases_fit
    long, wide = Phase(start=3, sequence_length=64), Phase(start=3, global_batch=12)
    assert not phases_fit(job(), Layout())
    assert [fault.key for fault in phases_fit(job(long, max_length=32), Layout())] == ["data.phases.0.sequence_length"]
    assert not phases_fit(job(long, max_length=64), Layout())
    two = Layout.of({"dp_shard": 4}, 4)
    assert [fault.key for fault in phases_fit(job(wide), two)] == ["data.phases.0.global_batch"]
    assert [fault.key for fault in phases_fit(job(Phase(start=3, weights={"wbe": 1.0})), Layout())] == [
        "data.phases.0.weights.wbe"
    ]
