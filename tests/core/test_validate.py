"""Typing: strict, every fault at once, in plain words, with what to do where an author trips."""

import codecs
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Gt, MultipleOf
from hypothesis import given
from hypothesis import strategies as st

from core import sample
from core.test_layers import faults, load, write
from forge_core.component import Component, Slot
from forge_core.config.tree import DEFAULT, Table, build, plain
from forge_core.config.validation import INVALID, PartialRecipe, resolve, run_checks, walk
from forge_core.errors import ConfigError, Fault
from forge_core.layout import Layout


def tree(values: dict[str, Any]) -> Table:
    made = build(values, (), lambda path: "at " + ".".join(map(str, path)), Path("/folder"))
    assert isinstance(made, Table)
    return made


def said(values: dict[str, Any], schema: type = sample.Job) -> dict[str, str]:
    """Dotted key -> message and hint of each fault."""
    outcome = walk(schema, tree(values), sample.registry())
    assert (outcome.value is INVALID) == bool(outcome.faults)
    assert len({fault.key for fault in outcome.faults}) == len(outcome.faults)
    return {fault.key: f"{fault.message} | {fault.hint}" for fault in outcome.faults}


def test_an_empty_recipe_is_all_defaults() -> None:
    outcome = resolve(sample.Job, Table({}, DEFAULT), sample.registry())
    assert outcome.value == sample.Job(
        model=sample.Decoder(attention=sample.Gqa()), optimizer=sample.Adam(), train=sample.Train(steps=500)
    )
    assert set(outcome.used) == {("forge.models", "decoder"), ("forge.attentions", "gqa"), ("forge.optimizers", "adam")}


def test_fault_47_every_fault_is_reported_at_once_with_its_origin() -> None:
    bad = {
        "modle": {},
        "job": {"seed": "7"},
        "model": {"dim": 2.7, "attention": {"heads": 0, "kv_heads": 2}, "moe": {"router": {"bias": 1}}},
        "data": {
            "shuffle": "permut",
            "length": True,
            "sources": [{"name": "text", "path": "a", "weight": -1}, {"path": "b"}, {"name": "txet"}],
            "phases": [{"start": 0, "weights": {"code": "much", "text": 1}}, {"weigths": {}}],
            "tags": "x",
        },
        "train": {"deterministic": "ture", "clip": 0, "steps": 10},
        "transforms": {"recompute": {"policy": 3}, "recomptue": {}},
        "optimizer": {"name": "adm", "lr": "fast"},
    }
    outcome = walk(sample.Job, tree(bad), sample.registry())
    assert {fault.key: fault.origin for fault in outcome.faults} == {
        key: "at " + origin
        for key, origin in {
            "modle": "modle",
            "job.seed": "job.seed",
            "model.dim": "model.dim",
            "model.attention.heads": "model.attention.heads",
            "model.moe.experts": "model.moe",
            "model.moe.router.bias": "model.moe.router.bias",
            "data.shuffle": "data.shuffle",
            "data.length": "data.length",
            "data.sources.0.weight": "data.sources.0.weight",
            "data.sources.1.name": "data.sources.1",
            "data.sources.2.name": "data.sources.2.name",
            "data.phases.0.weights.code": "data.phases.0.weights.code",
            "data.phases.1.weigths": "data.phases.1.weigths",
            "data.phases.1.start": "data.phases.1",
            "data.tags": "data.tags",
            "train.deterministic": "train.deterministic",
            "train.clip": "train.clip",
            "transforms.recompute.policy": "transforms.recompute.policy",
            "transforms.recomptue.name": "transforms.recomptue",
            "optimizer.name": "optimizer.name",
        }.items()
    }
    message = str(ConfigError(outcome.faults))
    assert message.startswith("20 faults")
    assert all(fault.key in message and fault.origin in message for fault in outcome.faults)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("train.steps", 2.7, "expected an integer greater than 0, not 2.7"),
        ("train.steps", "3", "expected an integer greater than 0, not '3'"),
        ("train.steps", True, "expected an integer greater than 0, not True"),
        ("train.steps", 0, "expected an integer greater than 0, not 0"),
        ("train.clip", "off", "expected a number greater than 0, or 'none' to unset it, not 'off'"),
        ("train.clip", True, "a number greater than 0"),
        ("train.clip", float("inf"), "not a finite number"),
        ("train.clip", float("nan"), "not a finite number"),
        ("train.deterministic", "ture", "expected true or false, not 'ture' | did you mean 'true'?"),
        ("train.deterministic", "on", "expected true or false"),
        ("train.deterministic", 1, "expected true or false"),
        ("job.name", 3, "expected text, not 3"),
        ("data.shuffle", "permut", "expected one of 'permute', 'none', not 'permut' | did you mean 'permute'?"),
        ("data.tags", ["a", "b", "c", "d"], "expected a list of texts of length at most 3"),
        ("data.tags", "a", "expected a list of texts"),
        ("optimizer", "muon", "write optimizer.name = 'muon'"),
        ("optimizer.betas", [0.9], "a list of 2"),
        ("data.sources", {"name": "text"}, "expected a list of source tables, not a table"),
        ("data", 3, "expected a table, not 3"),
        ("train", "none", "expected a table, not 'none'"),
        ("transforms.recompute.name", "recmpute", "did you mean 'recompute'?"),
        ("optimizer.name", 3, "expected text, not 3"),
        ("train.stpes", 3, "unknown key | did you mean 'steps'?"),
        ("job.verbose", True, "unknown key | known: name, seed"),
    ],
)
def test_one_wrong_value(key: str, value: Any, words: str) -> None:
    values: dict[str, Any] = {}
    at = values
    *sections, last = key.split(".")
    for section in sections:
        at = at.setdefault(section, {})
    at[last] = value
    found = said(values)
    assert list(found) == [key] or list(found) == [f"{key}.1"]
    assert words in next(iter(found.values()))


