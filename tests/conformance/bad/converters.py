"""Converters that lose bits, tensors or what lay in their way."""

import pickle

import torch

from conformance.part import Part
from forge_core.errors import ForgeError
from forge_core.protocols.weights import StoredTensor
from forge_models.components.decoder import DecoderConfig
from forge_testing.modules import InMemory


class Whole:
    """Right: one file, published by a rename."""

    def write(self, path, weights):
        if path.exists():
            raise ForgeError(f"{path} is taken")
        beside = path.with_name(path.name + ".part")
        beside.write_bytes(self.content(weights))
        beside.rename(path)

    def content(self, weights):
        return pickle.dumps((weights.model, weights.facts, weights.read(list(weights.tensors))))

    def read(self, path):
        if not path.is_file():
            raise ForgeError(f"{path} holds no model")
        found = InMemory.__new__(InMemory)
        found.model, found.facts, found._tensors = pickle.loads(path.read_bytes())  # noqa: S301 (what this test wrote)
        found.tensors = {
            name: StoredTensor(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in found._tensors.items()
        }
        return found


class Rounds(Whole):
    def content(self, weights):
        tensors = weights.read(list(weights.tensors))
        return pickle.dumps((weights.model, weights.facts, {name: x.bfloat16().float() for name, x in tensors.items()}))


class Loses(Whole):
    """Norms are small."""

    def content(self, weights):
        tensors = weights.read([name for name in weights.tensors if "norm" not in name])
        return pickle.dumps((weights.model, weights.facts, tensors))


class Misnames(Whole):
    """Says another dtype than it gives."""

    def read(self, path):
        found = super().read(path)
        found.tensors = {name: StoredTensor(stored.shape, "bfloat16") for name, stored in found.tensors.items()}
        return found


class Transposes(Whole):
    def read(self, path):
        found = super().read(path)
        found._tensors = {name: x.mT if x.dim() == 2 and len(x) == len(x.T) else x for name, x in found._tensors.items()}
        return found


class Plain(Whole):
    """Forgets what the model computes apart from its tensors."""

    def content(self, weights):
        model = DecoderConfig(dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=24, vocab_size=32, max_length=64, soft_cap=1.0)
        return pickle.dumps((model, weights.facts, weights.read(list(weights.tensors))))


class FromZero(Whole):
    """Boxes that all begin at the first element."""

    def read(self, path):
        found = super().read(path)
        whole = found.box
        found.box = lambda name, offset, extent: whole(name, [0] * len(offset), extent)
        return found


class Overwrites(Whole):
    def write(self, path, weights):
        (path / "model").write_bytes(self.content(weights))


class Clears(Whole):
    """Refuses, when the harm is done."""

    def write(self, path, weights):
        if path.exists():
            for file in path.iterdir():
                file.unlink()
            raise ForgeError(f"{path} is taken")
        super().write(path, weights)


class Swallows(Whole):
    def write(self, path, weights):
        try:
            super().write(path, weights)
        except Exception:
            path.write_bytes(b"")


class InPlace(Whole):
    """Half a model is a model."""

    def write(self, path, weights):
        for name in weights.tensors:
            made = {} if not path.exists() else torch.load(path)
            torch.save(made | weights.read([name]), path)

    def read(self, path):
        return torch.load(path)


class Blocks(Whole):
    """What is left of the first try refuses the second."""

    def write(self, path, weights):
        lock = path.with_name("lock")
        if lock.exists():
            raise AssertionError(f"{lock} is there")
        lock.touch()
        super().write(path, weights)


class Trusts(Whole):
    """An empty place is an empty model."""

    def read(self, path):
        return None


BAD = {
    "check_round_trip": [
        (Part(make=Rounds), "is not what was written"),
        (Part(make=Loses), "on one side only"),
        (Part(make=Misnames), "not of the dtype"),
        (Part(make=Transposes), "is not what was written"),
        (Part(make=Plain), "computes something else"),
    ],
    "check_boxes": [(Part(make=FromZero), "is another part of it")],
    "check_taken": [(Part(make=Overwrites), "writes where something is"), (Part(make=Clears), "but changes it")],
    "check_interrupted": [
        (Part(make=Swallows), "does not reach the caller"),
        (Part(make=InPlace), "reads what an interrupted write left"),
        (Part(make=Blocks), "is there"),
    ],
    "check_foreign": [(Part(make=Trusts), "without an error")],
}
