"""Prints the source files that run code during one training step of `debug` on a CPU, without hooks.

python tests/repository/files_of_a_step.py
"""

import sys
import tempfile
from types import FrameType
from typing import Any

from forge_parallel.step.step import Step
from forge_train.cli import main

TRACED = (4, 5, 6)
"""Steps that are traced; what is prepared once has happened in earlier ones. The step with the fewest files counts, because some
work is due by the clock, such as reading the fence."""


def files_of_a_step() -> set[str]:
    """Paths from the folder `src` on."""
    by_step: list[set[str]] = [set()]
    steps = 0
    call: Any = Step.__call__

    def note(frame: FrameType, event: str, argument: object) -> None:
        _, found, name = frame.f_code.co_filename.partition("/src/forge_")
        if found:
            by_step[-1].add(f"forge_{name}")

    def counted(step: Step, *args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps - 1 in TRACED:
            by_step.append(set())
        sys.setprofile(note if steps in TRACED else None)
        return call(step, *args, **kwargs)

    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["forge-train", "run", "debug", f"--job.dir={folder}/run", f"--train.max_steps={TRACED[-1] + 2}", "--hooks=[]"]
        Step.__call__ = counted  # type: ignore[method-assign]
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.setprofile(None)
            Step.__call__ = call  # type: ignore[method-assign]
    return min(by_step[: len(TRACED)], key=len)


if __name__ == "__main__":
    found = sorted(files_of_a_step())
    print(f"{len(found)} files take part in one step:", *found, sep="\n")
