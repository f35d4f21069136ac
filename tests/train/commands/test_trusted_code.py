"""No command runs a Python file that a checkpoint or the directory of a run names, unless the user grants its content."""

import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_ckpt.format.codec import decode, encode
from forge_core import trust
from forge_core.registry import Registry
from forge_train.cli import GROUP, command, main
from train.runs import TINY, train

EVIL = """
from pathlib import Path
Path({mark!r}).touch()
from forge_models.components.decoder import *
"""
TARGETS = {"target_", "output", "out"}
FIXED = {"from_": "forge", "to": "safetensors", "steps": "3"}
FILES = {"text": "lines.txt", "against": "lines.txt", "target": "words.npz"}
MORE = {
    "lens": ["--output", "lens.safetensors"],
    "probe": ["--names", "blocks.0.residual_after", "--text", "lines.txt", "--output", "probed", "--yes"],
    "similarity": ["--text", "lines.txt"],
}
"""What a command needs beside its arguments."""
OPENS = {
    *("config diff", "convert", "data diff", "evaluate", "fit", "generate", "lens", "neuro encode", "neuro rsa", "probe"),
    *("similarity", "upcycle"),
}
"""Commands that need the components which a run or its checkpoint names."""


def leaves(found: Any, name: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, with its name."""
    below = getattr(found, "commands", {})
    for part, item in below.items():
        yield from leaves(item, (*name, part))
    if not below:
        yield name, found


def calls(name: tuple[str, ...], found: Any, place: Path, folder: Path) -> Iterator[list[str]]:
    """Command lines that give the place in every argument, and in one while a preset stands in the others."""
    more = MORE.get(name[0], [])
    given = [item for item in found.params if (item.param_type_name == "argument" or item.required) and item.opts[0] not in more]
    choices = []
    for number, item in enumerate(given):
        if item.name in TARGETS or (item.name == "target" and item.param_type_name == "argument"):
            values = [str(folder / f"{'-'.join(name)}-{number}")]
        elif item.name in FIXED:
            values = [FIXED[item.name]]
        elif item.param_type_name == "argument":
            values = [str(place), "debug-moe" if name == ("upcycle",) else "debug"]
        else:
            values = [FILES[item.name]]
        choices.append([[value] if item.param_type_name == "argument" else [item.opts[0], value] for value in values])
    for chosen in product(*choices):
        line = [*name, *(part for parts in chosen for part in parts)]
        if str(place) in line:
            yield [*line, *more]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trusted")
    (folder / "tiny.toml").write_text(TINY)
    train(folder / "tiny.toml", [f"--job.dir={folder / 'run'}", "--train.max_steps=3"])
    return folder / "run"


@pytest.fixture
def foreign(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose recipe and checkpoint name `evil.py` of the run's directory as model and tokenizer."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "evil.py").write_text(EVIL.format(mark=str(tmp_path / "ran")))
    recipe = (run / "config.toml").read_text()
    (run / "config.toml").write_text(recipe.replace('name = "decoder"', 'name = "./evil.py:DecoderConfig"'))
    assert "evil.py" in (run / "config.toml").read_text()
    for path in run.glob("checkpoints/*/manifest.json"):
        manifest = decode(path.read_bytes())
        meta = json.loads(json.dumps(dict(manifest.meta)))
        meta["config"]["model"]["name"] = f"{run}/evil.py:DecoderConfig"
        meta["config"]["data"]["tokenizer"] = {"name": f"{run}/evil.py:DecoderConfig"}
        path.write_bytes(encode(replace(manifest, meta=meta)))
    (tmp_path / "lines.txt").write_text("a line\n")
    np.savez(tmp_path / "words.npz", data=np.random.default_rng(0).normal(size=(40, 3)), stimuli=np.array(["word"] * 40))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trust, "_files", set())
    monkeypatch.setenv(trust.GRANTED, "")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    return run


def said(capsys: pytest.CaptureFixture[str], line: list[str]) -> str:
    with pytest.raises(SystemExit):
        main(line)
    found = capsys.readouterr()
    return " ".join((found.out + found.err).split())


@pytest.mark.slow
def test_trials_f4_no_command_runs_a_file_that_stored_data_name(
    foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every installed command, with the run and with its checkpoint in the place of each argument."""
    registry, refused = Registry(), set()
    checkpoint = max(foreign.glob("checkpoints/step-*"))
    for entry in registry.of(GROUP):
        for name, found in leaves(command(entry, registry), (entry.name,)):
            assert any(trust.OPTION in item.opts for item in found.params), name
            for line in (line for place in (foreign, checkpoint) for line in calls(name, found, place, tmp_path)):
                if "does not run unasked" in said(capsys, line):
                    refused.add(" ".join(name))
                assert not (tmp_path / "ran").exists(), line
    assert refused == OPENS


def test_trials_f4_the_refusal_says_what_to_type(foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digest = sha256((foreign / "evil.py").read_bytes()).hexdigest()
    told = said(capsys, ["config", "diff", str(foreign), "debug"])
    assert f"{foreign}/evil.py" in told and f"--trust-code {digest}" in told
    said(capsys, ["config", "diff", str(foreign), "debug", "--trust-code", "0" * 64])
    assert not (tmp_path / "ran").exists()
    told = said(capsys, ["config", "diff", str(foreign), "debug", "--trust-code", digest])
    assert (tmp_path / "ran").exists() and "keys differ" in told


def test_trials_f4_a_recipe_of_the_user_grants_the_files_that_it_names(
    foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A warm start and `evaluate --recipe`: the user's recipe names the file, so a checkpoint may name it, too."""
    for path in foreign.glob("checkpoints/*/manifest.json"):
        manifest = decode(path.read_bytes())
        meta = json.loads(json.dumps(dict(manifest.meta)))
        del meta["config"]["data"]["tokenizer"]
        path.write_bytes(encode(replace(manifest, meta=meta)))
    held_out = '\n[data.evaluation.held]\nname = "random"\nvocab_size = 61\ntokens = 200\n'
    mine = TINY.replace('name = "decoder"', 'name = "./run/evil.py:DecoderConfig"') + held_out
    (tmp_path / "mine.toml").write_text(mine)
    assert "held: loss" in said(capsys, ["evaluate", str(foreign), "--recipe", str(tmp_path / "mine.toml")])
    trust._files.clear()
    start = mine.replace("[data]", f"[start]\nweights = '{foreign}'\n\n[data]")
    (tmp_path / "start.toml").write_text(start)
    said(capsys, ["run", str(tmp_path / "start.toml"), f"--job.dir={tmp_path / 'second'}", "--train.max_steps=3"])
    assert "are those of step 3" in caplog.text
    trust._files.clear()
    (tmp_path / "other.toml").write_text(start.replace("./run/evil.py:DecoderConfig", "decoder"))
    told = said(capsys, ["run", str(tmp_path / "other.toml"), f"--job.dir={tmp_path / 'third'}", "--train.max_steps=3"])
    assert "does not run unasked" in told
