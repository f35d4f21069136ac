"""`forge-train generate`: one prompt or several, on one process or on ranks that share the model; the texts are the same."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_data.tokenizers.bytes import ByteTokenizer
from forge_models.generation import Sampling, generate
from forge_train.cli import main
from forge_train.commands.generate import _texts
from forge_train.inference.continuation import Continuation
from forge_train.inference.stored import load_model, load_sharded_model, open_weights, recipe_to_generate
from harness.pool import World
from harness.siblings import fast
from train.runs import TINY, train

BYTES = TINY.replace("vocab_size = 61", "vocab_size = 257") + '\n[data.tokenizer]\nname = "bytes"\n'
EXPERTS = "\n[model.moe]\nexperts = 4\ntop_k = 2\nffn_dim = 16\n"
PROMPTS = ["def one", "a", "class"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with experts, and an average of its weights."""
    folder = tmp_path_factory.mktemp("generated")
    recipe = folder / "tiny.toml"
    hooks = '--hooks=[{name="ema",decay=0.5},{name="save"}]'
    recipe.write_text(BYTES + EXPERTS)
    train(recipe, [f"--job.dir={folder / 'run'}", "--train.max_steps=3", "--optimizer.lr=0.1", hooks])
    return folder / "run"


def said(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    """The JSON document of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["generate", *map(str, arguments), "--json"])
    assert not ended.value.code
    return json.loads(capsys.readouterr().out)


def expected(run: Path, prompts: list[str], weights: str = "model", **sampling: Any) -> list[str]:
    """What the model makes of tokens, without the command."""
    coder = ByteTokenizer()
    model: Any = load_model(open_weights(run, Registry(), weights))
    encoded = [coder.encode(prompt).tolist() for prompt in prompts]
    rows = generate(model, encoded, Sampling(**sampling), max_tokens=8, eos=coder.eos)
    return [coder.decode([token for token in row if token != coder.eos]) for row in rows]


def test_prompts_of_a_file_are_continued_together(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    given = (trained, "--prompts", file, "--max-tokens", 8, "--temperature", 1.3, "--seed", 5)
    found = said(capsys, *given)
    assert [entry["prompt"] for entry in found["texts"]] == PROMPTS
    assert [entry["text"] for entry in found["texts"]] == expected(trained, PROMPTS, temperature=1.3, seed=5)
    stop = found["texts"][0]["text"][3]
    again = said(capsys, *given, "--stop", stop)
    assert again["texts"][0]["text"] == found["texts"][0]["text"].partition(stop)[0]


def test_a_token_that_ends_a_text_is_not_part_of_it(trained: Path) -> None:
    model: Any = load_model(open_weights(trained, Registry()))
    coder, sampling = ByteTokenizer(), Sampling(temperature=1.3, seed=5)
    (row,) = generate(model, [coder.encode(PROMPTS[0]).tolist()], sampling, max_tokens=8)
    begun = Continuation(model, coder, sampling, max_tokens=8, ends=frozenset({row[5]}))
    kept = row[: row.index(row[5])]
    assert begun.together(PROMPTS[:1]) == [coder.decode(kept)]
    assert begun.tokens == len(kept) + 1


def test_the_average_of_the_weights_writes_another_text(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = (trained, "--prompt", "def one", "--max-tokens", 8, "--temperature", 0)
    for weights in ("model", "ema"):
        assert [said(capsys, *given, "--weights", weights)["text"]] == expected(trained, ["def one"], weights)


def continued(run: Path, overrides: list[str], size: int) -> tuple[str, list[str]]:
    """One text piece by piece, and several together, on this rank."""
    registry = Registry()
    weights = open_weights(run, registry)
    model = load_sharded_model(weights, recipe_to_generate(weights, overrides, size, registry), torch.device("cpu"), registry)
    coder = ByteTokenizer()
    with model.inference(whole_sequences=True):
        begun = Continuation(
            model.whole(),
            coder,
            Sampling(temperature=1.3, seed=5),
            max_tokens=8,
            ends=frozenset({coder.eos}),
            agree=model.topology.from_first,
        )
        return "".join(begun(PROMPTS[0])), begun.together(PROMPTS)


LAYOUTS = {
    "dp2": [],
    "tp2": ["--parallel.tp=2"],
    "pp2": ["--parallel.pp=2"],
    "dp2ep2": ["--parallel.ep=2"],
    "cp2": ["--parallel.cp=2"],
    "pp2tp2": ["--parallel.pp=2", "--parallel.tp=2"],
}


@pytest.mark.parametrize("layout", fast("pp2", "dp2ep2", of=LAYOUTS))
def test_ranks_that_share_a_model_write_what_one_process_does(world: World, trained: Path, layout: str) -> None:
    size = 4 if layout == "pp2tp2" else 2
    one, several = expected(trained, PROMPTS[:1], temperature=1.3, seed=5), expected(trained, PROMPTS, temperature=1.3, seed=5)
    for found in world.run(continued, size, trained, LAYOUTS[layout], size):
        assert found == (one[0], several)


@pytest.mark.slow
def test_under_torchrun_one_process_speaks(trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "forge_train"]
    given = ["generate", str(trained), "--max-tokens", "8", "--temperature", "1.3", "--seed", "5", "--parallel.tp=2", "--json"]
    done = subprocess.run([*launcher, *given, "--prompts", str(file)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [entry["text"] for entry in json.loads(done.stdout)["texts"]] == expected(trained, PROMPTS, temperature=1.3, seed=5)
    refused = subprocess.run([*launcher, *given], capture_output=True, text=True, check=False, timeout=300)
    assert refused.returncode == 1, "torchrun's own"
    assert (refused.stdout + refused.stderr).count("standard input reaches only one process") == 1


def test_what_cannot_be_asked_for_says_why(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    for arguments, why in (
        ((1, "a", Path("b"), None, False), "--prompt and --file exclude each other"),
        ((1, "a", None, Path("b"), False), "--prompt and --prompts exclude each other"),
        ((1, None, None, Path("b"), True), "--speculate supports only one text"),
        ((2, "a", None, None, True), "--speculate supports only one text"),
        ((2, None, None, None, False), "under torchrun pass --prompt"),
        ((2, None, Path("-"), None, False), "under torchrun pass --prompt"),
        ((1, None, None, empty, False), "has no line with text"),
        ((1, None, None, tmp_path / "absent", False), "cannot be read"),
    ):
        with pytest.raises(ForgeError, match=why):
            _texts(*arguments)
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(trained), "--prompt", "a", "--parallel.tp=2"])
    assert ended.value.code == 2
    assert "--parallel.tp=2 has no effect on one process" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["generate", str(trained), "--prompt", "a", "--max-token", "5"])
    assert "has no effect on one process" not in capsys.readouterr().err
    weights = open_weights(trained, Registry())
    with pytest.raises(ForgeError, match=r"--optimizer\.lr has no effect here"):
        recipe_to_generate(weights, ["--optimizer.lr=1"], 2, Registry())
    with pytest.raises(ForgeError, match=r"parallel\.tp"):
        recipe_to_generate(weights, ["--parallel.tp=3"], 3, Registry())


def test_trials_f8_a_damaged_checkpoint_is_named(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(trained, tmp_path / "run")
    checkpoint = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    (checkpoint / "manifest.json").write_bytes(b"{}")
    for arguments in (("generate", checkpoint, "--prompt", "x"), ("config", "diff", checkpoint, "debug")):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments)])
        assert ended.value.code == 2 and f"{checkpoint} is damaged: " in capsys.readouterr().err


def test_trials_a7_a_prompt_of_a_file_ends_with_a_line_feed(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, lines = tmp_path / "prompts.txt", ["one\u2028still one", "two\x0cstill two", "three\x85\x1cthree", "four\rfour"]
    file.write_bytes(("\n".join(lines[:2]) + "\r\n" + "\n\n".join(lines[2:])).encode())
    found = said(capsys, trained, "--prompts", file, "--temperature", 0, "--max-tokens", 1)
    assert [item["prompt"] for item in found["texts"]] == lines
    file.write_bytes(b"def\r\none\r")
    assert said(capsys, trained, "--file", file, "--max-tokens", 1)["prompt"] == "def\r\none\r"
