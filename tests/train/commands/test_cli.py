"""The command as a user meets it: what is wrong is said once, with exit code 2, and nothing is left half-written."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from forge_train.cli import main
from forge_train.trackers import read_metrics
from harness import commands
from train.runs import TINY

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}


def forge(directory: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return commands.run("-m", "forge_train", *arguments, cwd=directory, env=ENVIRONMENT | environment)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("ab")
    return tmp_path


TEXT = ["--data.tokenizer.name=bytes", "--model.vocab_size=257", "--data.sources.0.name=text"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["run", "absent.toml"], ["absent.toml"]),
        (["run", "tiny.toml", "--train.max_stepz=3"], ["train.max_stepz", "max_steps"]),
        (["run", "tiny.toml", "--train.max_steps=2.7"], ["train.max_steps", "2.7", "integer"]),
        (["run", "tiny.toml", "--model.tied_embeddings=ture"], ["model.tied_embeddings", "ture"]),
        (["run", "tiny.toml", "bare"], ["bare"]),
        (["run", "tiny.toml", "--train.max_steps", "3"], ["train.max_steps"]),
        (["run", "tiny.toml", "--optimizer.name=adamv"], ["optimizer.name", "adamv", "adamw"]),
        (["run", "tiny.toml", "--parallel.dp_shard=3"], ["parallel", "3"]),
        (["run", "tiny.toml", "--parallel.tp=2"], ["parallel"]),
        (["run", "tiny.toml", "--schedule.warmup=99"], ["schedule.warmup", "max_steps"]),
        (["run", "tiny.toml", "--data.sources.0.tokens=9"], ["9", "16"]),
        (["run", "tiny.toml", "--model.vocab_size=32"], ["vocab", "32"]),
        (["run", "tiny.toml", "--data.sequence_length=64"], ["data.sequence_length", "max_length = 32"]),
        (["run", "tiny.toml", *TEXT, "--data.sources.0.path=nowhere"], ["nowhere"]),
        (["run", "tiny.toml", *TEXT, "--data.sources.0.path=empty.txt"], ["empty"]),
        (["run", "tiny.toml", *TEXT, "--data.sources.0.path=short.txt"], ["16"]),
        (["run", "tiny.toml", "--job.dir=/proc/forge"], ["/proc/forge", "--job.dir"]),
        (["run", "tiny.toml", "--checkpoint.resume=require"], ["no checkpoint was ever saved"]),
        (["check", "tiny.toml", "--world", "3"], ["train.global_batch"]),
        (["parity", "tiny.toml", "--layouts", "dp2x"], ["dp2x"]),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_fault_47_bad_input_is_one_clear_message(here: Path, arguments: list[str], named: list[str]) -> None:
    if "--data.sources.0.name=text" in arguments:
        recipe = (here / "tiny.toml").read_text()
        (here / "tiny.toml").write_text(recipe.replace("vocab_size = 61\ntokens = 4000\ndocument = 23\n", ""))
    found = forge(here, *arguments)
    assert found.returncode == 2, found.stderr
    assert "Traceback" not in found.stderr
    for text in named:
        assert text in found.stderr
    assert not list(here.rglob("step-*"))
    assert not list(here.rglob("*.tmp*"))


def test_fault_47_all_faults_of_a_file_are_reported_at_once(here: Path) -> None:
    (here / "bad.toml").write_text('[train]\nmax_steps = 2.7\ngrad_clip = "ture"\n[optimzer]\nlr = 1\n')
    found = forge(here, "run", "bad.toml", "--job.sed=1")
    assert found.returncode == 2
    for text in ("bad.toml:2", "bad.toml:3", "bad.toml:4", "--job.sed"):
        assert text in found.stderr
    assert not (here / "runs").exists()


def test_a_run_leaves_recipe_numbers_logs_checkpoint_and_report(here: Path) -> None:
    found = forge(here, "run", "tiny.toml", "--hooks=[{name='log', every=1}, {name='save'}, {name='progress'}]")
    assert found.returncode == 0, found.stderr
    run = here / "runs" / "tiny"
    assert [entry["step"] for entry in read_metrics(run / "metrics.jsonl")] == list(range(1, 9))
    assert "resolved recipe" in (run / "config.toml").read_text()
    assert (run / "logs" / "rank-00000.log").read_text()
    assert (run / "report.html").stat().st_size < 1_000_000
    again = forge(here, "run", str(run / "config.toml"), f"--job.dir={here / 'again'}")
    assert again.returncode == 0, again.stderr
    assert read_metrics(here / "again" / "metrics.jsonl")[-1]["loss"] == read_metrics(run / "metrics.jsonl")[-1]["loss"], (
        "the resolved recipe is the run"
    )


CALLER = """
from dataclasses import dataclass
from forge_core.component import Component
from forge_core.protocols.run import Hook

