"""Faults of a network or a server that pass by themselves, and how often an action is repeated for one."""

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from forge_core.errors import CheckpointError
from forge_core.redaction import redacted_text

ATTEMPTS = 3
"""In addition to what a file system repeats by itself: s3fs and the library below it do so several times."""

_PASSING = {
    *(errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ESTALE, errno.EPIPE, None),
    *(errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EHOSTUNREACH, errno.ENETUNREACH),
    *([errno.EREMOTEIO] if hasattr(errno, "EREMOTEIO") else []),  # s3fs, where a server had an internal error
}
_LASTING = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, CheckpointError)
_NETWORK = {
    "HTTPClientError",
    "ConnectionError",
    "ClientConnectionError",
    "ClientPayloadError",
    "ServiceRequestError",
    "HttpError",
}
"""Names of the exceptions that file systems let through from the libraries below them; none is an `OSError`."""

T = TypeVar("T")


def may_pass(cause: Exception) -> bool:
    """Whether the same action may succeed in a moment."""
    if isinstance(cause, _LASTING):
        return False
    if isinstance(cause, OSError):
        return cause.errno in _PASSING
    return any(kind.__name__ in _NETWORK for kind in type(cause).__mro__)


def repeated(action: Callable[[], T], attempts: int, pause: float, note: Callable[[], None], where: str) -> T:
    """What an action gives once it succeeds.

    Args:
        pause: seconds before the first repetition; doubles each time.
        note: called before each repetition.
        where: the URL, for messages.

    Raises:
        OSError: the last attempt's.
        CheckpointError: the last attempt's, or what another exception of it says.
    """
    for attempt in range(attempts):
        try:
            return action()
        except Exception as cause:
            if may_pass(cause) and attempt < attempts - 1:
                note()
                time.sleep(pause * 2**attempt)
            elif isinstance(cause, OSError | CheckpointError):
                raise
            else:
                raise CheckpointError(f"{where}: {type(cause).__name__}: {redacted_text(str(cause))}") from cause
    raise AssertionError("the last attempt returns or raises")
