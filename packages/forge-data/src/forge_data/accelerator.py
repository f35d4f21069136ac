"""Whether batches go to an accelerator: the only module of this package that asks torch for one."""


def is_used() -> bool:
    """Whether batches will be copied to an accelerator: then page-locked memory makes the copy asynchronous."""
    import torch

    here = torch.accelerator.current_accelerator()
    if here is None or not torch.accelerator.is_available():
        return False
    begun = getattr(torch.get_device_module(here), "is_initialized", None)  # that of a Mac does not say, and shares the memory
    return begun is not None and begun()
