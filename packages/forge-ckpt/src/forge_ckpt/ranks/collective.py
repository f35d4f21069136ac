"""Agreement of ranks: one result or one error, the same on all of them.

A rank that raises before a collective leaves the others waiting in it. So the outcome of every rank is sent, and an error
is raised on all of them.
"""

import json
from collections.abc import Callable
from typing import Any

from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import World


def from_rank_0(world: World, compute: Callable[[], Any], describe: Callable[[Exception], str] | None = None) -> Any:
    """Collective: what `compute` gives on rank 0 (JSON), on every rank.

    Raises:
        CheckpointError: on every rank, when it raised on rank 0.
    """
    reply: dict[str, Any] | None = None
    if world.rank == 0:
        try:
            reply = {"value": compute()}
        except Exception as cause:  # noqa: BLE001 (stores are plugins and may raise anything; every rank must learn of it)
            reply = {"error": (describe or describe_error)(cause)}
    found = json.loads(world.broadcast(json.dumps(reply).encode() if reply is not None else None))
    if "error" in found:
        raise CheckpointError(found["error"])
    return found["value"]


def describe_error(cause: Exception) -> str:
    """An error as one line for people; Forge's errors need no type name."""
    return str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"
