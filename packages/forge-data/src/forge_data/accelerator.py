"""Detects the accelerator that receives batches: the only module of this package that queries torch for one."""


def is_used() -> bool:
    """Whether batches will be copied to an accelerator; page-locked memory then allows asynchronous copies."""
    import torch

    here = torch.accelerator.current_accelerator()
    if here is None or not torch.accelerator.is_available():
        return False
    begun = getattr(torch.get_device_module(here), "is_initialized", None)  # absent on Macs, where the GPU shares host memory
    return begun is not None and begun()
