"""Messages between a process and its saver over two pipes: a JSON object and byte strings. Needs no torch."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

Message = tuple[dict[str, Any], list[bytes]]


class Channel:
    """One end of it.

    Args:
        incoming, outgoing: file descriptors of pipes, which this owns from now on.
    """

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._incoming = os.fdopen(incoming, "rb")
        self._outgoing = os.fdopen(outgoing, "wb")

    def send(self, head: dict[str, Any], *payloads: bytes) -> None:
        """Sends one message.

        Raises:
            EOFError: the other end is gone.
        """
        line = json.dumps({"head": head, "sizes": [len(payload) for payload in payloads]}).encode()
        try:
            for part in (line, b"\n", *payloads):
                self._outgoing.write(part)
            self._outgoing.flush()
        except (BrokenPipeError, ValueError) as cause:
            raise EOFError("the other end of the channel is gone") from cause

    def receive(self) -> Message:
        """Waits for one message.

        Raises:
            EOFError: the other end is gone.
        """
        line = self._incoming.readline()
        if not line.endswith(b"\n"):
            raise EOFError("the other end of the channel is gone")
        message = json.loads(line)
        return message["head"], self._payloads(message["sizes"])

    def close(self) -> None:
        """The other end learns that no more comes."""
        for end in (self._outgoing, self._incoming):
            with suppress(BrokenPipeError):  # what was never read
                end.close()

    def _payloads(self, sizes: Sequence[int]) -> list[bytes]:
        found = [self._incoming.read(size) for size in sizes]
        if [len(payload) for payload in found] != list(sizes):
            raise EOFError("the other end of the channel is gone")
        return found
