"""`docs/reference/json.md`: it has a section for every command, and its tables have the keys that commands print."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_core.registry import Registry
from forge_train.cli import GROUP, command
from harness import commands
from lab.fake_runs import write_ladder
from train.commands.test_run_document import leaves

PAGE = Path(__file__).parents[2] / "docs/reference/json.md"
STEP = "runs/one/checkpoints/step-0000000"

Keys = dict[str, bool]
"""Path of a key, such as `ranks[].rank` -> whether every document has it."""


def keys_of(table: list[str]) -> Keys:
    """The keys of a table; in a row whose type ends with a question mark, they are optional."""
    found: Keys = {}
    for line in table:
        names, kind, _ = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:4])
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in found, f"{name} is twice in a table"
            found[name] = not kind.endswith("?")
    return found


def tables_in(text: str) -> Iterator[Keys]:
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        yield keys_of(table.splitlines()[2:])


def sections() -> dict[str, list[Keys]]:
    """Command -> its tables in order."""
    parts = re.split(r"^### (.+)\n", re.sub(r"^## .*\n", "", PAGE.read_text(), flags=re.MULTILINE), flags=re.MULTILINE)
    return {name: list(tables_in(text)) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def children(keys: Keys, place: str) -> Keys:
    """The keys directly in the object at `place` -> whether each is required."""
    found: Keys = {}
    start = f"{place}." if place else ""
    for path, required in keys.items():
        if path.startswith(start) and not (not place and path.startswith("[]")):
            name = re.split(r"[.\[]", path.removeprefix(start))[0]
            own = start + name
            found[name] = keys[own] if own in keys else found.get(name, False) or required
    return found


def compare(value: Any, keys: Keys, place: str = "") -> None:
    """Fails if an object in a document has a key that the table lacks, or lacks one that the table requires. An object of which
    the table has no keys may have any."""
    if isinstance(value, list):
        for item in value:
            compare(item, keys, f"{place}[]")
    elif isinstance(value, dict) and (listed := children(keys, place)):
        free = [name for name in listed if name.isupper() and len(name) > 1]  # A and B of a law are none
        missing = {name for name, required in listed.items() if required and name not in free} - set(value)
        assert not missing, f"{sorted(missing)} of {place or 'the document'} were not printed"
        unknown = set(value) - set(listed)
        assert not unknown or free, f"{sorted(unknown)} of {place or 'the document'} are not on the page"
        for name, inner in value.items():
            known = name if name in listed else free[0]
            compare(inner, keys, f"{place}.{known}" if place else known)


def printed(folder: Path, *words: str) -> Any:
    return json.loads(commands.run("-m", "forge_train", *words, "--json", cwd=folder).stdout)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tiny runs, a corpus and a configuration of another framework; the document of the first run."""
    folder = tmp_path_factory.mktemp("documents")
    few = ("--train.max_steps=2", "--schedule.warmup=1", "--checkpoint.every=1")
    told = printed(folder, "run", "debug", "--job.name=one", *few)
    assert told["state"] == "finished"
    (folder / "run.json").write_text(json.dumps(told))
    printed(folder, "run", "debug", "--job.name=two", "--optimizer.lr=0.1", *few)
    (folder / "texts.jsonl").write_text('{"text": "the first document of a corpus"}\n{"text": "and its second one"}\n')
    (folder / "asked.jsonl").write_text('{"question": "the first document of a corpus"}\n')
    (folder / "grid.toml").write_text('recipe = "debug"\n[vary]\noptimizer.lr = [1e-3, 3e-3]\n')
    printed(folder, "data", "prepare", "--path", "texts.jsonl", "--tokenizer", "bytes", "--out", "store")
    (folder / "nanogpt.py").write_text("n_layer = 2\nn_head = 4\nn_embd = 64\nbatch_size = 1\nmy_own = 3\n")
    (folder / "sparse.toml").write_text('base = "debug"\n[model.moe]\nexperts = 4\ntop_k = 2\n')
    (folder / "layouts.toml").write_text(
        'title = "One"\nsteps = 3\nskip = 1\nlimit_minutes = 5\n[common]\nrecipe = "debug"\naccumulation = 1\n'
        'data.sources = [{name = "random", vocab_size = 320, tokens = 20000}]\n[matrix]\nworld = [1]\n'
    )
    sentences = [f"{who} {does} it" for who in ("A cat", "The dog", "Some", "No one") for does in ("saw", "likes", "is")]
    (folder / "lines.txt").write_text("\n".join(sentences) + "\n")
    noise = np.random.default_rng(0).standard_normal((2, len(sentences), 3))  # two repeats
    np.savez(folder / "recording.npz", data=noise, stimuli=np.array(sentences))
    return folder


