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
    "SLURM_STEP_ID": "0",
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
    assert process_group.init_process_groups(Launch(local_rank=1, device=2), timeout=1) == torch.device("meta", 2)


def test_bare_srun() -> None:
    found = read_launcher(SRUN)
    assert (found.rank, found.size, found.local_rank, found.local_size, found.address) == (5, 8, 1, 4, "gpu03")
    assert found.device == 1
    assert read_launcher(SRUN | {"SLURM_PROCID": "0"}).port == found.port, "every rank derives the same port"
    assert read_launcher(SRUN | {"MASTER_PORT": "4242", "MASTER_ADDR": "head"}).address == "head"


def test_trials_f2_each_step_and_restart_has_its_own_port_and_identity() -> None:
    changes: list[dict[str, str]] = [
        {},
        {"SLURM_STEP_ID": "1"},
        {"SLURM_RESTART_COUNT": "1"},
        {"SLURM_STEP_ID": "1", "SLURM_RESTART_COUNT": "1"},
        {"SLURM_JOB_ID": "123457"},
        {"SLURM_JOB_ID": "123457", "SLURM_STEP_ID": "1"},
    ]
    found = [read_launcher(SRUN | change) for change in changes]
    assert len({each.port for each in found}) == len({each.identity for each in found}) == len(changes)
    assert all(20000 <= each.port < 32768 for each in found), "not among the ports of outgoing connections"
    assert found[3].identity == "SLURM job 123456, step 1, restart 1"
    assert read_launcher(TORCHRUN | {"TORCHELASTIC_RUN_ID": "7c2"}).identity == "torchrun 7c2"
    assert read_launcher(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}).identity == "", "torchrun's word for no name"


def test_trials_f2_a_step_on_some_nodes_meets_on_its_own_first_node() -> None:
    step = {"SLURM_STEP_NODELIST": "gpu[09]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_PROCID": "1"}
    found = read_launcher(SRUN | step)
    assert (found.address, found.size, found.local_size, found.rank) == ("gpu09", 2, 2, 1)
    assert read_launcher(SRUN | step | {"SLURM_STEP_NUM_TASKS": "1"}) == Launch(), "srun -n 1 in a job of 8 tasks"


@pytest.mark.parametrize("step", ["", "4294967290", "4294967291", "4294967292"])
def test_trials_f6_a_batch_script_without_srun_is_one_process(step: str, caplog: pytest.LogCaptureFixture) -> None:
    """In a batch script SLURM sets rank and number of tasks as well; a shell of salloc has a step without srun."""
    found = read_launcher(SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_ID": step})
    assert (found.rank, found.size, found.launcher) == (0, 1, "none")
    assert "8 tasks" in found.note and "start it with srun" in found.note
    assert process_group.init_process_groups(found, timeout=1) == torch.device("cpu") and found.note in caplog.text
    assert read_launcher(SRUN | {"SLURM_STEP_ID": "", "SLURM_STEPID": "0"}).size == 8, "its older name"


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
        ({"RANK": "8"}, "rank is 8, but the world size is 8"),
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
