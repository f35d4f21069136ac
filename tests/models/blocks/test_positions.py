"""Learned positions: rows of a table, by the position of a token in its document."""

from dataclasses import replace

import pytest
import torch

from forge_models.blocks.positions import LearnedPositions
from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.decoder import Decoder
from forge_models.flops import count_flops
from forge_models.generation import generate

SMALL = DecoderConfig(
    dim=16, layers=2, heads=2, ffn_dim=24, vocab_size=40, max_length=12, learned_positions=True, attention=GQA(nope_every=1)
)


def filled(component: DecoderConfig = SMALL) -> Decoder:
    torch.manual_seed(0)
    model = component.build().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_row_of_each_position_is_added_and_gets_the_gradient(dtype: torch.dtype) -> None:
    module = LearnedPositions(5, 3, 0.02).to(dtype)
    with torch.no_grad():
        module.weight.copy_(torch.arange(15.0).view(5, 3))
    x, positions = torch.ones(2, 4, 3, dtype=dtype), torch.tensor([[0, 1, 0, 1], [4, 3, 0, 0]])
    out = module(x, positions)
    assert torch.equal(out, 1 + torch.arange(15.0).view(5, 3)[positions].to(dtype))
    out.sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.tolist() == [[4.0] * 3, [2.0] * 3, [0.0] * 3, [1.0] * 3, [1.0] * 3]


def test_positions_begin_anew_in_each_packed_document() -> None:
    model = filled()
    ids = torch.randint(0, 40, (1, 11), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]])
    with torch.no_grad():
        packed = model(ids, positions=positions, documents=torch.tensor([[0] * 4 + [1] * 7]))
        parts = [model(ids[:, :4]), model(ids[:, 4:])]
        assert torch.allclose(packed, torch.cat(parts, 1), rtol=0, atol=1e-12)
        running = model(ids, documents=torch.tensor([[0] * 4 + [1] * 7]), positions=torch.arange(11)[None])
    assert not torch.allclose(running[:, 4:], parts[1])


def test_a_cache_continues_the_positions_of_prompts_of_unequal_length() -> None:
    model, prompts = filled(), [[3, 1, 4], [1, 5, 9, 2, 6]]
    found = generate(model, prompts, max_tokens=6)
    for prompt, text in zip(prompts, found, strict=True):
        whole = list(prompt)
        for _ in range(6):
            with torch.no_grad():
                whole.append(int(model(torch.tensor([whole]))[0, -1].argmax()))
        assert text == whole[len(prompt) :]


def test_the_table_counts_as_an_embedding_that_multiplies_nothing() -> None:
    learned, plain = count_flops(SMALL.shape), count_flops(replace(SMALL, learned_positions=False).shape)
    assert learned.embedding - plain.embedding == learned.parameters - plain.parameters == 12 * 16
    assert learned.matrix == plain.matrix
    assert SMALL.shape.elements - replace(SMALL, learned_positions=False).shape.elements == 12 * 16


def test_a_pipeline_keeps_the_table_on_its_first_stage() -> None:
    with torch.device("meta"):
        specs = SMALL.build().specs()
    assert specs.entry == ("embed", "positions")
    assert specs.tensors["positions.weight"].group == "embedding"
