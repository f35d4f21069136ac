"""The factor on queries that grows with their position: against the function of transformers, in packed rows and with a cache."""

import pytest
import torch

from forge_models.blocks.rope import Rotary, Temperature
from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.generation import generate
from forge_models.shape import Rope


def model(**attention: float) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"dim": 16, "layers": 2, "heads": 2, "ffn_dim": 24, "vocab_size": 40, "max_length": 32}
    made = DecoderConfig(**sizes, attention=GQA(**attention)).build().double().eval()  # type: ignore[arg-type]
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0, 0.4)
    return made


@pytest.mark.parametrize(("strength", "length"), [(0.1, 16384), (0.7, 3), (2.0, 1)])
def test_the_factor_is_that_of_transformers(strength: float, length: int) -> None:
    from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

    positions = torch.tensor([[0, 1, 2, 3, 5, 16383, 16384, 100_000], [7, 0, 1, 2, 32768, 6, 9, 262143]])
    expected = get_llama_4_attn_scale(positions, strength, length)
    found = Rotary(8, Rope(), Temperature(strength, length))(positions).query_factor
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert Rotary(8, Rope())(positions).query_factor is None
    shifted = Rotary(8, Rope(), Temperature(strength, length, 1))(positions - 1).query_factor
    assert shifted is not None
    torch.testing.assert_close(shifted, expected, rtol=1e-6, atol=0)


@torch.no_grad()
def test_positions_count_within_a_packed_document() -> None:
    warm, plain = model(temperature=0.9, temperature_length=4), model()
    ids = torch.randint(0, 40, (1, 24), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0] * 10 + [1] * 14])
    positions = torch.cat((torch.arange(10), torch.arange(14)))[None]
    packed = warm(ids, documents=documents, positions=positions)
    torch.testing.assert_close(packed, torch.cat((warm(ids[:, :10]), warm(ids[:, 10:])), 1), rtol=0, atol=1e-12)
    torch.testing.assert_close(warm(ids)[:, :4], plain(ids)[:, :4], rtol=0, atol=0)  # the factor is 1 at the first positions
    assert not torch.allclose(warm(ids)[:, 4:], plain(ids)[:, 4:])


def test_a_cache_continues_the_positions() -> None:
    warm, prompts = model(temperature=0.9, temperature_length=2), [[3, 1, 4], [1, 5, 9, 2, 6]]
    for prompt, text in zip(prompts, generate(warm, prompts, max_tokens=12), strict=True):  # type: ignore[arg-type]
        whole = list(prompt)
        for _ in range(12):
            with torch.no_grad():
                whole.append(int(warm(torch.tensor([whole]))[0, -1].argmax()))
        assert text == whole[len(prompt) :]


def test_strength_and_length_need_each_other() -> None:
    for wrong in ({"temperature": 0.1}, {"temperature_length": 4}):
        with pytest.raises(ValueError, match="temperature and temperature_length need each other"):
            GQA(**wrong)