def test_every_command_has_a_section_and_every_section_a_command() -> None:
    registry = Registry()
    found = [leaf for name in registry.names(GROUP) for leaf in leaves(command(registry.find(GROUP, name), registry), name)]
    assert {name for name, item in found if not item.hidden} == set(sections())
    elsewhere = {name for name, tables in sections().items() if not tables}
    assert elsewhere == {"launch local", "ckpt convert"}  # which have the documents of `run` and `convert`


def test_every_document_is_compared() -> None:
    """`run` and the command that prints its document, and errors, have tests of their own."""
    listed = {(name, number) for name, tables in sections().items() for number in range(len(tables))}
    assert listed - {(name, number) for name, number, _ in (*CASES, *SLOW)} == {("run", 0)}


def test_an_unlisted_and_a_missing_key_are_found() -> None:
    keys = {"a[].b": True, "a[].c": False, "d.NAME": True, "e": False, "e.f": True, "[].g": True}
    compare({"a": [{"b": 1, "c": 2}, {"b": 3}], "d": {"any": 1}}, keys)
    compare([{"g": 1}], {"[].g": True})
    for wrong in ({"a": [{"c": 2}], "d": {}}, {"a": [{"b": 1, "x": 2}], "d": {}}, {"d": {}}, {"a": [], "d": {}, "e": {}}):
        with pytest.raises(AssertionError, match=r"not printed|not on the page"):
            compare(wrong, keys)
    with pytest.raises(AssertionError, match="not on the page"):
        compare([{"g": 1, "h": 2}], {"[].g": True})


def test_a_refusal_has_the_keys_of_an_error(tmp_path: Path) -> None:
    (keys,) = tables_in(PAGE.read_text().partition("In the tables below")[0])
    convert = ["ckpt", "convert", "--from", "forge", "--to", "hf", "nowhere", "out"]
    inspect = ["data", "inspect", "nowhere"]
    for words in (["check", "debug", "--train.max_stepz=3"], ["ckpt", "show", "nowhere"], convert, inspect):
        told = printed(tmp_path, *words)
        assert told["ok"] is False
        compare(told, keys)
    done = commands.run("-m", "forge_data", "inspect", "nowhere", "--json", cwd=tmp_path)
    assert done.returncode == 2
    compare(json.loads(done.stdout), keys)


def test_what_a_run_and_the_errors_of_a_damaged_corpus_print(made: Path, tmp_path: Path) -> None:
    compare(json.loads((made / "run.json").read_text()), sections()["run"][0])
    store = tmp_path / "store"
    store.mkdir()
    for file in (made / "store").iterdir():
        if file.is_file():
            (store / file.name).write_bytes(file.read_bytes())
    shard = store / "shard-00000.bin"
    shard.write_bytes(b"\0" + shard.read_bytes()[1:])
    done = commands.run("-m", "forge_train", "data", "verify", str(store), "--json", cwd=tmp_path)
    told = json.loads(done.stdout)  # one document, not a second one about the error
    assert done.returncode == 2 and told["faults"]
    compare(told, sections()["data verify"][0])


