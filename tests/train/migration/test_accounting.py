"""No key of a file is dropped: whatever it says, each key has an outcome, or the file is refused with its line."""

import ast
import contextlib
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from forge_core.errors import ForgeError
from forge_train.migration.engine import Framework, Migration, Source, SourceSetting
from forge_train.migration.formats import FRAMEWORKS
from forge_train.migration.writer import recipe_text
from forge_train.recipe.load import load_recipe
from forge_train.recipe.schema import Job

ALL = list(FRAMEWORKS.values())
SECTIONS = {item.name for item in fields(Job)}


def run(framework: Framework, values: dict[str, Any], world: int | None = None) -> Migration:
    migration = Migration(framework, Source({name: SourceSetting(value, 1) for name, value in values.items()}), world)
    migration.run()
    return migration


def accounted(migration: Migration) -> set[str]:
    return {outcome.key for outcome in migration.outcomes if outcome.kind != "default"}


@pytest.mark.parametrize("framework", ALL, ids=lambda item: item.name)
def test_names_are_unique_and_counterparts_are_sections(framework: Framework) -> None:
    names = [key.name for key in framework.keys]
    assert len(names) == len(set(names))
    for key in framework.keys:
        assert key.to or key.note, f"{key.name} has neither a counterpart nor a reason"
        assert not key.to or key.to.split(".")[0].split(" ")[0].rstrip(",") in SECTIONS, key
        assert key.rule or not key.to or all(part.isidentifier() for part in key.to.split(".")), key


@pytest.mark.parametrize("framework", ALL, ids=lambda item: item.name)
def test_defaults_written_out_are_accounted_for_and_mean_the_same(framework: Framework) -> None:
    """Except for the name of the run, a file that states every default gives the recipe of an empty file."""
    values = {key.name: key.default for key in framework.keys if key.default is not None}
    migration = run(framework, values)
    assert accounted(migration) == set(values)
    assert {**migration.recipe, "job": 0} == {**run(framework, {}).recipe, "job": 0}


@pytest.mark.parametrize("framework", ALL, ids=lambda item: item.name)
def test_an_empty_configuration_is_a_recipe_but_for_what_is_to_be_filled_in(framework: Framework, tmp_path: Path) -> None:
    migration = run(framework, {})
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_text(migration, "file"))
    try:
        load_recipe(path, [], 1)
    except ForgeError as error:
        faults = {fault.key for fault in error.faults}  # type: ignore[attr-defined]
        assert faults <= {blank.path for blank in migration.blanks}


VALUES = st.one_of(
    st.booleans(),
    st.integers(-3, 3000),
    st.floats(-1, 2),
    st.text(max_size=8),
    st.lists(st.integers(0, 3), max_size=3),
    st.lists(
        st.dictionaries(st.sampled_from(["path", "module", "start_step", "weight", "specs"]), st.integers(0, 9)), max_size=2
    ),
    st.dictionaries(st.sampled_from(["a", "min_lr", "image"]), st.integers(0, 9), max_size=2),
)


def some(name: str) -> st.SearchStrategy[tuple[str, dict[str, Any], dict[str, Any]]]:
    """A framework, values of keys that it has, and values of keys that it does not have."""
    known = st.dictionaries(st.sampled_from(sorted(FRAMEWORKS[name].table)), VALUES, max_size=8)
    strange = st.dictionaries(st.sampled_from(["zz", "zz.a", "model.zz", "zz-b"]), VALUES, max_size=3)
    return st.tuples(st.just(name), known, strange)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, phases=[Phase.generate])
@given(st.sampled_from(sorted(FRAMEWORKS)).flatmap(some))
def test_any_values_are_accounted_for_or_refused(drawn: tuple[str, dict[str, Any], dict[str, Any]]) -> None:
    name, known, strange = drawn
    with contextlib.suppress(ForgeError):
        migration = run(FRAMEWORKS[name], {**known, **strange})
        assert accounted(migration) == {*known, *strange}
        assert {outcome.key for outcome in migration.of("unknown")} == set(strange)
        recipe_text(migration, "file")


@pytest.mark.parametrize("framework", ALL, ids=lambda item: item.name)
def test_each_known_key_is_accounted_for_with_unusual_values(framework: Framework) -> None:
    for key in framework.keys:
        for value in (key.default, not key.default, 2, "strange", [{"module": 3}]):
            with contextlib.suppress(ForgeError):
                migration = run(framework, {key.name: value})
                assert accounted(migration) == {key.name}, (key.name, value)
                recipe_text(migration, "file")


def test_a_wrong_type_is_refused_with_key_line_and_remedy() -> None:
    with pytest.raises(
        ForgeError, match=r'model.dim = "wide" \(line 1\): KempnerForge expects an integer there; correct the file'
    ):
        run(FRAMEWORKS["kempnerforge"], {"model.dim": "wide"})


def test_every_field_of_the_installed_training_arguments_is_in_the_table() -> None:
    """Read from the source of transformers, which takes seconds to import."""
    spec = find_spec("transformers")
    assert spec is not None and spec.submodule_search_locations is not None
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / "training_args.py").read_text())
    (node,) = (item for item in tree.body if isinstance(item, ast.ClassDef) and item.name == "TrainingArguments")
    names = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)}
    assert len(names) > 80 and names - set(FRAMEWORKS["trainer"].table) == set()


def test_defaults_of_the_installed_training_arguments_are_those_of_the_table() -> None:
    spec = find_spec("transformers")
    assert spec is not None and spec.submodule_search_locations is not None
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / "training_args.py").read_text())
    (node,) = (item for item in tree.body if isinstance(item, ast.ClassDef) and item.name == "TrainingArguments")
    table = FRAMEWORKS["trainer"].table
    compared = 0
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(item.value, ast.Call):
            default = next((word.value for word in item.value.keywords if word.arg == "default"), None)
            if isinstance(default, ast.Constant) and table[item.target.id].rule:
                assert table[item.target.id].default in (default.value, default.value or False), item.target.id
                compared += 1
    assert compared > 25
