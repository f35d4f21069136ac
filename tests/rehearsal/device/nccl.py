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

    class ProcessGroupNCCL(device.Collectives):
        """Collectives of gloo on the memory of the devices."""

        def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
            super().__init__(dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout))

        uid = 0

    ProcessGroupNCCL.Options = Options  # type: ignore[attr-defined]
    # Names of torch's module that an `import` there sets, where torch is built with NCCL.
    vars(distributed_c10d).update(ProcessGroupNCCL=ProcessGroupNCCL, _NCCL_AVAILABLE=True)
    vars(dist).update(ProcessGroupNCCL=ProcessGroupNCCL)
