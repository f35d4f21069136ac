"""`generate` as a user calls it."""

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from forge_models.generation import GREEDY, Sampling, generate
from forge_models.hf.reader import Folder
from forge_train.inference.continuation import Continuation
from forge_train.inference.stored import load_model
from forge_train.run.loop import fit
from models.hf.command_line import WORDS, run, with_tokenizer
from models.hf.zoo import random_model, saved
from train.runs import prepared


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(WORDS)
    return path


def _end_of_input() -> str:
    raise EOFError


def test_generate_speaks_with_a_runs_own_tokenizer(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    training, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=2", "--schedule.name=constant"])
    fit(training)
    from forge_data.tokenizers.bytes import ByteTokenizer

    coder = ByteTokenizer()
    ids = generate(training.model.part, [coder.encode("ab").tolist()], max_tokens=12, eos=coder.eos)[0]
    for place in ("run", "run/checkpoints", "run/checkpoints/step-00000002"):
        arguments = ("--prompt", "ab", "--temperature", "0", "--max-tokens", "12", "--json")
        assert run("generate", tmp_path / place, *arguments) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["text"] == coder.decode([token for token in ids if token != coder.eos])
        assert answer["tokens"] == len(ids)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("ab")
    assert run("generate", tmp_path / "run", "--file", prompt, "--temperature", "0", "--max-tokens", "12") == 0
    assert capsys.readouterr().out == f"ab{answer['text']}\n"
    assert run("generate", tmp_path / "run", "--file", prompt, "--prompt", "x") == 2
    capsys.readouterr()
    lines = iter(["ab"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: next(lines, None) or _end_of_input())
    assert run("generate", tmp_path / "run", "--temperature", "0", "--max-tokens", "12") == 0
    assert capsys.readouterr().out == f"ab{answer['text']}\n\n"
    for piped in (("--file", "-"), ()):
        monkeypatch.setattr("sys.stdin", io.StringIO("ab"))
        assert run("generate", tmp_path / "run", *piped, "--temperature", "0", "--max-tokens", "12") == 0
        assert capsys.readouterr().out == f"ab{answer['text']}\n"
    assert run("generate", tmp_path / "nowhere") == 2


SETTINGS = Sampling(repetition_penalty=1.2, temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, seed=5)
OPTIONS = ("--repetition-penalty=1.2", "--temperature=0.9", "--top-k=40", "--top-p=0.9", "--min-p=0.01", "--seed=5")


def test_every_option_of_generate_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_tokenizer(saved(random_model("llama", {}), tmp_path / "source"))
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = [backend.encode("1A1").ids]
    model = load_model(Folder(folder))

    def text(**other: Any) -> str:
        sampling = replace(SETTINGS, **other)
        return backend.decode(generate(model, prompt, sampling, max_tokens=15, eos=2)[0])  # type: ignore[arg-type]

    def spoken(*options: str) -> str:
        assert run("generate", folder, "--prompt", "1A1", "--max-tokens", "15", "--json", *OPTIONS, *options) == 0
        return json.loads(capsys.readouterr().out)["text"]

    expected = text()
    assert len(expected) > 5
    assert spoken() == spoken("--prefill=1") == expected
    assert spoken(f"--stop={expected[3:5]}", "--stop=never") == expected[:3]
    changes: dict[str, Any] = {"repetition_penalty": 3.0, "temperature": 0.1, "top_k": 1, "top_p": 0.01, "min_p": 0.9, "seed": 6}
    for name, value in changes.items():
        other = text(**{name: value})
        assert other != expected, f"the case does not show {name}"
        assert spoken(f"--{name.replace('_', '-')}={value}") == other
        capsys.readouterr()
    assert run("generate", tmp_path / "nowhere", "--temperature=-1") == 2
    assert "temperature -1.0 must be at least 0" in capsys.readouterr().err


def test_generate_shows_each_token_before_it_makes_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is only in a buffer of the process counts as not shown."""
    folder = with_tokenizer(saved(random_model("llama", {}), tmp_path / "source"))
    screen = io.BytesIO()
    lengths: list[int] = []

    def steps(*_: Any, **__: Any) -> Iterator[list[int]]:
        for token in (10, 11, 12):
            lengths.append(len(screen.getvalue()))
            yield [token]

    monkeypatch.setattr("forge_models.generation.stream", steps)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(screen)))  # type: ignore[type-var]
    assert run("generate", folder, "--prompt", "1A") == 0
    assert lengths == [2, 3, 4]
    assert screen.getvalue() == b"1A()*\n"


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "a1",
}


@pytest.mark.parametrize(("launcher", "words"), [(TORCHRUN, "rank 1 of 2 (torchrun)"), (SRUN, "rank 0 of 4 (srun)")])
def test_a_command_for_one_process_refuses_several(
    launcher: dict[str, str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    assert run("convert", tmp_path, tmp_path / "target", "--from", "hf", "--to", "forge") == 2
    said = capsys.readouterr().err
    assert "convert runs in one process" in said
    assert words in said


def test_generate_reads_a_folder_with_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = random_model("llama", {"tie_word_embeddings": True})
    source = with_tokenizer(saved(reference, tmp_path / "source"))
    backend = Tokenizer.from_file(str(source / "tokenizer.json"))
    prompt = torch.tensor([backend.encode("1A").ids])
    assert prompt[0, 0] == 1, "the text begins with a token of its own, as with Llama"
    text = reference.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=2, pad_token_id=0)  # type: ignore[operator]
    expected = backend.decode(text[0, prompt.shape[1] :].tolist(), skip_special_tokens=True)
    assert run("generate", source, "--prompt", "1A", "--temperature", "0", "--max-tokens", "20", "--json") == 0
    assert json.loads(capsys.readouterr().out)["text"] == expected
    (source / "tokenizer.json").unlink()
    assert run("generate", source, "--prompt", "1A") == 2
    assert "--tokenizer" in capsys.readouterr().err


def test_text_is_shown_only_when_it_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters of several bytes come whole, and nothing of a stop text is shown."""
    from forge_data.tokenizers.bytes import ByteTokenizer

    def steps(text: str) -> Iterator[list[int]]:
        return iter([[byte] for byte in text.encode()])

    def shown(text: str, *stops: str) -> list[str]:
        monkeypatch.setattr("forge_models.generation.stream", lambda *_, **__: steps(text))
        return list(Continuation(torch.nn.Module(), ByteTokenizer(), GREEDY, max_tokens=9, stops=stops)("x"))

    assert [piece for piece in shown("aé€b") if piece] == ["a", "é", "€", "b"]
    assert "".join(shown("one END two", "END")) == "one "
    assert "E" not in "".join(shown("one END two", "END"))
    assert "".join(shown("one ENX two", "END")) == "one ENX two"
    assert "".join(shown("aab", "aab")) == ""
    assert "".join(shown("ends in EN", "END")) == "ends in EN"
