"""Reading a launcher's variables, and the messages when they are wrong."""

import pytest
import torch

from forge_core.errors import LayoutError
from forge_parallel.launch import process_group
from forge_parallel.launch.environment import Launch, first_host, read_launcher

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "gpu[03-05,9],login1",
}


def test_without_a_launcher_there_is_one_process() -> None:
    assert read_launcher({}) == Launch()
    assert read_launcher({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == Launch(), "inside an allocation, but alone"


def test_torchrun() -> None:
    assert read_launcher(TORCHRUN) == Launch(3, 8, 1, 2, "node1", 29500, "torchrun", device=1)
    assert read_launcher(TORCHRUN | {"FORGE_LOCAL_DEVICE": "3"}).device == 3, "devices before it are left out"


def test_a_rank_takes_the_device_that_is_left_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_parallel.accelerator.count", lambda: 4)
    monkeypatch.setattr("forge_parallel.accelerator.use", lambda number: torch.device("meta", number))
    assert process_group.start(Launch(local_rank=1, device=2), timeout=1) == torch.device("meta", 2)


def test_bare_srun() -> None:
    found = read_launcher(SRUN)
    assert (found.rank, found.size, found.local_rank, found.local_size, found.address) == (5, 8, 1, 4, "gpu03")
    assert found.device == 1
    assert read_launcher(SRUN | {"SLURM_PROCID": "0"}).port == found.port, "every rank derives the same port"
    assert read_launcher(SRUN | {"MASTER_PORT": "4242", "MASTER_ADDR": "head"}).address == "head"


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[03-05,9]", "gpu03"), ("gpu[7,9].lab,x", "gpu7.lab"), ("a,b[1-2]", "a")],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE"),
        ({"RANK": "8"}, "rank 8 in a world of 8"),
        ({"RANK": "two"}, "RANK = 'two'"),
        ({"MASTER_PORT": "99999"}, "99999"),
    ],
)
def test_contradictions_are_one_message(change: dict[str, str], named: str) -> None:
    with pytest.raises(LayoutError, match=named):
        read_launcher(TORCHRUN | change)


def test_srun_without_a_node_list_says_what_to_set() -> None:
    with pytest.raises(LayoutError, match="MASTER_ADDR"):
        read_launcher(SRUN | {"SLURM_JOB_NODELIST": ""})
