"""What README promises of the demo: a model that has learned more than how often tokens occur, and writes like Python."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from math import log
from pathlib import Path

import pytest

from forge_data.loading.evaluation import evaluation
from forge_train.recipe.load import load_recipe


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The demo's directory, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "forge_train", "run", "demo", "--train.threads=2"]
    result = subprocess.run(
        command, cwd=folder, env={**os.environ, "NO_COLOR": "1"}, capture_output=True, text=True, timeout=1200
    )
    assert result.returncode == 0, result.stderr
    return folder / "runs" / "demo", result.stdout


def entropy(counts: Counter[int]) -> float:
    """Of a distribution, in nats: the least loss of a model that knows only how often each token occurs."""
    total = sum(counts.values())
    return -sum(count / total * log(count / total) for count in counts.values())


@pytest.mark.slow
def test_the_held_out_loss_is_far_below_the_unigram_entropy(ran: tuple[Path, str]) -> None:
    directory, _ = ran
    held_out = evaluation(load_recipe("demo").job.data, workspace=directory / "data")["held_out"]
    counts: Counter[int] = Counter()
    for batch in held_out.batches(0, 1, 16):
        counts.update(batch.labels[batch.labels >= 0].tolist())
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    losses = [line["evaluation/held_out/loss"] for line in lines if "evaluation/held_out/loss" in line]
    assert len(losses) >= 4 and losses[-1] == min(losses)
    assert losses[-1] <= entropy(counts) - 1.5


@pytest.mark.slow
def test_the_loss_is_seen_falling_early(ran: tuple[Path, str]) -> None:
    shown = [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+)/\d+ .*?  loss ([\d.]+) ", ran[1])]
    first, early = shown[0], [loss for step, loss in shown if 1 < step <= 100]
    assert first[0] == 1 and early, "a line at the first step and others within the first fifth"
    assert min(early) < first[1] - 1


@pytest.mark.slow
def test_the_samples_look_like_python(ran: tuple[Path, str]) -> None:
    directory, _ = ran
    text = "\n".join(sample["text"] for sample in json.loads((directory / "samples.json").read_text()))
    known = ("self", "return", "def", "if", "import", "class", "None", "for")
    assert sum(re.search(rf"\b{word}\b", text) is not None for word in known) >= 4, text
    assert text.count("\n    ") > 5, "lines are indented"