@dataclass(frozen=True)
class Caller(Component):
    api_key: str = ""
    address: str = ""

    def build(self):
        assert self.api_key == "sk-hidden-1" and self.address == "s3://me:sk-hidden-2@bucket"
        return Hook()
"""


def test_fault_48_secrets_reach_only_files_that_their_owner_alone_may_read(here: Path) -> None:
    (here / "mine.py").write_text(CALLER)
    caller = "{name='./mine.py:Caller', api_key='sk-hidden-1', address='s3://me:sk-hidden-2@bucket'}"
    run = here / "runs" / "tiny"
    for said in ("8/8", "resuming after step 8"):
        found = forge(here, "run", "tiny.toml", f"--hooks=[{{name='save'}}, {{name='progress'}}, {caller}]")
        assert found.returncode == 0, found.stderr
        assert said in found.stdout + found.stderr and "sk-hidden" not in found.stdout + found.stderr
    kept = {path for path in run.rglob("*") if path.is_file() and b"sk-hidden" in path.read_bytes()}
    (code,) = (run / "plugin-files").iterdir()  # a copy of what the user wrote into the file
    assert kept == {run / "config.toml", code} and all(path.stat().st_mode & 0o077 == 0 for path in kept)
    (manifest, *_) = run.glob("checkpoints/step-*/manifest.json")
    assert '"(hidden)"' in manifest.read_text() and "s3://(hidden)@bucket" in manifest.read_text()


def test_a_recipe_without_secrets_may_be_read_by_others(here: Path) -> None:
    assert forge(here, "run", "tiny.toml").returncode == 0
    mask = os.umask(0o022)
    os.umask(mask)
    assert (here / "runs" / "tiny" / "config.toml").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_finished_run_does_nothing_and_fresh_starts_over(here: Path) -> None:
    forge(here, "run", "tiny.toml")
    again = forge(here, "run", "tiny.toml")
    assert again.returncode == 0
    assert "resuming after step 8" in again.stdout
    fresh = forge(here, "run", "tiny.toml", "--fresh")
    assert "resuming" not in fresh.stdout
    assert fresh.returncode == 0


def test_fresh_never_empties_a_directory_that_is_not_a_runs(here: Path) -> None:
    (here / "mine" / "checkpoints").mkdir(parents=True)
    (here / "mine" / "checkpoints" / "thesis.txt").write_text("years of work")
    found = forge(here, "run", "tiny.toml", "--fresh", "--job.dir=mine")
    assert found.returncode == 2
    assert (here / "mine" / "checkpoints" / "thesis.txt").exists()


def test_sigterm_saves_and_says_that_there_is_more_to_do(here: Path) -> None:
    long = ["--train.max_steps=100000", "--checkpoint.every=0", "--hooks=[{name='save'}, {name='log', every=1}]"]
    worker = subprocess.Popen(
        [sys.executable, "-m", "forge_train", "run", "tiny.toml", *long], cwd=here, env=ENVIRONMENT, stdout=subprocess.DEVNULL
    )
    _until(lambda: len(_lines(here)) > 3)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=60) == 75
    last = read_metrics(here / "runs" / "tiny" / "metrics.jsonl")[-1]["step"]
    (saved,) = (here / "runs" / "tiny" / "checkpoints").glob("step-*")
    assert int(saved.name.split("-")[1]) == last


def test_fault_1_kill_9_at_any_moment_then_resume_gives_the_same_run(here: Path) -> None:
    """Killed again and again while every step is saved; the numbers are those of a run that nobody touched."""
    settings = ["--train.max_steps=40", "--checkpoint.every=1", "--hooks=[{name='log', every=1}, {name='save'}]"]
    assert forge(here, "run", "tiny.toml", *settings, "--job.name=clean").returncode == 0
    command = [sys.executable, "-m", "forge_train", "run", "tiny.toml", *settings, "--job.name=tiny"]
    for steps in (5, 23):
        worker = subprocess.Popen(command, cwd=here, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
        _until(lambda steps=steps: len(_lines(here)) >= steps)
        time.sleep(0.003 * steps % 0.02)
        worker.kill()
        worker.wait()
    last = forge(here, "run", "tiny.toml", *settings, "--job.name=tiny")
    assert last.returncode == 0, last.stderr
    assert "resuming after step" in last.stdout
    clean, killed = (
        {entry["step"]: entry["loss"] for entry in read_metrics(here / "runs" / name / "metrics.jsonl")}
        for name in ("clean", "tiny")
    )
    assert killed == clean


def _lines(here: Path) -> list[dict[str, Any]]:
    path = here / "runs" / "tiny" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.002)


WITHOUT_TORCH = """
import sys
from forge_train.cli import main
try:
    main({words})
