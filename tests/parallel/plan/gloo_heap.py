"""A program of torch alone that dies of a broken heap: functional all-gathers, several of one group of gloo on their way at once.

The two threads of a group each assign the name of what they have finished to one `std::string`, without a lock
(`ProcessGroupGloo::runLoop`). "ALLGATHER_COALESCED" is longer than the 15 letters that such a string holds inside itself.
"""

import os
import tempfile

import torch
import torch.distributed as dist

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
    gather, wait = torch.ops._c10d_functional.all_gather_into_tensor, torch.ops._c10d_functional.wait_tensor
    name, x = dist.distributed_c10d._get_default_group().group_name, torch.ones(4)
    for _ in range(int(os.environ.get("ROUNDS", "10000"))):
        for y in [gather(x, 1, name) for _ in range(8)]:
            wait(y)
    dist.destroy_process_group()
print("alive")