def test_parts_of_lists_and_tables_are_blamed_themselves() -> None:
    assert said({"optimizer": {"betas": [0.9, 1.5]}}).keys() == {"optimizer.betas.1"}
    assert said({"data": {"tags": ["a", 1]}}).keys() == {"data.tags.1"}


def test_a_date_is_no_text(tmp_path: Path) -> None:
    import tomllib

    assert "is a date" in said(tomllib.loads("job.name = 2020-01-01"))["job.name"]


def test_rules_of_a_section_become_faults() -> None:
    whole = said({"train": {"deterministic": True, "steps": 10**7}})
    assert whole == {"train": "too long to be deterministic | "}
    named = walk(sample.Job, tree({"model": {"attention": {"heads": 8, "kv_heads": 3}}}), sample.registry()).faults
    assert [(f.key, f.origin) for f in named] == [("model.attention.kv_heads", "at model.attention.kv_heads")]


def test_what_is_right_is_made_even_when_other_sections_are_wrong() -> None:
    outcome = walk(sample.Job, tree({"train": {"steps": 3}, "data": {"length": "x"}, "job": {"sede": 1}}), sample.registry())
    assert outcome.parts["train"] == sample.Train(steps=3)
    assert outcome.parts["job"] == sample.Who(), "an unknown key takes nothing away"
    assert isinstance(outcome.parts["data"], PartialRecipe) and outcome.parts["data"].shuffle == "permute"
    assert not outcome.parts["data"].has(["length"]) and outcome.value is not None and outcome.faults


def test_registry_errors_stand_at_the_name() -> None:
    broken = sample.entry("optimizers", "broken", "no_such_module_anywhere:Thing", "stranger", "3.1")
    rival = sample.entry("optimizers", "muon", "Muon", "rival")
    registry = sample.registry(broken, rival)
    for name, words in [("broken", "stranger 3.1"), ("muon", "rival:muon")]:
        fault = walk(sample.Job, tree({"optimizer": {"name": name}}), registry).faults[0]
        assert (fault.key, fault.origin) == ("optimizer.name", "at optimizer.name")
        assert words in fault.message
    assert resolve(sample.Job, tree({"optimizer": {"name": "rival:muon"}}), registry).value.optimizer == sample.Muon()
    assert resolve(sample.Job, tree({}), registry).value.optimizer == sample.Adam()  # nobody asked for the others


