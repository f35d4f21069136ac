"""What the trials share: a flipped bit, an object that runs code when it is unpickled, and a small model."""

import os
from pathlib import Path

import torch
from torch import nn


class Trap:
    """Creates a directory when it is unpickled."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.directory),)


def flip_bit(folder: Path, like: bytes) -> Path:
    """Flips the lowest bit of the first number `like`, found in the files below `folder`; returns the file."""
    for path in sorted(folder.rglob("*")):
        data = bytearray(path.read_bytes()) if path.is_file() and not path.is_symlink() else bytearray()
        if (place := data.find(like)) >= 0:
            data[place] ^= 1
            path.write_bytes(data)
            return path
    raise AssertionError("the weights are in none of the files")


def bytes_of(weight: torch.Tensor) -> bytes:
    """Returns the first 16 bytes of a weight as they are stored."""
    return weight.detach().contiguous().view(torch.uint8).flatten()[:16].numpy().tobytes()


def moved(before: dict[str, torch.Tensor], model: nn.Module) -> float:
    """Returns the share of numbers of all matrices that differ from `before`."""
    pairs = [(before[name], value.detach()) for name, value in model.state_dict().items() if value.ndim == 2]
    return float(sum((a != b.to(a.dtype)).sum() for a, b in pairs)) / sum(a.numel() for a, _ in pairs)


def tiny() -> nn.Module:
    """Returns two linear layers with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
