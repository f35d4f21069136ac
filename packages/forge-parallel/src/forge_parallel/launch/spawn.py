"""Runs a function on several local processes with a gloo group, for comparisons on one machine.

Arguments are JSON and results are what `torch.load(weights_only=True)` accepts, so nothing is ever unpickled. Workers end
with their parent, and when one fails the others are ended and its traceback is what the caller sees.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forge_core.errors import ForgeError
from forge_parallel.torch_private import one_gloo_thread


def spawn_local(target: str, size: int, arguments: list[Any], timeout: float = 600.0) -> list[Any]:
    """Results of `target` (`package.module:function`) on `size` ranks, in rank order.

    Raises:
        ForgeError: a rank raised, died, or `timeout` seconds passed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "arguments.json").write_text(json.dumps(arguments))
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "forge_parallel.launch.spawn", target, str(folder), str(rank), str(size)],
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
            raise ForgeError(f"{target} on {len(workers)} processes did not finish in time")
        time.sleep(0.01)
    failed = [rank for rank, worker in enumerate(workers) if worker.poll() not in (None, 0)]
    if failed:
        time.sleep(0.2)  # the first cause may belong to a rank that reports a moment later
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
    os._exit(code)  # gloo's threads may abort an ordinary exit


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    _work(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
