"""One rank: waits for calls, runs each in a clean default process group, and leaves nothing behind for the next."""

import builtins
import contextlib
import datetime
import faulthandler
import gc
import importlib.util
import os
import pickle
import random
import reprlib
import signal
import sys
import time
import tomllib
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from harness import wire

DUMP = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
"""Writes the stacks of all threads to the worker's file; a signal that no code under test uses."""


def serve(path: str, files: Path) -> NoReturn:
    """Takes calls until the pool closes the connection. Prints go to `files`.out, stacks to `files`.stack."""
    output = files.with_suffix(".out").open("wb", buffering=0)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 the process's own
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    stacks = files.with_suffix(".stack").open("w")
    faulthandler.enable(stacks)
    faulthandler.register(DUMP, stacks, all_threads=True)
    connection = wire.connect(path)
    wire.send(connection, os.getpid())
    before = dict(os.environ), tuple(sys.path), Path.cwd()
    try:
        while True:
            call = wire.receive(connection)
            os.ftruncate(1, 0)
            os.lseek(1, 0, os.SEEK_SET)
            wire.send(connection, _answer(call))
            sys.stdout.flush()
            sys.stderr.flush()
            wire.receive(connection)  # all ranks returned: only now may connections between them go away
            _clean(*before)
            wire.send(connection, "clean")
    except (EOFError, OSError):
        os._exit(0)


def _answer(call: wire.Call) -> wire.Answer:
    try:
        with warnings.catch_warnings():
            function = _prepare(call)
            args, kwargs = pickle.loads(call.arguments)
            with _strict():
                result = function(*args, **kwargs)
        return wire.Answer(pickle.dumps(result))
    except BaseException as error:  # SystemExit and torch's CheckpointException end a rank as much as an Exception
        return wire.Answer(
            error="".join(traceback.format_exception_only(error)).strip(),
            traceback="".join(traceback.format_exception(error)) + _locals(error.__traceback__, call.file),
            when=time.monotonic(),
        )


def _prepare(call: wire.Call) -> Callable[..., Any]:
    import torch
    import torch.distributed as dist

    os.environ |= {
        "RANK": str(call.rank),
        "LOCAL_RANK": str(call.rank),
        "WORLD_SIZE": str(call.size),
        "LOCAL_WORLD_SIZE": str(call.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(call.port),
    }
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.path[:] = call.sys_path
    for stacks in (False, True):  # anew in each call: one before may have taken the signal that torch needs for it
        torch._C._set_print_stack_traces_on_fatal_signal(stacks)
    torch.set_num_threads(int(os.environ.get("FORGE_TEST_THREADS", "1")))
    torch.manual_seed(0)
    random.seed(0)
    if call.group:
        with _one_gloo_thread():
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(call.store, call.size),
                rank=call.rank,
                world_size=call.size,
                timeout=datetime.timedelta(seconds=call.timeout),
            )
    found: Any = _module(call.module, call.file)
    for name in call.function.split("."):
        found = getattr(found, name)
    return found


def _one_gloo_thread() -> contextlib.AbstractContextManager[None]:
    """As Forge opens groups of gloo, where its package for them is installed (docs/adr/0036)."""
    try:
        from forge_parallel.torch_private import one_gloo_thread
    except ImportError:
        return contextlib.nullcontext()
    return one_gloo_thread()


@contextlib.contextmanager
def _strict() -> Iterator[None]:
    """Warnings are errors, as in the test process, but for those that its settings name."""
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    with warnings.catch_warnings():
        for line in settings["filterwarnings"]:
            action, _, named = line.partition(":")
            message, _, category = named.rpartition(":")
            warnings.filterwarnings(action, message, getattr(builtins, category or "Warning"))
        yield


_stamps: dict[str, int] = {}


def _module(name: str, file: str) -> ModuleType:
    """The test module by path under pytest's name for it; again when the file changed."""
    stamp = Path(file).stat().st_mtime_ns
    if name in sys.modules and _stamps.get(name, stamp) == stamp:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _stamps[name] = stamp
    return module


def _locals(trace: TracebackType | None, file: str) -> str:
    """Values in the innermost frame of the test file: what pytest would show of a failed assertion."""
    frame = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            frame = trace.tb_frame
        trace = trace.tb_next
    if frame is None:
        return ""
    short = reprlib.Repr()
    short.maxstring, short.maxother = 200, 300
    lines = []
    for name, value in frame.f_locals.items():
        try:
            lines.append(f"    {name} = {short.repr(value)}\n")
        except Exception as error:  # the repr of a half-made object may raise anything
            lines.append(f"    {name} = <{type(error).__name__} in repr>\n")
    return f"  values in {frame.f_code.co_name}:\n{''.join(lines)}" if lines else ""


_modules_frozen = 0
"""Number of imported modules when objects were last frozen."""


def _clean(environment: dict[str, str], path: tuple[str, ...], directory: Path) -> None:
    """Takes the process back to what the next call may expect."""
    global _modules_frozen
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    if dist.is_initialized():
        dist.destroy_process_group()
    # DTensor's caches hold meshes, and meshes hold names of groups that are gone or, worse, mean other ranks next time.
    _clear_sharding_prop_cache()
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    os.chdir(directory)
    gc.collect()
    if len(sys.modules) > _modules_frozen:
        gc.freeze()  # modules stay: the next collection does not look at what the call has imported
        _modules_frozen = len(sys.modules)
