"""Encoders that do not do what they have to."""

import torch

from conformance.modules import One, infinite, noisy, unused
from conformance.part import Part
from forge_core.protocols.weights import StoredTensor


class Bad(One):
    blocks = ()


class Nowhere(One):
    blocks = ("layers.0",)


def made(work, kind=Bad, **options):
    return lambda: kind(work, 5, 16, **options)


def pixels(weight, x):
    """(N, 1, 4, 4) -> (N, 4, 5)."""
    return x.flatten(1)[:, None].repeat(1, 4, 1) @ weight.T


def of_all(weight, x):
    return pixels(weight, x + x.mean(0, keepdim=True))


def detached(weight, x):
    return pixels(weight.detach(), x.requires_grad_())


def with_infinite(weight, x):
    return infinite(weight, pixels(weight, x))


class Weights:
    """Of one tensor: what it says, what it reads, and what its boxes are."""

    def __init__(self, shape=(5, 16), read=(5, 16), box=0.0):
        self.tensors = {"weight": StoredTensor(shape, "float32")}
        self._read, self._box = read, box

    def read(self, names):
        return {name: torch.ones(self._read) for name in names}

    def box(self, name, offset, extent):
        return torch.full(tuple(extent), 1.0 + self._box)


SAYS = (("tokens", 4), ("width", 5), ("input_shape", (1, 4, 4)), ("channels", 1), ("mean", (0.0,)), ("std", (1.0,)))


def bad(work, **options):
    return Part(make=made(work, **options), says=SAYS)


def stored(**options):
    return Part(make=made(pixels), says=(*SAYS, ("weights", lambda: Weights(**options))))


BAD = {
    "check_specs": [
        (bad(pixels, specs={}), "leave out weight"),
        (bad(pixels, kind=Nowhere), "blocks names modules that do not exist: layers.0"),
    ],
    "check_features": [(Part(make=made(pixels), says=(("tokens", 3), *SAYS[1:])), "tokens and width mean")],
    "check_no_image": [
        (bad(lambda weight, x: pixels(weight, x)[:, :3]), r"an empty batch returns the shape \(0, 3, 5\)"),
        (bad(detached), "weight has no gradient for an empty batch"),
        (bad(with_infinite), "weight has a nonzero gradient"),
    ],
    "check_statistics": [
        (Part(make=made(pixels), says=(*SAYS[:4], ("mean", (0.0,)), ("std", ()))), r"\(1, 0\) numbers for 1 channels")
    ],
    "check_images": [(bad(of_all), "image 0 alone and with others")],
    "check_weights": [
        (stored(shape=(5, 15)), r"weights\(\) has"),
        (stored(read=(5, 17)), "reads other shapes"),
        (stored(box=1.0), "other values for a box of weight"),
    ],
    "check_deterministic": [(bad(noisy), "other outputs the second time")],
    "check_gradients": [
        (bad(unused), "weight gets no gradient"),
        (bad(infinite), "gradient of weight is not finite"),
    ],
}
