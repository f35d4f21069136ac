"""The process group backend `nccl` of these devices: gloo on the same memory."""

from datetime import timedelta
from typing import Any


class Options:
    """What `init_process_group` sets of NCCL's options."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self._timeout = timedelta(minutes=10)


def install(device: Any) -> None:
    """Puts the class where a build with NCCL has its own."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    # No subclass in Python: torch keeps the object of C++, and a later look at it would find that without the class.
    backend = device.Collectives
    backend.Options, backend.uid = Options, 0
    # Names of torch's module that an `import` there sets, where torch is built with NCCL.
    vars(distributed_c10d).update(ProcessGroupNCCL=backend, _NCCL_AVAILABLE=True)
    vars(dist).update(ProcessGroupNCCL=backend)
