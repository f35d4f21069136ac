"""Explanations, the schema for editors, plain words, the console, and quantities for people."""

import io
import json
import tomllib
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Interval, Le, Len

from core import sample
from core.judge import accepts
from forge_core.config.descriptions import explain, json_schema
from forge_core.config.fields import describe
from forge_core.config.toml import to_toml
from forge_core.config.tree import Table, build, plain
from forge_core.config.validation import resolve, walk
from forge_core.errors import ConfigError, Fault, ForgeError
from forge_core.terminal import Console, clock, count, duration, size

RECIPE = """
[model]
attention = {name = "linear", features = 4}
[model.moe]
experts = 4
[[data.sources]]
name = "text"
path = "x"
[transforms.recompute]
policy = "selective"
[optimizer]
name = "muon"
lr = 0.5
"""


def tree(text: str) -> Table:
    made = build(tomllib.loads(text), (), lambda path: "at " + ".".join(map(str, path)), Path("/folder"))
    assert isinstance(made, Table)
    return made


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "an integer"),
        (Annotated[int, Gt(0)], "an integer greater than 0"),
        (Annotated[float, Ge(0), Le(1)], "a number at least 0 at most 1"),
        (Annotated[int, Interval(ge=1, lt=9)], "an integer at least 1 and less than 9"),
        (bool, "true or false"),
        (Path, "a path"),
        (Literal["a", "b"], "one of 'a', 'b'"),
        (Color, "one of 'red', 'blue'"),
        (Annotated[float, Gt(0)] | None, "a number greater than 0, or 'none' to unset it"),
        (int | Literal["auto"], "an integer or 'auto'"),
        (list[str], "a list of texts"),
        (list[Annotated[int, Gt(0)]], "a list of integers greater than 0"),
        (tuple[int, ...], "a list of integers"),
        (tuple[int, str], "a list of 2: an integer, text"),
        (dict[str, float], "a table of numbers"),
        (list[Literal["a", "b"]], "a list of items, each one of 'a', 'b'"),
        (Annotated[list[int], Len(1, 3)], "a list of integers of length at least 1 and of length at most 3"),
    ],
)
def test_types_in_plain_words(annotation: Any, words: str) -> None:
    assert describe(annotation) == words


def test_explanations_have_type_default_doc_value_and_origin() -> None:
    registry = sample.registry()
    outcome = resolve(sample.Job, tree(RECIPE), registry)
    (rate,) = explain(outcome, registry, "optimizer.lr")
    assert (rate.expected, rate.default, rate.doc) == ("a number greater than 0", 0.02, "Learning rate.")
    assert (rate.value, rate.origin) == (0.5, "at optimizer.lr")
    (clip,) = explain(outcome, registry, "train.clip")
    assert (clip.default, clip.value, clip.origin) == (1.0, 1.0, "default")
    (source,) = explain(outcome, registry, "data.sources.0.path")
    assert (source.default, source.value) == (None, "x")
    model = {item.key: item for item in explain(outcome, registry, "model")}
    assert {"model", "model.attention", "model.attention.features", "model.moe.router.bias_rate"} <= set(model)
    assert "optimizer" not in model
    assert model["model.attention"].names == ("gqa", "linear")
    assert model["model.attention"].default == "gqa"
    assert "linear: Attention without softmax." in model["model.attention"].doc
    assert len(explain(outcome, registry)) == len(outcome.fields)
    assert explain(outcome, registry, "optimizer.name")[0].key == "optimizer"
    with pytest.raises(ConfigError, match="unknown key"):
        explain(outcome, registry, "data.s")  # the beginning of a key is not a section
    with pytest.raises(ConfigError, match=r"did you mean 'optimizer\.lr'"):
        explain(outcome, registry, "optimizer.lrr")


SCHEMA = json_schema(sample.Job, sample.registry())

GOOD = [
    "",
    RECIPE,
    'base = "debug"\n[model]\ndim = 3\n',
    "[optimizer]\nlr = 1\n",
    '[optimizer]\nname = "sample:adam"\n',
    '[optimizer]\nname = "./mine.py:Thing"\nwhatever = 3\n',
    '[train]\nclip = "none"\n[transforms]\nrecompute = "none"\n',
    '[transforms."./mine.py:Thing"]\nname = "./mine.py:Thing"\n',
    '[model]\nmoe = "none"\n',
    "[optimizer]\nbetas = [0.1, 0.2]\n",
]
WRONG = [
    "[modle]\n",
    "[train]\nsteps = 0\n",
    "[train]\nsteps = 2.5\n",
    '[train]\ndeterministic = "true"\n',
    '[optimizer]\nname = "adm"\n',
    '[optimizer]\nname = "muon"\nbetas = [0.1, 0.2]\n',
    "[optimizer]\nbetas = [0.1, 1.2]\n",
    '[model]\nattention = {name = "linear", heads = 3}\n',
    "[data]\nsources = [{weight = 1.0}]\n",
    '[data]\nshuffle = "always"\n',
    '[transforms.recompute]\npolicy = "some"\n',
    "[transforms.recomptue]\n",
    "[[data.phases]]\nstart = -1\n",
]


