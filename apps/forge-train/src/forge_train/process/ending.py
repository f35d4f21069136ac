"""How a process ends after an exception: a code, a line for people, and a word to the other ranks and to the launcher."""

import json
import logging
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from forge_core.errors import ForgeError
from forge_core.redaction import redacted_text
from forge_parallel.launch.watch import PeerFailure, Watch, is_broken_connection
from forge_train.process.stop import Interrupted

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Names the file that torchrun shows in its summary; the exit code of torchrun itself is 1 for any failure."""

_forge_log = logging.getLogger("forge")


def conclude(error: BaseException, watch: Watch, say: Callable[[ForgeError], object]) -> int:
    """The exit code for `error`, after it told the other ranks and the launcher; `say` prints a refusal.

    A broken connection becomes the name of the rank behind it.

    Raises:
        BaseException: `error` itself, where it is not a failure but a way to end the process, such as SystemExit.
    """
    if not isinstance(error, (Exception, Interrupted)):
        raise error
    if is_broken_connection(error) and not isinstance(error, PeerFailure):
        _forge_log.info("%s", "".join(traceback.format_exception(error)))
        error = watch.explain(error)
    code = error.exit_code if isinstance(error, (ForgeError, Interrupted)) else 1
    line = str(error) if code != 1 else f"{type(error).__name__}: {error}"
    if isinstance(error, ForgeError):
        say(error)
    elif isinstance(error, Interrupted):
        _forge_log.warning("%s", line)
    else:
        _forge_log.critical("%s", "".join(traceback.format_exception(error)))
    watch.failed(redacted_text(line), code)
    tell_launcher(line, code, follows=isinstance(error, PeerFailure))
    return code


def tell_launcher(line: str, code: int, follows: bool = False) -> None:
    """Writes what torchrun shows as the cause; it takes the earliest, so one that follows from another is a second younger."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    text = f"forge-train ended with exit code {code}: {redacted_text(line)}"
    extra = {"py_callstack": text, "timestamp": str(int(time.time()) + follows)}
    try:
        with Path(path).open("w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)
    except OSError as cause:
        _forge_log.info("the launcher's error file %s cannot be written: %s", path, cause)
