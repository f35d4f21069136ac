"""The spawn harness itself: what it promises when all goes well, and above all when it does not."""

import ctypes
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from harness.pool import World, WorldFailed


@dataclass(frozen=True)
class Note:
    rank: int
    value: torch.Tensor


def total(start: int, *, scale: int = 1) -> Note:
    value = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(value)
    assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])
    assert int(os.environ["RANK"]) == int(os.environ["LOCAL_RANK"]) == dist.get_rank()
    return Note(dist.get_rank(), value * scale)


@pytest.mark.parametrize("size", [1, 2, 4, 3, 2])
def test_results_come_in_rank_order_from_a_group_of_exactly_that_size(world, size):
    notes = world.run(total, size, 5, scale=2)
    assert [note.rank for note in notes] == list(range(size))
    assert [note.value.item() for note in notes] == [2.0 * sum(range(5, 5 + size))] * size


def identity(value: object) -> object:
    return value


def test_arguments_and_results_travel_by_value(world):
    value = {
        "tensor": torch.arange(5),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "array": np.eye(2),
        "note": Note(1, torch.ones(1)),
    }
    for copy in world.run(identity, 2, value):
        assert torch.equal(copy["tensor"], value["tensor"])
        assert torch.equal(copy["parameter"], value["parameter"])
        assert (copy["array"] == value["array"]).all()
        assert isinstance(copy["note"], Note)


def test_a_local_function_is_refused(world):
    with pytest.raises(TypeError, match="module level"):
        world.run(lambda: None, 1)


def pid() -> int:
    return os.getpid()


def test_workers_are_kept_and_fresh_ones_are_new(world):
    first = world.run(pid, 2)
    assert world.run(pid, 2) == first
    new = world.run(pid, 2, fresh=True)
    assert set(new).isdisjoint(first)
    assert gone(new)
    assert world.run(pid, 2) == first


