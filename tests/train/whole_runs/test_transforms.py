"""Transforms in a whole run: with evaluation, samples and checkpoints around the steps."""

import warnings
from pathlib import Path

import pytest

from train.runs import TINY, train

TEXT = """
[data.tokenizer]
name = "bytes"

[data.evaluation.held_out]
name = "random"
vocab_size = 257
tokens = 700
seed = 1

[[hooks]]
name = "evaluate"
every = 3

[[hooks]]
name = "sample"
prompts = ["a", "longer"]
every = 4
max_tokens = 9
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.replace("vocab_size = 61", "vocab_size = 257") + TEXT)
    return path


WIDE = ["--precision.compute=fp64", "--precision.state=fp64"]


@pytest.mark.parametrize(
    "switched",
    [
        ["--transforms.recompute.policy=full"],
        pytest.param(["--transforms.compile.fullgraph=true", "--transforms.recompute.policy=selective"], marks=pytest.mark.slow),
    ],
    ids=["recompute", "compile and recompute"],
)
def test_a_run_with_transforms_equals_one_without(recipe: Path, tmp_path: Path, switched: list[str]) -> None:
    plain = train(recipe, [f"--job.dir={tmp_path / 'plain'}", *WIDE])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own imports warn
        found = train(recipe, [f"--job.dir={tmp_path / 'switched'}", *WIDE, *switched])
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-9)
    assert found["samples"] == plain["samples"]
    again = train(recipe, [f"--job.dir={tmp_path / 'switched'}", *WIDE, "--train.max_steps=9"])
    assert len(again["losses"]) == 1, "a checkpoint of one set of transforms is one of any other"