CASES: list[tuple[str, int, tuple[str, ...]]] = [
    ("check", 0, ("debug",)),
    ("config show", 0, ("debug", "--origins")),
    ("config explain", 0, ("debug", "train")),
    ("config diff", 0, ("debug", "demo")),
    ("init", 0, ("mine.toml",)),
    ("init", 0, ("large.toml", "--scale", "125m", "--gpus", "8")),
    ("plan", 0, ("debug", "--world", "2")),
    ("migrate", 0, ("nanogpt.py",)),
    ("data prepare", 0, ("--path", "texts.jsonl", "--tokenizer", "bytes", "--out", "again")),
    ("runs list", 0, ()),
    ("runs log", 0, ("runs/one",)),
    ("card", 0, ("runs/one",)),
    ("report", 0, ("runs/one",)),
    ("launch slurm", 0, ("debug", "--ranks-per-node", "1", "--time", "30")),
    ("sweep", 2, ("grid.toml", "--slurm")),
    ("bench", 1, ("--list-campaigns",)),
    ("data inspect", 0, ("store",)),
    ("data verify", 0, ("store",)),
    ("data diff", 0, ("store", "store")),
    ("ckpt ls", 0, ("runs/one",)),
    ("ckpt show", 0, ("runs/one",)),
    ("ckpt verify", 0, ("runs/one",)),
    ("ckpt prune", 0, ("runs/one", "--last", "1")),
    ("plugins list", 0, ("optimizers",)),
    ("plugins show", 0, ("adamw",)),
    ("plugins doctor", 0, ("adamw", "--conform")),
    ("skills list", 0, ()),
    ("skills show", 0, ("smoke-test",)),
    ("skills install", 0, ("skills",)),
]
SLOW: list[tuple[str, int, tuple[str, ...]]] = [
    ("config schema", 0, ("--output", "schema.json")),
    ("doctor", 0, ("--requires", "torch")),
    ("plan", 2, ("debug", "--modules")),
    ("bench", 2, ("mfu_scaling", "--list")),
    ("sweep", 1, ("grid.toml", "--list")),
    ("compare", 0, ("runs/one", "runs/two")),
    ("launch kubernetes", 0, ("debug", "--ranks-per-node", "1", "--image", "lab/forge", "--volume", "runs")),
    ("ckpt average", 0, ("runs/one", "1", "2", "--output", "averaged")),
    ("data convert", 0, ("store", "--out", "converted")),
    ("data decontaminate", 0, ("store", "--against", "asked.jsonl", "--words", "3")),
    ("probe", 1, ("debug", "--list")),
    ("runs diff", 0, ("runs/one", "runs/two")),
    ("ckpt diff", 0, (f"{STEP}1", f"{STEP}2")),
    ("sweep", 0, ("grid.toml", "--point", "0", "--train.max_steps=2", "--schedule.warmup=1")),
    ("launch local", 0, ("debug", "--job.name=local", "--train.max_steps=2", "--schedule.warmup=1")),
    ("plan", 1, ("debug", "--hardware", "h100")),
    ("evaluate", 0, ("runs/one",)),
    ("generate", 0, ("runs/one", "--prompt", "def", "--max-tokens", "2")),
    ("prepare", 0, ("debug", "--job.name=prepared")),
    (
        "teach",
        0,
        (
            *("debug", "logits", "--objective.name=distillation", "--objective.teacher=runs/one", "--objective.top_k=3"),
            *("--data.sources=[{name='text',path='texts.jsonl'}]", "--data.evaluation={}", "--data.packing=pad", "--hooks=[]"),
        ),
    ),
    ("data mix", 0, ("debug", "--plan")),
    ("data show", 0, ("debug", "--rows", "1")),
    ("data diff", 1, ("runs/one", "runs/two")),
    ("convert", 0, ("--from", "forge", "--to", "safetensors", "runs/one", "plain")),
    ("upcycle", 0, ("runs/one", "sparse.toml", "sparse")),
    ("parity", 0, ("debug", "--layouts", "dp2")),
    ("plan", 3, ("debug", "--world", "2", "--hardware", "h100", "--search")),
    ("fit", 0, ("ladder", "--budget", "1e20")),
    ("bench", 0, ("layouts.toml",)),
    ("bench", 3, ("layouts.toml", "--dry-run")),
    ("profile", 0, ("runs/traced",)),
    ("probe", 0, ("runs/one", "--names", "blocks.*.residual_after", "--text", "lines.txt", "--output", "values")),
    ("lens", 0, ("runs/one", "--text", "lines.txt", "--length", "16", "--steps", "2", "--output", "lens.safetensors")),
    ("sae", 0, ("acts", "--name", "blocks.1.residual_after", "--k", "4", "--steps", "2", "--output", "sae.safetensors")),
    ("similarity", 0, ("runs/one", "--text", "lines.txt")),
    ("similarity", 1, ("runs/one", "--steps", "--pairs", "--text", "lines.txt", "--output", "pairs.npz")),
    (
        "neuro encode",
        0,
        ("runs/one", "--target", "recording.npz", "--folds", "3", "--bands", "--draws", "2", "--output", "encoded"),
    ),
    ("neuro rsa", 0, ("runs/one", "--target", "recording.npz", "--output", "rsa")),
]
BEFORE = {
    "profile": (
        "run",
        "debug",
        "--job.name=traced",
        "--train.max_steps=4",
        "--schedule.warmup=1",
        "--hooks=[{name='profile',at=[2]}]",
    ),
    "sae": ("probe", "runs/one", "--names", "blocks.*.residual_after", "--text", "lines.txt", "--output", "acts"),
}
"""What runs before a command."""


@pytest.mark.parametrize(
    ("name", "table", "words"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda given: given if isinstance(given, str) else None,
)
def test_a_document_has_the_keys_of_the_page(made: Path, name: str, table: int, words: tuple[str, ...]) -> None:
    if name == "fit":
        write_ladder(made, "ladder")
    if name in BEFORE:
        printed(made, *BEFORE[name])
    told = printed(made, *name.split(), *words)
    assert told and not (isinstance(told, dict) and told.get("ok") is False), told
    if (name, table) == ("plan", 1):
        told = told["modeled"]
    if "--point" in words:
        assert [point["status"] for point in told["points"]] == ["finished"]  # the grid has two
    compare(told, sections()["run" if name == "launch local" else name][table])
