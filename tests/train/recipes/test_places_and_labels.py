"""Recipes that name no place where they should, or sources that cannot be told apart: refused before anything is read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from forge_core.component import Component, Slot, fields_of
from forge_core.config.tree import Table, build
from forge_core.config.validation import walk
from forge_core.errors import ConfigError, Fault, ForgeError
from forge_core.protocols.data import SourceContext
from forge_core.registry import GROUPS, Registry
from forge_data.components import RandomTokens
from forge_data.loading.stream import open_stream
from forge_data.section import Data, Phase
from forge_data.tokenizers.bytes import ByteTokenizer
from forge_train.recipe.load import load_recipe
from train.runs import TINY

REGISTRY = Registry()


def placed() -> list[tuple[str, str, str]]:
    """(group, name, field) of every field of a component that names a place."""
    found = []
    for group in GROUPS:
        for entry in REGISTRY.of(group):
            component = REGISTRY.load_entry(entry)
            if isinstance(component, type) and issubclass(component, Component):
                found += [(group, entry.name, field.name) for field in fields_of(component) if field.is_place]
    return found


def test_trials_b5_fields_that_name_a_place_are_known_by_name_or_mark() -> None:
    found = placed()
    assert {name for group, name, field in found if group == "forge.sources"} >= {
        *("store", "text", "jsonl", "parquet", "arrow", "huggingface", "tokens", "megatron", "llmc", "datatrove"),
        *("image_jsonl", "image_webdataset", "image_dataset", "video_csv", "video_frames"),
    }
    others = {("forge.tokenizers", "bpe", "files"), ("forge.stores", "remote", "url"), ("forge.models", "decoder", "from_hf")}
    others |= {("forge.encoders", "clip", "path"), ("forge.hooks", "tasks", "folder"), ("forge.sources", "video_csv", "file")}
    assert others <= set(found)


@pytest.mark.parametrize("text", ["", "  "])
@pytest.mark.parametrize(("group", "name", "field"), placed())
def test_trials_b5_an_empty_place_is_a_fault_in_every_component(group: str, name: str, field: str, text: str) -> None:
    @dataclass(frozen=True, kw_only=True)
    class One:
        part: Annotated[Component, Slot(group)]

    many = field == "files"
    node = build({"part": {"name": name, field: [text] if many else text}}, (), lambda path: "here", Path())
    assert isinstance(node, Table)
    outcome = walk(One, node, REGISTRY)
    (fault,) = [fault for fault in outcome.faults if fault.key.startswith(f"part.{field}")]
    assert fault.message == "is empty" and "variable" in fault.hint and fault.origin == "here"


@pytest.mark.parametrize("key", ["job.dir", "start.weights", "model.from_hf"])
def test_trials_b5_an_empty_place_of_a_run_is_a_fault(tmp_path: Path, key: str) -> None:
    assert faults_of(tmp_path, f"--{key}=")[key].message == "is empty"


@pytest.mark.parametrize(
    "name", ["store", "text", "jsonl", "parquet", "arrow", "huggingface", "tokens", "megatron", "llmc", "datatrove"]
)
def test_trials_b5_sources_that_are_built_in_code_refuse_an_empty_path(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "found.jsonl").write_text('{"text": "not meant"}\n')
    component: Any = REGISTRY.load("forge.sources", name)(path="")
    with pytest.raises(ForgeError, match=r"empty"):
        component.build(SourceContext(tmp_path / "work", ByteTokenizer(), 16, lambda _: None))


def faults_of(tmp_path: Path, *overrides: str, recipe: str = TINY) -> dict[str, Fault]:
    """What `check` and `run` both say, which read recipes by this function."""
    (tmp_path / "tiny.toml").write_text(recipe)
    found = []
    for here in (False, True):
        with pytest.raises(ConfigError) as refused:
            load_recipe(tmp_path / "tiny.toml", overrides, 1, REGISTRY, here=here)
        found.append({fault.key: fault for fault in refused.value.faults})
    assert found[0] == found[1]
    return found[0]


RANDOM = "name='random', vocab_size=61"
SOURCES = {
    "the same label twice": (
        f"{{{RANDOM}, label='a'}}, {{{RANDOM}, label='a'}}",
        "data.sources.1.label",
        "'a' is also",
    ),
    "a label that one has by default": (f"{{{RANDOM}}}, {{{RANDOM}, label='random'}}", "data.sources.1.label", "'random' is"),
    "a label that one has by number": (
        f"{{{RANDOM}}}, {{{RANDOM}}}, {{{RANDOM}, label='random-2'}}",
        "data.sources.2.label",
        "'random-2' is",
    ),
    "an empty label": (f"{{{RANDOM}, label=''}}", "data.sources.0.label", "is empty"),
    "weight 0": (f"{{{RANDOM}, weight=0.0}}", "data.sources.0.weight", "no source has a weight above 0"),
    "weights 0": (f"{{{RANDOM}, weight=0.0}}, {{{RANDOM}, weight=0.0}}", "data.sources.0.weight", "no source has a weight"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_trials_b9_labels_and_weights_that_cannot_be_meant_are_faults(tmp_path: Path, name: str) -> None:
    sources, key, words = SOURCES[name]
    assert words in faults_of(tmp_path, f"--data.sources=[{sources}]")[key].message


def test_trials_b9_weights_0_before_the_first_phase_are_a_fault(tmp_path: Path) -> None:
    sources = [RandomTokens(vocab_size=61, weight=0.0, label=label) for label in "ab"]
    data = Data(sequence_length=16, sources=list(sources), phases=[Phase(start=2, weights={"a": 1.0})])
    with pytest.raises(ConfigError, match=r"data\.sources\.0\.weight: no source has a weight above 0 before the first phase"):
        open_stream(data, workspace=tmp_path, seed=1, global_batch=4, micro_batch=4)


def test_trials_b9_sources_without_labels_are_numbered_as_before(tmp_path: Path) -> None:
    sources = [RandomTokens(vocab_size=61, seed=1), RandomTokens(vocab_size=61, seed=2), RandomTokens(vocab_size=61, label="b")]
    data = Data(sequence_length=16, sources=list(sources))
    assert open_stream(data, workspace=tmp_path, seed=1, global_batch=4, micro_batch=4).labels == ("random", "random-2", "b")
