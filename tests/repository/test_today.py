"""README says what is true today: its tables are those of the registry, and what it calls refused is refused."""

import sys
from pathlib import Path

import pytest

from forge_core.errors import ConfigError
from forge_train.recipe.load import load_recipe

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "_ext"))
import forge_today
import reference_tables


def test_the_tables_of_the_readme_are_those_of_today() -> None:
    readme = forge_today.README.read_text(encoding="utf-8")
    assert forge_today.written(readme) == readme, "README.md is stale: run `python docs/_ext/forge_today.py`"


@pytest.mark.parametrize("file", list(reference_tables.pages()), ids=lambda file: file.stem)
def test_tables_of_pages_are_those_of_the_code(file: Path) -> None:
    assert reference_tables.page(file) == file.read_text(encoding="utf-8"), "run `python docs/_ext/reference_tables.py`"


@pytest.mark.parametrize("entry", forge_today.refused(), ids=lambda entry: entry["what"])
def test_what_the_readme_calls_refused_is_refused(entry: dict) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(entry.get("recipe", "debug"), entry["overrides"], entry.get("world", 1))
    assert entry["says"] in str(caught.value)
    assert load_recipe(entry.get("recipe", "debug"), [], 1), "the recipe itself has no fault"
