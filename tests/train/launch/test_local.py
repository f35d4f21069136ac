"""`launch local`: the launcher of `run --processes` with the ranks counted, on one machine or on several."""

import sys
from dataclasses import fields
from pathlib import Path

import pytest

from forge_train.cli import main
from forge_train.launch.cluster import ContainerSection, KubernetesSection, SlurmSection
from forge_train.process.restarts import Machines, run_local_ranks


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["launch", "local", *arguments])
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def _without_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A refused command starts no rank and writes nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("forge_train.process.restarts.run_local_ranks", lambda *_: pytest.fail("ranks were started"))


def test_a_refused_recipe_starts_no_rank(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "optimizer.lrr" in refused(capsys, "debug", "--processes=2", "--optimizer.lrr=1")
    assert "train." in refused(capsys, "debug", "--processes=4", "--machines=4", "--address=h")  # 16 ranks, 8 sequences
    assert list(tmp_path.iterdir()) == []


def test_options_that_contradict_each_other_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "numbers 0 to 1" in refused(capsys, "debug", "--processes=1", "--machines=2", "--machine=2", "--address=h")
    assert "needs --address" in refused(capsys, "debug", "--processes=1", "--machines=2")
    both = refused(capsys, "debug", "--processes=1", "--machines=2", "--address=h", "--restarts=1")
    assert "must restart together" in both


def test_without_a_number_there_is_one_rank_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr("forge_train.process.restarts.supervised", lambda *given: started.append(given[3]) or 0)
    for count, ranks in ((2, 2), (0, 1)):
        monkeypatch.setattr("forge_train.process.restarts.devices", lambda count=count: count)
        with pytest.raises(SystemExit) as end:
            main(["launch", "local", "debug"])
        assert not end.value.code and started.pop() == ranks


def test_ranks_of_a_machine_follow_those_of_the_machines_before(tmp_path: Path) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    code = f"import os; open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(' '.join(os.environ[n] for n in {names!r}))"
    ended = run_local_ranks([sys.executable, "-c", code], range(2), machines=Machines(3, 1, "host0", 4321, attempt=5))
    assert ended.code == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "2": "2 6 0 2 host0 4321 5",
        "3": "3 6 1 2 host0 4321 5",
    }
    failed = run_local_ranks([sys.executable, "-c", "raise SystemExit(3)"], [0], machines=Machines(3, 2, "host0", 4321))
    assert (failed.code, failed.rank) == (3, 0) and failed.why.startswith("rank 2 ended with exit code 3")


def test_every_key_of_a_cluster_file_is_on_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs/concepts/clusters.md").read_text()
    for section in (SlurmSection, KubernetesSection, ContainerSection):
        missing = [
            name for name in (item.name for item in fields(section)) if f"`{name}`" not in page and f"\n{name} = " not in page
        ]
        assert missing == [], section.__name__
