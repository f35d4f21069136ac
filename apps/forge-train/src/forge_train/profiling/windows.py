"""Where profiles lie: `profiles/step-N/rank-K.json.gz` of a run's directory, with N the first step of the window. No torch."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from forge_core.errors import ForgeError
from forge_train.profiling.trace import Trace, read

PROFILES = "profiles"

_WINDOW = re.compile(r"step-(\d+)")
_RANK = re.compile(r"rank-(\d+)\.json(\.gz)?")


def folder_of(directory: Path, step: int) -> Path:
    """Of the window that begins with this step."""
    return directory / PROFILES / f"step-{step}"


def trace_of(folder: Path, rank: int) -> Path:
    """The trace of a rank."""
    return folder / f"rank-{rank}.json.gz"


def snapshot_of(folder: Path, rank: int) -> Path:
    """What the allocator of a rank's device did, for pytorch.org/memory_viz."""
    return folder / f"rank-{rank}.memory.pickle"


def windows(directory: Path) -> dict[int, Path]:
    """Every window of a run by its first step, in order."""
    place = directory / PROFILES
    found = place.iterdir() if place.is_dir() else ()
    named = {int(match[1]): path for path in found if (match := _WINDOW.fullmatch(path.name)) and path.is_dir()}
    return dict(sorted(named.items()))


def forget_old(directory: Path, keep: int) -> None:
    """Removes all windows but those written last; one that is just written counts.

    Raises:
        OSError: one cannot be removed.
    """
    written = sorted(windows(directory).values(), key=lambda folder: folder.stat().st_mtime_ns)
    for folder in written[: max(0, len(written) - keep)]:
        shutil.rmtree(folder)


def chosen(path: Path, step: int | None) -> dict[int, Path]:
    """The traces of one window by rank. `path` is a run's directory, a window's folder, or a trace.

    Args:
        step: of a run's windows; None takes the newest.

    Raises:
        ForgeError: there are none, or not this one.
    """
    if path.is_file():
        return {0: path}
    if not path.is_dir():
        raise ForgeError(f"{path} does not exist; give a run's directory, such as runs/demo, a folder with traces, or a trace")
    here = _traces(path)
    if here and step is None:
        return here
    found = windows(path)
    if not found:
        hint = 'add [[hooks]] name = "profile" with at = [STEP] to its recipe'
        raise ForgeError(f"{path} has no profiles; {hint}, or give a trace of torch.profiler")
    if step is not None and step not in found:
        raise ForgeError(f"--step {step}: {path} has profiles of the steps {', '.join(map(str, found))}")
    folder = max(found.values(), key=lambda folder: folder.stat().st_mtime_ns) if step is None else found[step]
    traces = _traces(folder)
    if not traces:
        raise ForgeError(f"{folder} has no complete trace; was the run stopped while it wrote one?")
    return traces


def traces_of(paths: Mapping[int, Path]) -> dict[int, Trace]:
    """The traces themselves, of one start of one run.

    Raises:
        ForgeError: one cannot be read, or they are of several windows: a start on another number of ranks has left some.
    """
    found = {rank: read(path) for rank, path in paths.items()}
    worlds = {trace.about.get("world") for trace in found.values()}
    if len(worlds) > 1:
        raise ForgeError(
            f"the traces of {next(iter(paths.values())).parent} are of runs on {', '.join(map(str, worlds))} ranks; "
            "remove the older ones, or give one trace"
        )
    return found


def _traces(folder: Path) -> dict[int, Path]:
    named = {int(match[1]): path for path in folder.iterdir() if (match := _RANK.fullmatch(path.name))}
    return dict(sorted(named.items()))
