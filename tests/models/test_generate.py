"""Cached generation against the uncached model, and sampling against closed forms."""

import math

import pytest
import torch

from forge_models.generate import GenerationError, generate, stream
from forge_models.sampling import Sampler

PROMPTS = [[5, 17, 3, 60, 8, 9, 41], [90], [2, 2, 31, 7]]


def uncached(model, prompt, count):
    """Greedy continuation by running the whole sequence again for every token."""
    row = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
    return row[len(prompt) :]


@pytest.mark.parametrize("chunks", [(12,), (5, 7), (1,) * 12, (11, 1), (3, 4, 5)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_any_chunking_gives_the_logits_of_the_whole(make, tokens, chunks, kv_heads):
    model, rows = make(spread=10.0, kv_heads=kv_heads), tokens(2, 12)
    cache = model.new_cache(2, 20)
    parts = [model(part, cache=cache) for part in rows.split(list(chunks), dim=1)]
    assert cache.layers["0"].k.shape == (2, kv_heads, 20, 8)
    torch.testing.assert_close(torch.cat(parts, 1), model(rows), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prefill", [None, 1, 2, 3, 7])
def test_greedy_rows_of_unequal_length_equal_each_row_alone(make, prefill):
    model = make(spread=10.0)
    expected = [uncached(model, prompt, 20) for prompt in PROMPTS]
    assert len({tuple(row) for row in expected}) == 3  # the rows do not all fall into one loop
    assert generate(model, PROMPTS, max_tokens=20, prefill=prefill) == expected


def test_a_full_cache_refuses(make, tokens):
    model = make()
    cache = model.new_cache(1, 4)
    model(tokens(1, 3), cache=cache)
    with pytest.raises(ValueError, match=r"holds 4 tokens a row; 3 \+ 2"):
        model(tokens(1, 2), cache=cache)


def test_the_cache_takes_the_precision_in_which_the_model_computes(make):
    """Masters in fp32, cast at every access, as mixed precision does."""

    class Cast(torch.nn.Module):
        def forward(self, weight):
            return weight.bfloat16()

    model, twin = make(spread=10.0), make(spread=10.0, dtype=torch.bfloat16)
    for module in model.modules():
        if "weight" in module._parameters:
            torch.nn.utils.parametrize.register_parametrization(module, "weight", Cast(), unsafe=True)
    assert generate(model, PROMPTS, max_tokens=8) == generate(twin, PROMPTS, max_tokens=8)


def test_a_core_without_cache_support_refuses(make, tokens):
    model = make()
    model.blocks["0"].attention.core = object()
    with pytest.raises(ValueError, match="cannot use a cache"):
        model(tokens(1, 2), cache=model.new_cache(1, 4))


def test_rows_stop_at_their_own_end(make):
    model = make(spread=10.0)
    free = generate(model, PROMPTS, max_tokens=12)
    eos = free[0][3]
    expected = [row[: row.index(eos) + 1] if eos in row else row for row in free]
    heard = []
    stopped = generate(model, PROMPTS, max_tokens=12, eos=eos, on_token=lambda row, token: heard.append((row, token)))
    assert stopped == expected
    assert len(expected[0]) < 12
    assert [[token for row, token in heard if row == number] for number in range(3)] == expected
    every_token = range(97)
    assert [len(row) for row in generate(model, PROMPTS, max_tokens=12, eos=every_token)] == [1, 1, 1]


def test_stream_yields_step_by_step_and_leaves_the_mode_alone(make):
    model = make(spread=10.0)
    model.blocks["0"].eval()  # mixed modes stay mixed
    modes = [module.training for module in model.modules()]
    steps = stream(model, PROMPTS, max_tokens=5)
    first = next(steps)
    assert first == [row[0] for row in generate(model, PROMPTS, max_tokens=1)]
    assert [module.training for module in model.modules()] == modes
    steps.close()
    assert torch.is_grad_enabled()
    model.head.core = model.blocks["1"].attention.core = None
    with pytest.raises(TypeError, match="NoneType"):
        generate(model, PROMPTS, max_tokens=2)
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "no prompt"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[97]]}, "token 97; the vocabulary has 97"),
        ({"prompts": [[-1]]}, "token -1"),
        ({"max_tokens": 60}, "at most 57 new tokens"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"temperature": 1.0, "top_k": 0}, "top_k 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p 0.0"),
        ({"prefill": 0}, "prefill 0"),
    ],
)
def test_bad_requests_are_refused_at_the_call(make, arguments, message):
    with pytest.raises(GenerationError, match=message):
        stream(make(), **({"prompts": PROMPTS, "max_tokens": 3} | arguments))


def test_a_seed_fixes_the_draws_of_a_row_whatever_the_others_hold(make):
    model = make()
    settings = {"max_tokens": 8, "temperature": 1.0}
    first = generate(model, PROMPTS, seed=3, **settings)
    assert generate(model, PROMPTS, seed=3, **settings) == first
    assert generate(model, PROMPTS, seed=4, **settings) != first
    other = generate(model, [PROMPTS[0], [1, 2, 3], [4]], seed=3, **settings)
    assert other[0] == first[0]


LOGITS = torch.tensor([0.0, 1.0, 2.0, -1.0, 1.5])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "kept"),
    [
        (1.0, None, None, [0, 1, 2, 3, 4]),
        (0.5, None, None, [0, 1, 2, 3, 4]),
        (1.0, 3, None, [1, 2, 4]),
        (1.0, 99, None, [0, 1, 2, 3, 4]),
        (1.0, None, 0.7, [2, 4]),  # probabilities 0.47, 0.28, 0.17, 0.06, 0.02
        (1.0, None, 0.76, [1, 2, 4]),
        (1.0, None, 0.01, [2]),
        (1.0, 2, 0.65, [2, 4]),  # of the first two alone the best holds 0.62
        (1.0, 2, 0.6, [2]),
        (1.0, None, 1.0, [0, 1, 2, 3, 4]),
    ],
)
def test_draws_follow_the_distribution(temperature, top_k, top_p, kept):
    weights = torch.zeros(5, dtype=torch.float64)
    weights[kept] = (LOGITS[kept].double() / temperature).exp()
    expected = weights / weights.sum()
    sampler = Sampler(temperature, top_k, top_p, seed=0)
    probabilities, tokens = sampler.distribution(LOGITS[None])
    by_token = torch.zeros(5, dtype=torch.float64).scatter_(0, tokens[0], probabilities[0])
    torch.testing.assert_close(by_token, expected, rtol=1e-6, atol=1e-9)
    count = 20_000
    drawn = torch.bincount(sampler(LOGITS.expand(count, 5)), minlength=5).double() / count
    deviation = (expected * (1 - expected) / count).sqrt()
    assert bool(((drawn - expected).abs() <= 5 * deviation).all()), (drawn, expected)


def test_temperature_zero_takes_the_first_of_the_most_likely():
    assert Sampler()(torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])).tolist() == [1, 0]
