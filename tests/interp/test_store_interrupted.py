"""A capture that is really killed, and one whose disk is really full, end with the files of one that was left alone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_interp.store import ActivationStore
from forge_interp.tap_names import InterpError

pytestmark = pytest.mark.slow

SCRIPT = """
import sys, time
from pathlib import Path
import torch
from forge_models.components.decoder import DecoderConfig
from forge_interp.store import record

torch.set_num_threads(1)
torch.manual_seed(0)
model = DecoderConfig(dim=32, layers=2, heads=4, vocab_size=97, max_length=64).build()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.3)
inputs = list(torch.randint(0, 97, (60, 16)))
folder, pause = Path(sys.argv[1]), float(sys.argv[2])
record(model, inputs, folder, "blocks.*.residual", batch=2, shard_bytes=20_000, report=lambda _: time.sleep(pause))
"""
"""60 inputs in 30 forwards and 15 shards, with time between them."""


def started(folder: Path, pause: float) -> "subprocess.Popen[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(pause)], env=environment, stderr=subprocess.PIPE, text=True
    )


def ended(folder: Path, pause: float = 0) -> str:
    """What it said in the end."""
    process = started(folder, pause)
    said = process.communicate(timeout=120)[1]
    return said if process.returncode else ""


def files_below(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole") / "store"
    assert ended(folder) == ""
    return files_below(folder)


def test_a_capture_that_is_killed_in_the_middle_twice_goes_on_to_the_same_files(whole: dict[str, bytes], tmp_path: Path) -> None:
    folder, stops = tmp_path / "store", (3, 8)
    for shards in stops:
        process = started(folder, 0.03)
        deadline = time.monotonic() + 100
        while not (folder / f"shard-{shards:05d}.safetensors").exists():
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        if process.stderr:
            process.stderr.close()
        with pytest.raises(InterpError, match=r"the capture stopped with \d+ inputs stored"):
            ActivationStore(folder)
        assert 0 < ActivationStore(folder, partial=True).rows < 60 * 16
    assert ended(folder) == ""
    assert files_below(folder) == whole


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 120 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", str(place)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("a small file system takes the right to mount one")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_full_stops_a_capture_which_goes_on_with_more_room(whole: dict[str, bytes], small_disk: Path) -> None:
    folder = small_disk / "store"
    said = ended(folder)
    assert "InterpError" in said
    assert "No space left on device" in said
    assert "inputs are stored: make room, and start the same capture again to go on from there" in said.replace("\n", " ")
    assert not list(folder.glob("*partial"))
    with pytest.raises(InterpError, match=r"the capture stopped with \d+ inputs stored"):
        ActivationStore(folder)
    ActivationStore(folder, partial=True).verify()
    subprocess.run(["mount", "-o", "remount,size=2m", str(small_disk)], check=True)
    assert ended(folder) == ""
    assert files_below(folder) == whole