@pytest.mark.parametrize("text", GOOD)
def test_the_schema_accepts_good_recipes(text: str) -> None:
    assert accepts(SCHEMA, tomllib.loads(text))


@pytest.mark.parametrize("text", WRONG)
def test_the_schema_refuses_what_the_engine_refuses(text: str) -> None:
    assert not accepts(SCHEMA, tomllib.loads(text))
    assert walk(sample.Job, tree(text), sample.registry()).faults


def test_the_schema_accepts_the_resolved_recipe_and_describes_keys() -> None:
    outcome = resolve(sample.Job, tree(RECIPE), sample.registry())
    assert accepts(SCHEMA, tomllib.loads(to_toml(plain(outcome.tree))))
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert (
        SCHEMA["$defs"]["forge.optimizers.adam"]["properties"]["lr"]["description"] == "Learning rate. (At a resume: identity.)"
    )
    assert SCHEMA["$defs"]["forge.optimizers.adam"]["properties"]["lr"]["default"] == 1e-3
    json.dumps(SCHEMA)


def test_a_broken_plugin_is_left_out_of_the_schema() -> None:
    made = json_schema(sample.Job, sample.registry(sample.entry("optimizers", "gone", "nowhere_at_all:X")))
    assert "forge.optimizers.gone" not in made["$defs"]
    assert accepts(made, tomllib.loads(RECIPE))


def test_the_console_prints_one_document_or_text_never_both() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(as_json=True, out=out, err=err)
    console.text("for people")
    console.table(("a",), [("b",)])
    console.note("beside")
    console.document({"path": Path("x"), "text": "ü"})
    assert json.loads(out.getvalue()) == {"path": "x", "text": "ü"}
    assert err.getvalue() == "beside\n"


def test_errors_go_to_standard_error_or_into_the_document() -> None:
    error = ConfigError([Fault("a.b", "is [bold]wrong[/bold]", "r.toml:3", "do this"), Fault("c", "too")])
    out, err = io.StringIO(), io.StringIO()
    assert Console(out=out, err=err).error(error) == 2
    assert out.getvalue() == ""
    assert err.getvalue() == f"error: {error}\n"
    assert "[bold]" in err.getvalue()
    assert Console(as_json=True, out=out, err=err).error(error) == 2
    document = json.loads(out.getvalue())
    assert document["ok"] is False
    assert document["faults"][0] == {"key": "a.b", "message": "is [bold]wrong[/bold]", "origin": "r.toml:3", "hint": "do this"}
    assert Console(as_json=True, out=io.StringIO()).error(ForgeError("no")) == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_tables_are_tab_separated_off_a_terminal_and_colored_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    Console(out=out).table(("name", "value"), [("x", 1), ("[y]", "z" * 300)])
    assert out.getvalue() == "name\tvalue\nx\t1\n[y]\t" + "z" * 300 + "\n"
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    seen = Terminal()
    Console(out=seen).table(("name", "value"), [("x", 1), ("[y]", 2)])
    assert "\x1b[" in seen.getvalue() and "[y]" in seen.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain_ = Terminal()
    Console(out=plain_).table(("name", "value"), [("x", 1)])
    assert "\x1b[3" not in plain_.getvalue() and "x" in plain_.getvalue()


def test_sizes() -> None:
    assert [size(count) for count in (0, 1023, 1024, 3 * 2**30 // 2, 5 * 2**50)] == [
        "0 B",
        "1,023 B",
        "1.00 KiB",
        "1.50 GiB",
        "5,120.00 TiB",
    ]


def test_durations() -> None:
    assert [duration(v) for v in (-1, 0.4, 45, 220, 3723)] == ["0 s", "0 s", "45 s", "3 min 40 s", "1 h 02 min"]
    assert [clock(v) for v in (0.4, 220, 3723)] == ["0:00", "3:40", "1:02:03"]


def test_counts() -> None:
    assert [count(v) for v in (0, 950, 21300, 1.4e6, 2e9)] == ["0", "950", "21.3k", "1.4M", "2.0G"]