@dataclass(frozen=True, kw_only=True)
class Odd:
    """Fields that are unusual, and allowed."""

    either: Annotated[int, Gt(0)] | str = "auto"
    """Union."""
    even: Annotated[int, MultipleOf(2)] = 2
    """Multiple."""
    pair: tuple[int, str] = (1, "a")
    """Fixed tuple."""
    parts: tuple[sample.Phase, ...] = (sample.Phase(start=3),)
    """Sections in a tuple."""
    named: dict[str, Annotated[Component, Slot("forge.optimizers")]] = field(default_factory=dict)
    """Components by a free key."""
    optional: Annotated[Component | None, Slot("forge.attentions")] = None
    """A component or none."""
    chosen: Annotated[Component, Slot("forge.attentions")] = field(default_factory=lambda: sample.Gqa(heads=4))
    """A component with a default instance."""
    word: Literal["none", "all"] | None = None
    """The word that unsets other keys is a value of this one."""
    moe: sample.Moe = field(default_factory=lambda: sample.Moe(experts=2))
    """A default instance whose own slot is unset."""
    narrow: Annotated[sample.Muon | None, Slot("forge.optimizers")] = None
    """A component of one class."""


def test_unusual_fields() -> None:
    value = resolve(Odd, tree({"either": 3, "pair": [2, "b"], "named": {"x": {"name": "muon"}}}), sample.registry()).value
    assert value == Odd(either=3, pair=(2, "b"), named={"x": sample.Muon()}, moe=sample.Moe(experts=2, router=sample.Router()))
    assert value.parts == (sample.Phase(start=3),)
    assert value.moe == sample.Moe(experts=2, router=sample.Router())
    assert resolve(Odd, tree({"word": "none"}), sample.registry()).value.word == "none"
    chosen = resolve(Odd, tree({"chosen": {"kv_heads": 2}, "optional": {"name": "linear"}}), sample.registry()).value
    assert (chosen.chosen, chosen.optional) == (sample.Gqa(heads=4, kv_heads=2), sample.Linear())
    assert said({"even": 3, "either": -1, "named": {"x": {}}, "narrow": {"name": "adam"}}, Odd).keys() == {
        "even",
        "either",
        "named.x.name",
        "narrow.name",
    }


def test_a_missing_component_lists_the_choices() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Needs:
        optimizer: Annotated[Component, Slot("forge.optimizers")]
        steps: int

    message = said({}, Needs)
    assert message["optimizer"] == "is missing; expected a table with the `name` of an optimizer | known: adam, muon"
    assert message["steps"] == "is missing; expected an integer | "


optional = st.none() | st.integers(1, 64)
NAMES = st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp"))
jobs = st.builds(
    sample.Job,
    job=st.builds(sample.Who, name=st.text(NAMES, max_size=9), seed=st.integers(-9, 2**40)),
    model=st.builds(
        sample.Decoder,
        dim=st.integers(1, 9),
        attention=st.builds(sample.Gqa, heads=st.just(64), kv_heads=st.none() | st.sampled_from([1, 2, 32]))
        | st.builds(sample.Linear, features=st.integers(1, 9)),
        moe=st.none() | st.builds(sample.Moe, experts=st.integers(1, 9), router=st.builds(sample.Router)),
    ),
    data=st.builds(
        sample.Data,
        sources=st.lists(st.builds(sample.Text, path=st.text("ab/.", min_size=1).map(Path)), max_size=2),
        phases=st.lists(
            st.builds(
                sample.Phase,
                start=st.integers(0, 9),
                weights=st.dictionaries(st.text(max_size=4), st.floats(allow_nan=False, allow_infinity=False), max_size=2),
            ),
            max_size=2,
        ),
        shuffle=st.sampled_from(["permute", "none"]),
        seed=optional,
        tags=st.lists(st.text(NAMES, max_size=4), max_size=3),
    ),
    train=st.builds(
        sample.Train, steps=st.integers(1, 99), clip=st.none() | st.floats(1e-300, 1e300), deterministic=st.booleans()
    ),
    transforms=st.just({})
    | st.builds(lambda p: {"recompute": sample.Recompute(policy=p)}, st.sampled_from(["full", "selective"])),
    optimizer=st.builds(sample.Adam, lr=st.floats(1e-30, 1e3)) | st.builds(sample.Muon),
)