except SystemExit as end:
    assert not end.code, end.code
assert "torch" not in sys.modules
"""


def test_help_and_check_import_no_torch(here: Path) -> None:
    for words in (["--help"], ["check", "tiny.toml", "--world", "2"], ["run", "--help"], ["config", "show", "tiny.toml"]):
        command = [sys.executable, "-c", WITHOUT_TORCH.format(words=words)]
        done = subprocess.run(command, cwd=here, env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


ALLOCATOR = """
import os, sys
from forge_train.cli import main
assert "torch" not in sys.modules
try:
    main(["check", "tiny.toml"])
except SystemExit as end:
    assert not end.code, end.code
print({name: value for name, value in os.environ.items() if name.endswith("ALLOC_CONF")})
"""


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, {"PYTORCH_CUDA_ALLOC_CONF": ""}),
    ],
)
def test_the_allocator_of_gpus_grows_unless_it_is_set(here: Path, own: dict[str, str], expected: dict[str, str]) -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if not name.endswith("ALLOC_CONF")} | own
    done = subprocess.run([sys.executable, "-c", ALLOCATOR], cwd=here, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == str(expected), done.stderr


@pytest.mark.parametrize(
    ("given", "near"),
    [
        (["run", "debug", "--frsh"], "Did you mean --fresh?"),
        (["check", "debug", '--optimzer={name="lion"}'], "Did you mean --optimizer?"),
        (["evaluate", "runs/debug", "--shotz", "3"], "Did you mean --shots?"),
        (["generate", "runs/debug", "--promt=x"], "Did you mean --prompt?"),
        (["plan", "debug", "--zzzz"], "neither an option nor a section"),
    ],
)
def test_a_misspelled_option_is_refused_with_what_is_near(
    given: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    assert near in " ".join(capsys.readouterr().err.split())


def test_a_command_leaves_the_garbage_collector_as_it_found_it(capsys: pytest.CaptureFixture[str]) -> None:
    before = gc.get_threshold()
    with pytest.raises(SystemExit):
        main(["--help"])
    assert gc.get_threshold() == before