def fails(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError("meant to fail")
    return os.getpid()


def test_ranks_without_a_part_in_a_call_that_fails_are_kept(world):
    before = world.run(pid, 3)
    with pytest.raises(WorldFailed, match="meant to fail"):
        world.run(fails, 2, 1)
    after = world.run(pid, 3)
    assert gone(before[:2]) and after[0] == before[2] and set(after[1:]).isdisjoint(before)


def litter(directory: str) -> None:
    os.environ["FORGE_LITTER"] = "1"
    os.chdir(directory)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(dist.get_rank() + 5)


def tidy() -> tuple[object, ...]:
    return (
        "FORGE_LITTER" in os.environ,
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.rand(()).item(),
        str(Path.cwd()),
    )


def test_a_call_leaves_nothing_behind(world, tmp_path):
    before = world.run(tidy, 2)
    world.run(litter, 2, str(tmp_path))
    assert world.run(tidy, 2) == before
    assert before[0] == before[1]


def summed_over_rows(groups_before: int) -> float:
    """The sum over a mesh axis of what DTensor adds up, in a world whose groups got other names than last time."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    for _ in range(groups_before):
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))["row"]
    one = DTensor.from_local(torch.tensor([float(dist.get_rank())]), mesh, [Partial()], run_check=False)
    return (one + one).redistribute(placements=[Replicate()]).to_local().item()


def test_meshes_of_an_earlier_call_do_not_leak(world):
    for groups_before in (0, 1, 2, 3, 0):
        assert world.run(summed_over_rows, 4, groups_before) == [4, 8, 4, 8]


def by_environment() -> float:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()


def test_a_function_may_make_its_own_group_from_the_environment(world):
    assert world.run(by_environment, 2, group=False) == [2.0, 2.0]
    assert world.run(by_environment, 4, group=False) == [4.0] * 4


def raise_on(rank: int) -> None:
    print(f"I am rank {dist.get_rank()}")
    if dist.get_rank() == rank:
        secret = 41 + 1
        assert secret == 43
    dist.barrier()


def test_a_raising_rank_is_the_headline_and_the_others_do_not_hang(world):
    start = time.monotonic()
    with pytest.raises(WorldFailed) as caught:
        world.run(raise_on, 4, 2, timeout=60)
    assert time.monotonic() - start < 15
    lines = str(caught.value).splitlines()
    assert lines[0] == "raise_on on 4 ranks: rank 2 raised AssertionError"
    assert "assert secret == 43" in str(caught.value)
    assert "    secret = 42" in lines
    for rank in range(4):
        assert f"===== rank {rank} =====" in lines
        assert f"I am rank {rank}" in lines
    assert sum(" in raise_on" in line for line in lines) >= 4, "the stack of each waiting rank"
    assert [note.rank for note in world.run(total, 4, 1)] == [0, 1, 2, 3], "the pool works again"


def raise_late() -> None:
    if dist.get_rank() == 1:
        time.sleep(0.3)
        raise KeyError("late")
    raise ValueError(f"from {dist.get_rank()}")


def test_the_first_cause_stands_first_and_all_errors_are_there(world):
    with pytest.raises(WorldFailed) as caught:
        world.run(raise_late, 3)
    head = str(caught.value).split("=====")[0].strip().splitlines()
    assert "ValueError" in head[0]
    assert head[-1].strip() == "rank 1 raised KeyError: 'late'"
    assert len(head) == 3


def hang(rank: int) -> None:
    if dist.get_rank() == rank:
        wait_for_nothing()
    dist.barrier()


def wait_for_nothing() -> None:
    while True:
        time.sleep(0.05)


def test_at_the_time_limit_every_stack_is_shown_and_the_processes_are_gone(world):
    pids = world.run(pid, 3)
    with pytest.raises(WorldFailed) as caught:
        world.run(hang, 3, 1, timeout=1)
    text = str(caught.value)
    assert text.startswith("hang on 3 ranks: no answer within 1 s from ranks 0, 1, 2")
    assert text.count(" in wait_for_nothing") == 1
    assert text.count(" in hang") == 3
    assert gone(pids)
    assert world.run(identity, 3, 7) == [7, 7, 7]


def end(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(7)
        if how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        raise SystemExit(0)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("kill", "rank 1 died: killed by SIGKILL"),
        ("exit", "rank 1 died: exited with code 7"),
        ("segfault", "rank 1 died: killed by SIGSEGV"),
        ("system exit", "rank 1 raised SystemExit: 0"),
    ],
)
def test_a_rank_that_ends_is_named_at_once(world, how, message):
    start = time.monotonic()
    with pytest.raises(WorldFailed) as caught, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        world.run(end, 2, 1, how, timeout=60)
    assert time.monotonic() - start < 10
    assert len(warned) == (how == "segfault")  # it was repeated, and came again
    assert str(caught.value).splitlines()[0] == f"end on 2 ranks: {message}"
    assert world.run(identity, 2, 1) == [1, 1]


def end_once(marker: str, rank: int, signal_: int) -> int:
    if dist.get_rank() == rank and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal_)
    dist.barrier()
    return 5


def read_nowhere_once(marker: str) -> int:
    if dist.get_rank() == 1 and not Path(marker).exists():
        Path(marker).touch()
        ctypes.string_at(8)
    dist.barrier()
    return 5


def test_a_crash_tells_where_in_native_code_it_was(world, tmp_path):
    with pytest.warns(UserWarning, match=r"(?s)repeated: .*rank 1 died: killed by SIGSEGV.*SIGSEGV\(11\), PID.*ffi_call"):
        assert world.run(read_nowhere_once, 2, str(tmp_path / "marker")) == [5, 5]


def break_heap_once(marker: str, words: str) -> int:
    if dist.get_rank() == 1 and not Path(marker).exists():
        Path(marker).touch()
        os.write(2, f"{words}\n".encode())
        os.abort()
    dist.barrier()
    return 5


def test_a_broken_heap_is_repeated_like_a_segmentation_fault(world, tmp_path):
    with pytest.warns(UserWarning, match=r"(?s)repeated: .*rank 1 died: killed by SIGABRT.*unaligned tcache"):
        assert world.run(break_heap_once, 2, str(tmp_path / "marker"), "malloc(): unaligned tcache chunk detected") == [5, 5]


def test_another_abort_is_not_repeated(world, tmp_path):
    with pytest.raises(WorldFailed, match="killed by SIGABRT"):
        world.run(break_heap_once, 2, str(tmp_path / "marker"), "terminate called without an active exception")


def test_a_segmentation_fault_that_does_not_come_again_is_a_warning_with_its_story(world, tmp_path):
    with pytest.warns(UserWarning, match=r"(?s)repeated: end_once on 2 ranks: rank 1 died: killed by SIGSEGV.*rank 1 =.*_once"):
        assert world.run(end_once, 2, str(tmp_path / "marker"), 1, signal.SIGSEGV) == [5, 5]


def test_no_other_death_is_repeated(world, tmp_path):
    with pytest.raises(WorldFailed, match="killed by SIGKILL"):
        world.run(end_once, 2, str(tmp_path / "marker"), 0, signal.SIGKILL)


def unpicklable() -> object:
    return lambda: 0


def warn() -> None:
    warnings.warn("something is odd", stacklevel=1)


@pytest.mark.parametrize(("function", "cause"), [(unpicklable, "pickle"), (warn, "UserWarning: something is odd")])
def test_odd_results_and_warnings_are_errors(world, function, cause):
    with pytest.raises(WorldFailed, match=cause):
        world.run(function, 2)


def start_child(path: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(path).write_text(str(child.pid))
    dist.barrier()
    wait_for_nothing()


def test_what_a_worker_started_ends_with_it(world, tmp_path):
    file = tmp_path / "pid"
    with pytest.raises(WorldFailed):
        world.run(start_child, 1, str(file), timeout=1)
    assert gone([int(file.read_text())])


PARENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background hands down that it is ignored
sys.path[:0] = {paths!r}
import importlib.util
spec = importlib.util.spec_from_file_location("mine", {file!r})
module = sys.modules["mine"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
pool = module.World()
pool.run(module.pid, 2)
print(*pool.pids(), flush=True)
{then}
"""


@pytest.mark.parametrize(
    ("then", "how"),
    [
        ("pool.run(module.start_child, 2, {child!r}, timeout=600)", signal.SIGKILL),
        pytest.param("pool.run(module.start_child, 2, {child!r}, timeout=600)", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("raise SystemExit(3)", None, marks=pytest.mark.slow),
    ],
)
def test_no_process_outlives_the_parent(tmp_path, then, how):
    child = tmp_path / "child"
    code = PARENT.format(paths=sys.path, file=__file__, then=then.format(child=str(child)))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(text) for text in parent.stdout.readline().split()]
        assert len(pids) == 3
        if how is not None:
            wait_until(lambda: child.exists() and child.read_text())
            pids.append(int(child.read_text()))
            parent.send_signal(how)
        try:
            parent.communicate(timeout=30)
        finally:
            parent.kill()  # else leaving the block would wait for it, however long
    assert gone(pids)


def test_closing_ends_every_process():
    pool = World()
    pool.run(pid, 2)
    pids = pool.pids()
    pool.close()
    pool.close()
    assert len(pids) == 3
    assert gone(pids)


def gone(pids: list[int]) -> bool:
    """Whether all processes end within seconds (a zombie has ended)."""
    return wait_until(lambda: not any(running(pid) for pid in pids))


def running(pid: int) -> bool:
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout.strip()
    return bool(listed) and not listed.startswith("Z")


def wait_until(true, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.05)
    return False


def _refuse(release: str) -> None:
    raise ValueError(f"zbv splits the backward, which is proven from torch {release} on, and this is torch 2.11; update torch")


def test_a_schedule_that_this_torch_is_too_old_for_skips_the_test(world: World) -> None:
    with pytest.raises(pytest.skip.Exception, match=r"zbv splits .* this is torch 2\.11$"):
        world.run(_refuse, 1, "2.13")
    with pytest.raises(WorldFailed, match="any other error"):
        world.run(_refuse, 1, "any other error")