@given(jobs)
def test_any_job_survives_the_way_to_toml_and_back(job: sample.Job) -> None:
    import tomllib

    from forge_core.config.toml import to_toml

    @dataclass(frozen=True, kw_only=True)
    class Holder:
        """The job as the default of a section, so that the engine itself writes it down."""

        inner: sample.Job = job

    registry = sample.registry()
    outcome = resolve(Holder, Table({}, DEFAULT), registry)
    assert outcome.value.inner == job
    text = to_toml(plain(outcome.tree))
    again = resolve(sample.Job, tree(tomllib.loads(text)["inner"]), registry)
    assert again.value == job


def test_checks_give_faults_with_origins_and_a_broken_one_stops_only_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(job: Any, layout: Any) -> Any:
        yield Fault("train.steps", f"{job.train.steps} on {layout}")

    def crash(job: Any, layout: Any) -> Any:
        raise RuntimeError("lost")

    monkeypatch.setattr(sample, "rule", rule, raising=False)
    monkeypatch.setattr(sample, "crash", crash, raising=False)
    stranger = sample.entry("checks", "crash", "crash", "stranger", "9")
    registry = sample.registry(sample.entry("checks", "rule", "rule"), stranger)
    outcome = resolve(sample.Job, tree({"train": {"steps": 3}}), registry)
    faults, warnings = run_checks(outcome.value, Layout(dp_shard=2), registry, outcome.tree, outcome.used)
    assert faults == [Fault("train.steps", "3 on dp2", "at train.steps")]
    assert len(warnings) == 1
    assert "stranger 9" in warnings[0] and "lost" in warnings[0]
    faults, warnings = run_checks(
        outcome.value, Layout(), sample.registry(sample.entry("checks", "crash", "crash")), outcome.tree, outcome.used
    )
    assert [fault.key for fault in faults] == ["sample:crash"]


def test_plugins_of_pydantic_have_no_part_in_a_recipe(tmp_path: Path) -> None:
    """A package that extends pydantic sees the models of its own program, never a key of ours."""
    (tmp_path / "nosy.py").write_text("raise SystemExit('asked')\n")
    info = tmp_path / "nosy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nosy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pydantic]\nnosy = nosy:plugin\n")
    begin = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    ours = "from forge_core.config.fields import written; print(written(('a',), tuple[str, ...]))"
    theirs = "from pydantic import TypeAdapter; TypeAdapter(int)"
    for code in (ours, "import os; os.environ['PYDANTIC_DISABLE_PLUGINS'] = 'other'\n" + ours):
        found = subprocess.run([sys.executable, "-c", begin + code], capture_output=True, text=True, check=False)
        assert (found.returncode, found.stdout) == (0, "['a']\n"), found.stderr
    after = f"{ours}\n{theirs}"  # what others make is theirs to decide, before and after
    for code in (theirs, after):
        found = subprocess.run([sys.executable, "-c", begin + code], capture_output=True, text=True, check=False)
        assert "asked" in found.stderr, "the plugin of this test is one that pydantic finds"


__all__ = ["write"]  # the fixture

Write = Callable[..., Path]


def test_m2_a_byte_order_mark_changes_nothing(write: Write) -> None:
    write("").write_bytes(codecs.BOM_UTF8 + b"[train]\nsteps = 7\n")
    outcome = load("r.toml")
    assert outcome.value.train.steps == 7


