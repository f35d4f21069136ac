"""Names of torch that its documentation does not promise to keep: each here once, with the reason. Tests call all of them."""

from typing import Any


def default_store() -> Any:
    """The store of the default process group, where ranks find each other before and beyond collectives."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
