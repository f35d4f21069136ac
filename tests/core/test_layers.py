"""Layering: defaults -> base -> recipe -> command line, with the origin of every value."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import sample
from forge_core.config.layers import load_layers
from forge_core.config.toml import to_toml
from forge_core.config.tree import Table, leaves, plain
from forge_core.config.validation import Resolution, resolve
from forge_core.errors import ConfigError, Fault

Load = Callable[..., Resolution]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes `<name>.toml` into a fresh working directory."""
    monkeypatch.chdir(tmp_path)

    def put(text: str, name: str = "r.toml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return put


def load(recipe: str, *overrides: str, extra: tuple[Any, ...] = ()) -> Resolution:
    registry = sample.registry(*extra)
    layered = load_layers(recipe, overrides, sample.Job, registry)
    if layered.faults:
        raise ConfigError(layered.faults)
    return resolve(sample.Job, layered.tree, registry)


def faults(recipe: str, *overrides: str) -> dict[str, Fault]:
    with pytest.raises(ConfigError) as caught:
        load(recipe, *overrides)
    return {fault.key: fault for fault in caught.value.faults}


def origins(outcome: Resolution) -> dict[str, str]:
    return {key: origin for key, _, origin in leaves(outcome.tree)}


def test_each_layer_wins_over_the_one_below_and_keeps_its_origin(write: Callable[..., Path]) -> None:
    write("[train]\nsteps = 1\nclip = 2.0\n[optimizer]\nlr = 0.5\n", "below.toml")
    write('base = "below.toml"\n\n[train]\nsteps = 7\n')
    outcome = load("r.toml", "--optimizer.lr=0.25")
    assert outcome.value.train == sample.Train(steps=7, clip=2.0)
    assert outcome.value.optimizer == sample.Adam(lr=0.25)
    found = origins(outcome)
    assert found["train.steps"] == "r.toml:4"
    assert found["train.clip"] == "below.toml:3"
    assert found["train.deterministic"] == "default"
    assert found["optimizer.lr"] == "--optimizer.lr"
    assert found["optimizer.name"] == "default"


def test_a_section_keeps_the_default_that_the_recipe_gives_it(write: Callable[..., Path]) -> None:
    write("[train]\nclip = 2.0\n")
    assert load("r.toml").value.train == sample.Train(steps=500, clip=2.0)


def test_bases_are_relative_to_their_file_and_may_have_bases(write: Callable[..., Path]) -> None:
    write("[train]\nsteps = 1\n", "a/deep/one.toml")
    write('base = "deep/one.toml"\n[train]\nclip = 3\n', "a/two.toml")
    write('base = "a/two.toml"\n')
    assert load("r.toml").value.train == sample.Train(steps=1, clip=3.0)


def test_a_preset_is_a_base(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    preset = write("[train]\nsteps = 3\n", "elsewhere/small.toml")
    monkeypatch.setattr(sample, "small", preset, raising=False)
    write('base = "small"\n[train]\nclip = 3\n')
    presets = (sample.entry("presets", "small", "small"),)
    assert load("r.toml", extra=presets).value.train == sample.Train(steps=3, clip=3.0)
    assert load("small", extra=presets).value.train.steps == 3
    with pytest.raises(ConfigError, match=r"unknown preset 'smal'; did you mean 'small'\?"):
        load("smal", extra=presets)


def test_a_circle_of_bases_is_refused(write: Callable[..., Path]) -> None:
    write('base = "b.toml"\n', "a.toml")
    write('base = "a.toml"\n', "b.toml")
    with pytest.raises(ConfigError, match=r"cycle: a\.toml -> b\.toml -> a\.toml"):
        load("a.toml")


def test_a_missing_base_names_the_line_that_asks_for_it(write: Callable[..., Path]) -> None:
    write("[train]\nsteps = 1\n", "debug.toml")
    write('# recipe\nbase = "debgu.toml"\n')
    fault = faults("r.toml")["base"]
    assert fault.origin == "r.toml:2"
    assert "debug.toml" in fault.hint


def test_another_name_drops_what_lower_layers_said_about_the_other_component(write: Callable[..., Path]) -> None:
    write('[optimizer]\nname = "adam"\nbetas = [0.5, 0.5]\nlr = 0.7\n', "below.toml")
    write('base = "below.toml"\n[optimizer]\nname = "muon"\n')
    assert load("r.toml").value.optimizer == sample.Muon()
    assert load("below.toml", "--optimizer.name=muon").value.optimizer == sample.Muon()
    assert load("below.toml", "--optimizer.name=muon", "--optimizer.lr=0.9").value.optimizer == sample.Muon(lr=0.9)


def test_the_same_name_keeps_them_however_it_is_spelled(write: Callable[..., Path]) -> None:
    write('[optimizer]\nname = "adam"\nlr = 0.7\n')
    assert load("r.toml", "--optimizer.name=adam").value.optimizer == sample.Adam(lr=0.7)
    assert load("r.toml", "--optimizer.name=sample:adam").value.optimizer == sample.Adam(lr=0.7)


def test_a_name_that_differs_from_the_default_drops_keys_of_the_default(write: Callable[..., Path]) -> None:
    write("[optimizer]\nlr = 0.7\n")  # of adam, the default, which no layer names
    assert load("r.toml").value.optimizer == sample.Adam(lr=0.7)
    assert load("r.toml", "--optimizer.name=muon").value.optimizer == sample.Muon()
    assert load("r.toml", "--optimizer.name=adam").value.optimizer == sample.Adam(lr=0.7)


def test_a_nested_name_drops_only_its_own_table(write: Callable[..., Path]) -> None:
    write("[model]\ndim = 32\nattention = {heads = 4, kv_heads = 2}\n")
    model = load("r.toml", "--model.attention.name=linear").value.model
    assert model == sample.Decoder(dim=32, attention=sample.Linear())


def test_the_name_of_a_plain_section_drops_nothing(write: Callable[..., Path]) -> None:
    write('[job]\nname = "one"\nseed = 7\n')
    assert load("r.toml", "--job.name=two").value.job == sample.Who(name="two", seed=7)


def test_derived_defaults_are_not_resolved_before_the_layers(write: Callable[..., Path]) -> None:
    write("[model]\nattention = {heads = 64}\n")
    assert load("r.toml").value.model.attention == sample.Gqa(heads=64, kv_heads=None)


def test_arrays_of_tables_replace(write: Callable[..., Path]) -> None:
    write(
        '[[data.sources]]\nname = "text"\npath = "a"\nweight = 0.5\n[[data.sources]]\nname = "text"\npath = "b"\n', "below.toml"
    )
    write('base = "below.toml"\n[[data.sources]]\nname = "text"\npath = "c"\n')
    assert load("r.toml").value.data.sources == [sample.Text(path=Path("c"))]


def test_overrides_address_items_of_lists(write: Callable[..., Path]) -> None:
    write('[[data.sources]]\nname = "text"\npath = "a"\nweight = 0.5\n[[data.sources]]\nname = "text"\npath = "b"\n')
    outcome = load("r.toml", "--data.sources.1.path=x", "--data.sources.0.weight=2")
    assert outcome.value.data.sources == [sample.Text(path=Path("a"), weight=2.0), sample.Text(path=Path("x"))]
    assert origins(outcome)["data.sources.1.path"] == "--data.sources.1.path"
    assert origins(outcome)["data.sources.0.path"] == "r.toml:3"
    added = load("r.toml", "--data.sources.2.name=text", "--data.sources.2.path=z").value.data.sources
    assert added[2] == sample.Text(path=Path("z"))
    fault = faults("r.toml", "--data.sources.5.path=x")["data.sources.5"]
    assert fault.hint == "indexes are 0 to 2 (the last appends)"


def test_the_word_none_unsets(write: Callable[..., Path]) -> None:
    write('[train]\nclip = "none"\n[data]\nshuffle = "none"\n[transforms.recompute]\n[model.moe]\nexperts = 4\n')
    value = load("r.toml").value
    assert value.train.clip is None
    assert value.data.shuffle == "none"  # a word of its own there
    assert value.model.moe == sample.Moe(experts=4, router=sample.Router())
    value = load("r.toml", "--transforms.recompute=none", "--model.moe=none", "--train.clip=5").value
    assert value.transforms == {}
    assert value.model.moe is None
    assert value.train.clip == 5.0


def test_a_file_plugin_is_relative_to_the_file_that_names_it(write: Callable[..., Path], tmp_path: Path) -> None:
    plugin = (
        "from dataclasses import dataclass\nfrom forge_core.component import Component\n"
        "@dataclass(frozen=True, kw_only=True)\nclass {0}(Component):\n    rate: float = 1.0\n    def build(self, model): ...\n"
    )
    write(plugin.format("Mine"), "lib/mine.py")
    write(plugin.format("Other"), "other.py")
    write('[optimizer]\nname = "./mine.py:Mine"\nrate = 2\n', "lib/below.toml")
    write('base = "lib/below.toml"\n')
    outcome = load("r.toml")
    assert (type(outcome.value.optimizer).__name__, outcome.value.optimizer.rate) == ("Mine", 2.0)
    assert plain(outcome.tree)["optimizer"]["name"] == f"{tmp_path / 'lib' / 'mine.py'}:Mine"
    again = load("r.toml", "--optimizer.rate=3")
    assert again.value.optimizer.rate == 3.0
    outcome = load("r.toml", "--optimizer.name=./other.py:Other")
    assert (type(outcome.value.optimizer).__name__, outcome.value.optimizer.rate) == ("Other", 1.0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("ture", "ture"),
        ("a b", "a b"),
        ('"3"', "3"),
        ("", ""),
        ("2020-01-01", "2020-01-01"),
    ]
    + [
        ("1\nx = 2", "1\nx = 2"),
        ("5 # five", "5 # five"),
        ("a=b", "a=b"),
        ("{a = 1}", {"a": 1}),
        ("__import__('os')", "__import__('os')"),
    ],
)
def test_fault_47_an_override_parses_as_toml_else_as_text(text: str, value: Any, write: Callable[..., Path]) -> None:
    write("")
    layered = load_layers("r.toml", [f"--a.b={text}"], sample.Job, sample.registry())
    assert plain(layered.tree) == {"a": {"b": value}}


@pytest.mark.parametrize(
    ("arguments", "key", "said"),
    [
        (["train.steps=3"], "train.steps=3", "write --train.steps=3"),
        (["fast"], "fast", "--section.key=value"),
        (["--train.steps", "3"], "train.steps", "write --train.steps=3"),
        (["--train.deterministic"], "train.deterministic", "write --train.deterministic=VALUE"),
        (["-x=3"], "-x=3", "--section.key=value"),
        (["--train.steps=3", "--train.steps=4"], "train.steps", "given twice"),
        (["--train=3", "--train.steps=4"], "train.steps", "both as a value and as a table"),
        (["--train..steps=4"], "--train..steps=4", "is not a key"),
        (["--trian.steps=4"], "trian", "did you mean 'train'?"),
        (["--train.stesp=4"], "train.stesp", "did you mean 'steps'?"),
    ],
)
def test_fault_47_what_is_not_an_override_is_refused(
    arguments: list[str], key: str, said: str, write: Callable[..., Path]
) -> None:
    write("")
    found = faults("r.toml", *arguments)
    assert list(found) == [key]
    assert said in str(found[key])


@pytest.mark.parametrize(
    ("text", "origin", "said"),
    [
        ("[train]\nsteps = 1\nclip = 2\nsteps = 3\n", "r.toml:4", "train.steps is given twice, first on line 2"),
        ("[train]\ndeterministic = ture\n", "r.toml:2", "text needs quotes"),
        ("[train]\nsteps 3\n", "r.toml:2", "steps 3"),
        ('a = "', "r.toml:1", "not valid TOML"),
        ("[train]\nsteps = 1\n[data]\n[train]\n", "r.toml:4", "[train] is given twice, first on line 1"),
        ("a = [1,\n2,\n", "r.toml:2", "not valid TOML"),
    ],
)
def test_fault_47_broken_toml_names_file_and_line(text: str, origin: str, said: str, write: Callable[..., Path]) -> None:
    write(text)
    fault = faults("r.toml")["r.toml"]
    assert fault.origin == origin
    assert said in str(fault)


def test_files_that_cannot_be_read(write: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"file nowhere\.toml does not exist"):
        load("nowhere.toml")
    (tmp_path / "bytes.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load("bytes.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match="is a directory"):
        load("folder.toml")
    if os.geteuid():
        write("").chmod(0)
        with pytest.raises(ConfigError, match="Permission denied"):
            load("r.toml")


# Layering against an independent model: a dictionary updated layer by layer, leaf by leaf.

keys = st.sampled_from(["job.seed", "train.steps", "data.length", "data.seed", "model.dim"])
layer = st.dictionaries(keys, st.integers(1, 99), max_size=4)


@given(st.lists(layer, min_size=1, max_size=4), layer)
def test_the_highest_layer_that_gives_a_key_wins(
    tmp_path_factory: pytest.TempPathFactory, files: list[dict[str, int]], cli: dict[str, int]
) -> None:
    folder = tmp_path_factory.mktemp("layers")
    expected: dict[str, tuple[int, str]] = {}
    for number, values in enumerate(files):
        lines = [f'base = "{number - 1}.toml"'] if number else []
        for key, value in values.items():
            lines.append(f"{key} = {value}")
            expected[key] = (value, f"{folder / f'{number}.toml'}:{len(lines)}")
        (folder / f"{number}.toml").write_text("\n".join(lines))
    expected |= {key: (value, f"--{key}") for key, value in cli.items()}
    outcome = load(str(folder / f"{len(files) - 1}.toml"), *(f"--{key}={value}" for key, value in cli.items()))
    given_ = {key: (value, origin) for key, value, origin in leaves(outcome.tree) if origin != "default"}
    assert given_ == expected


def test_the_resolved_tree_written_and_loaded_is_equal(write: Callable[..., Path]) -> None:
    write(
        '[job]\nname = "a \\" b"\n[model]\nattention = {name = "linear"}\nmoe = {experts = 2}\n[data]\ntags = ["x"]\n'
        '[[data.sources]]\nname = "text"\npath = "p/q"\n[[data.phases]]\nstart = 1\nweights = {"odd key" = 0.5}\n'
        '[train]\nclip = "none"\n[transforms.recompute]\n[optimizer]\nname = "muon"\nlr = 1e-7\n'
    )
    first = load("r.toml")
    write(to_toml(plain(first.tree)), "again.toml")
    second = load("again.toml")
    assert second.value == first.value
    assert plain(second.tree) == plain(first.tree)
    assert isinstance(first.tree, Table)
    assert all(origin != "default" for _, _, origin in leaves(second.tree))
