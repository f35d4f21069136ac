"""Models of the Hugging Face format that lose bits, compute something else, or take what is not theirs."""

from dataclasses import replace

import torch

from conformance.part import Part
from forge_core.protocols.weights import NO_EXTRAS
from forge_models.components.layers import RMSNormConfig
from forge_models.hf.streamed_forward import logits_of
from forge_vlm.hf.auto import AutoModelFormat


class Rounds(AutoModelFormat):
    def read(self, path, ignore=()):
        found = super().read(path, ignore)
        whole = found.read
        found.read = lambda names: {name: tensor.bfloat16().float() for name, tensor in whole(names).items()}
        return found


class Loses(AutoModelFormat):
    """Norms are small."""

    def read(self, path, ignore=()):
        found = super().read(path, ignore)
        found.tensors = {name: entry for name, entry in found.tensors.items() if "norm" not in name}
        return found


class Shifts(AutoModelFormat):
    def read(self, path, ignore=()):
        found = super().read(path, ignore)
        found.model = replace(found.model, norm=RMSNormConfig(eps=0.1))
        return found


class Blind(AutoModelFormat):
    """What it compares with never saw the images."""

    def reference(self, path, tokens, extras=NO_EXTRAS):
        images = torch.zeros_like(extras["images"])
        return logits_of(self.read(path), tokens, extras={**extras, "images": images})


class Shy(AutoModelFormat):
    def misfits(self, weights):
        return ["nothing fits"]


class Greedy(AutoModelFormat):
    def misfits(self, weights):
        return []


class Gullible(AutoModelFormat):
    def read(self, path, ignore=()):
        return None if not (path / "config.json").exists() else super().read(path, ignore)


BAD = {
    "check_holds": [
        (Part(make=Rounds), "differs from the written tensor"),
        (Part(make=Loses), "are missing on one side"),
        (Part(make=Shifts), "has other logits"),
        (Part(make=Shy), "misfits rejects its own example: nothing fits"),
    ],
    "check_reference": [(Part(make=Blind), "the reference differs by")],
    "check_refuses": [(Part(make=Greedy), "accepts a text decoder")],
    "check_foreign": [(Part(make=Gullible), "reads 'missing', which contains no model")],
}
