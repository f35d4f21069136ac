"""Small decoders with drawn weights, for every test of forge-models."""

import os
from collections.abc import Callable

import pytest
import torch

from forge_core.specs import Specs
from forge_models.components.decoder import DecoderConfig
from forge_models.decoder import Decoder

os.environ.setdefault("HF_HUB_OFFLINE", "1")

TINY = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "vocab_size": 97, "max_length": 64}


def fill(model: torch.nn.Module, specs: Specs, seed: int) -> None:
    """Draws every parameter and buffer from its spec. The trainer has its own road; this one needs no other package."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, spec in specs.tensors.items():
            match spec.init.kind:
                case "normal":
                    parameters[name].normal_(0.0, spec.init.std, generator=generator)
                case "uniform" | "log" | "softplus" | "choices":
                    parameters[name].copy_(spec.init.of(2 * torch.rand(parameters[name].shape, generator=generator) - 1))
                case "ones":
                    parameters[name].fill_(1.0)
                case "zeros":
                    parameters[name].zero_()


@pytest.fixture
def make() -> Callable[..., Decoder]:
    """make(**fields) -> a decoder on the CPU, weights drawn; `spread` scales them so that mistakes show in the logits."""

    def make(seed: int = 0, dtype: torch.dtype = torch.float32, spread: float = 1.0, **fields: object) -> Decoder:
        config = DecoderConfig(**(TINY | fields))  # type: ignore[arg-type]
        model = config.build()
        fill(model, model.specs(), seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(spread if parameter.dim() > 1 else 1.0)
        return model.to(dtype)

    return make


@pytest.fixture
def tokens() -> Callable[..., torch.Tensor]:
    """tokens(rows, length, vocab=97, seed=1) -> random token ids."""

    def tokens(rows: int, length: int, vocab: int = 97, seed: int = 1) -> torch.Tensor:
        return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))

    return tokens
