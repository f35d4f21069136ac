"""The private name of torch that a run uses is there, and is the store that ranks met at."""

import torch.distributed as dist

from forge_train.torch_private import default_store


def test_the_store_of_the_group_is_the_one_that_was_given() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        default_store().set("key", "value")
        # The group's store is a view of the one given, below a prefix of the group's.
        assert default_store().get("key") == b"value"
        assert store.num_keys() >= 1
    finally:
        dist.destroy_process_group()