@pytest.mark.parametrize("mark", [codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE])
def test_m2_utf_16_is_named(write: Write, mark: bytes) -> None:
    write("").write_bytes(mark + b"[\0t\0]\0")
    found = faults("r.toml")["r.toml"]
    assert "UTF-16" in found.message and "UTF-8" in found.hint


def test_m2_a_key_that_belongs_under_a_table(write: Write) -> None:
    write("steps = 3\n")
    assert faults("r.toml")["steps"].hint == "did you mean 'train.steps'?"


def test_m2_a_key_of_another_table(write: Write) -> None:
    write("[train]\nlr = 3\n[optimizer]\nsteps = 4\n")
    found = faults("r.toml")
    assert found["train.lr"].hint == "did you mean 'optimizer.lr'?"
    assert found["optimizer.steps"].hint == "did you mean 'train.steps'?"


def test_m2_a_near_key_of_the_same_table_goes_first(write: Write) -> None:
    write("[train]\nstepz = 3\n")
    assert faults("r.toml")["train.stepz"].hint == "did you mean 'steps'?"


def test_m2_base_below_a_table(write: Write) -> None:
    write("[train]\nbase = 'other.toml'\n")
    assert faults("r.toml")["train.base"].hint == "base belongs at the top of the file, above the first [table]"


@pytest.mark.parametrize("given", ["recipes", "recipes/", "./recipes", "here.toml", "."])
def test_m2_a_directory_where_a_file_is_meant(write: Write, given: str) -> None:
    write("", "recipes/small.toml"), write("", "here.toml/small.toml"), write("", "small.toml")
    found = faults(given)["RECIPE"]
    assert "is a directory" in found.message and "small.toml" in found.hint


def test_m2_a_directory_without_recipes(write: Write) -> None:
    write("", "empty/readme.md")
    found = faults("empty/")["RECIPE"]
    assert "is a directory" in found.message and "TOML file" in found.hint


def test_a_preset_goes_before_a_directory_of_its_name(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("[train]\nsteps = 9\n", "preset.toml")
    write("", "tiny/other.toml")
    monkeypatch.setattr(sample, "tiny", tmp_path / "preset.toml", raising=False)
    assert load("tiny", extra=(sample.entry("presets", "tiny", "tiny"),)).value.train.steps == 9


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("[train]\nsteps = 1\n\n[optimizer]\n[train]\nclip = 1\n", "[train] is given twice, first on line 1", 5),
        ("train.steps = 1\n[train]\nclip = 1\n", "[train] is given twice, first on line 1", 2),
        ("[train]\nsteps = 1\nsteps = 2\n", "train.steps is given twice, first on line 2", 3),
        ("job = 1\njob = 2\n", "job is given twice, first on line 1", 2),
        ("[a]\n[[b]]\nc = 1\n[[b]]\nc = 1\nc = 2\n", "b.1.c is given twice, first on line 5", 6),
        ("train = {steps = 1}\n[train]\nclip = 1\n", "[train] is given twice, first on line 1", 2),
        ("[train]\nsteps = 1\n[train.steps]\nx = 1\n", "[train.steps] is given twice, first on line 2", 3),
    ],
)
def test_m2_what_is_given_twice_is_said_plainly(write: Write, text: str, message: str, line: int) -> None:
    write(text)
    found = faults("r.toml")["r.toml"]
    assert found.message == message
    assert found.origin == f"r.toml:{line}"
    assert "overwrite" not in str(found) and "Cannot" not in str(found)


def test_m2_the_path_of_a_plugin_appears_once(write: Write) -> None:
    write("import nothing_of_this_name\n", "mine.py")
    write('[optimizer]\nname = "./mine.py:Thing"\n')
    assert str(faults("r.toml")["optimizer.name"]).count("mine.py") == 1
    write('[optimizer]\nname = "./absent.py:Thing"\n')
    assert str(faults("r.toml")["optimizer.name"]).count("absent.py") == 1
    write("class Other: ...\n", "mine2.py")
    write('[optimizer]\nname = "./mine2.py:Thing"\n')
    assert str(faults("r.toml")["optimizer.name"]).count("mine2.py") == 1
