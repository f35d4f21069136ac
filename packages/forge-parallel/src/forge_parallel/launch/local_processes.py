"""Runs a function on a few local processes with a gloo group, forked or spawned, for comparisons on one machine.

Forked processes can use objects that cannot be pickled, such as the builder of a module; like the workers of a data loader, they
compute on the CPU with one thread. Spawned processes receive JSON and return values that `torch.load(weights_only=True)` accepts,
so nothing is unpickled. All end with their parent. If one fails, the others are ended and its traceback is raised.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forge_core.errors import ForgeError, PlanError
from forge_parallel.accelerator import is_initialized
from forge_parallel.torch_private import one_gloo_thread


def fork_local(size: int, function: Callable[[], Any], timeout: float) -> list[Any]:
    """Returns the results of `function` (JSON values) on `size` ranks, in rank order; each has a default process group.

    Raises:
        PlanError: processes cannot be forked here, a rank raised or ended, or `timeout` seconds passed.
    """
    if not hasattr(os, "fork") or is_initialized():
        raise PlanError(
            "verify has to fork processes, which this system does not support, or which is too late after an accelerator has "
            "been initialized; run it at the start of a process, with CUDA_VISIBLE_DEVICES= (empty)"
        )
    children: dict[int, int] = {}  # read end of a pipe -> process that writes to it
    order: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(size):
                reading, writing = os.pipe()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about threads, which a child lacks
                    pid = os.fork()
                if pid == 0:
                    _work_forked(function, rank, size, Path(folder) / "store", writing)
                os.close(writing)
                children[reading] = pid
                order.append(reading)
            answers = _answers(order, time.monotonic() + timeout)
        finally:
            for reading, pid in children.items():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                os.close(reading)
    return [answers[reading] for reading in order]


def _answers(pipes: list[int], deadline: float) -> dict[int, Any]:
    received = dict.fromkeys(pipes, b"")
    open_pipes, failed = set(pipes), ""
    while open_pipes and not failed:
        ready, _, _ = select.select(list(open_pipes), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise PlanError("verify: the probe step did not finish in time; use a smaller model or a smaller example")
        for pipe in ready:
            data = os.read(pipe, 1 << 20)
            received[pipe] += data
            if not data:
                open_pipes.discard(pipe)
                failed = _failure(received[pipe], pipes.index(pipe)) or failed
    if failed:
        raise PlanError(failed)
    return {pipe: json.loads(data)[1] for pipe, data in received.items()}


def _failure(answer: bytes, rank: int) -> str:
    """Returns the error of a rank that has ended; "" if it returned."""
    if not answer:
        return f"verify: rank {rank} ended without a message; it may have been killed, for example for lack of memory"
    good, value = json.loads(answer)
    return "" if good else value


def _work_forked(function: Callable[[], Any], rank: int, size: int, store: Path, pipe: int) -> None:
    """Runs a forked child process; never returns."""
    code = 1
    try:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        warnings.simplefilter("ignore")  # torch repeats its warnings about the module in the run itself
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if dist.is_initialized():  # the parent's group of one process
            dist.destroy_process_group()
        _refuse_forked_gradients()
        with one_gloo_thread():
            dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)
        answer = json.dumps((True, function()))
        dist.barrier()  # connections must stay open until all ranks have finished
        code = 0
    except ForgeError as error:
        answer = json.dumps((False, str(error)))
    except BaseException:  # noqa: BLE001 (reported to the parent)
        answer = json.dumps((False, f"verify: the probe step failed on rank {rank}:\n{traceback.format_exc()}"))
    view = memoryview(answer.encode())
    while view:
        view = view[os.write(pipe, view) :]
    os._exit(code)


def _refuse_forked_gradients() -> None:
    """Raises `PlanError` if gradients cannot be computed in this child: builds of torch for GPUs start threads for the first
    gradients of a process, which a fork does not have."""
    try:
        torch.zeros(1, requires_grad=True).sum().backward()
    except RuntimeError as cause:
        if "fork" not in str(cause):
            raise
        raise PlanError(
            "verify has to fork processes, which is too late after this process has computed gradients, because this build of "
            "torch has threads for them; run it before the first backward, in a process of its own, or under torchrun"
        ) from cause


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def spawn_local(target: str, size: int, arguments: list[Any], timeout: float = 600.0) -> list[Any]:
    """Returns the results of `target` (`package.module:function`) on `size` ranks, in rank order.

    Raises:
        ForgeError: a rank raised or died, or `timeout` seconds passed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "arguments.json").write_text(json.dumps(arguments))
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "forge_parallel.launch.local_processes", target, str(folder), str(rank), str(size)],
                stdin=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(size)
        ]
        try:
            _wait(workers, folder, target, time.monotonic() + timeout)
            return [torch.load(folder / f"result-{rank}", weights_only=True) for rank in range(size)]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
                if worker.stdin is not None:
                    worker.stdin.close()


def _wait(workers: "list[subprocess.Popen[bytes]]", folder: Path, target: str, deadline: float) -> None:
    while any(worker.poll() is None for worker in workers):
        if any(worker.poll() not in (None, 0) for worker in workers):
            break
        if time.monotonic() > deadline:
            raise ForgeError(f"{target} on {len(workers)} processes did not finish in time; give it more time or less work")
        time.sleep(0.01)
    failed = [rank for rank, worker in enumerate(workers) if worker.poll() not in (None, 0)]
    if failed:
        time.sleep(0.2)  # the rank that failed first may write its error later
        stories = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
        story = stories[0].read_text() if stories else f"rank {failed[0]} exited with {workers[failed[0]].returncode}"
        raise ForgeError(f"{target} on {len(workers)} processes failed:\n{story}")


def _work(target: str, folder: Path, rank: int, size: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    code = 0
    try:
        with one_gloo_thread():
            dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
        module, _, function = target.partition(":")
        result = getattr(import_module(module), function)(*json.loads((folder / "arguments.json").read_text()))
        torch.save(result, folder / f"result-{rank}")
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 (reported to the parent)
        (folder / f"error-{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads may abort a normal exit


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    _work(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
