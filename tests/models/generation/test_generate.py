"""Cached generation against the uncached model, and sampling against closed forms."""

import math

import pytest
import torch

from forge_models.generation import GenerationError, Sampler, Sampling, before_stop, generate, stream

PROMPTS = [[5, 17, 3, 60, 8, 9, 41], [90], [2, 2, 31, 7]]


def uncached(model, prompt, count):
    """Greedy continuation by running the whole sequence again for every token."""
    row = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
    return row[len(prompt) :]


@pytest.mark.parametrize(("kv_heads", "chunks"), [(1, (12,)), (2, (5, 7)), (4, (1,) * 12), (2, (11, 1)), (4, (3, 4, 5))])
def test_any_chunking_gives_the_logits_of_the_whole(make, tokens, kv_heads, chunks):
    model, rows = make(dtype=torch.float64, spread=10.0, kv_heads=kv_heads), tokens(2, 12)
    cache = model.new_cache(2, 20)
    parts = [model(part, cache=cache) for part in rows.split(list(chunks), dim=1)]
    assert cache.layers["0"].k.shape == (2, kv_heads, 20, 8)
    torch.testing.assert_close(torch.cat(parts, 1), model(rows), rtol=0, atol=1e-11)


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
    with pytest.raises(ValueError, match=r"capacity of 4 tokens per row, but needs 3 \+ 2"):
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
    with pytest.raises(ValueError, match="does not support a cache"):
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
        ({"prompts": []}, "prompts must not be empty"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[97]]}, "token 97, but the vocabulary has 97"),
        ({"prompts": [[-1]]}, "token -1"),
        ({"max_tokens": 60}, "at most 57 new tokens"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"stop": "x"}, "need decode"),
        ({"stop": ["x", ""], "decode": str}, "empty"),
        ({"prefill": 0}, "prefill 0"),
    ],
)
def test_bad_requests_are_refused_at_the_call(make, arguments, message):
    with pytest.raises(GenerationError, match=message):
        stream(make(), **({"prompts": PROMPTS, "max_tokens": 3} | arguments))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"top_k": 0}, "top_k 0"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"min_p": -0.1}, "min_p -0.1"),
        ({"min_p": 1.5}, "min_p 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty nan"),
    ],
)
def test_sampling_out_of_range_is_refused(settings, message):
    with pytest.raises(GenerationError, match=message):
        Sampling(**settings)


def test_a_seed_fixes_the_draws_of_a_row_whatever_the_others_hold(make):
    model = make()

    def drawn(prompts, seed):
        return generate(model, prompts, Sampling(temperature=1.0, seed=seed), max_tokens=8)

    first = drawn(PROMPTS, 3)
    assert drawn(PROMPTS, 3) == first
    assert drawn(PROMPTS, 4) != first
    assert drawn([PROMPTS[0], [1, 2, 3], [4]], 3)[0] == first[0]


def test_stream_and_generate_draw_the_same_whatever_the_prefill(make):
    model = make(spread=3.0)
    sampling = Sampling(temperature=1.3, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.2, seed=5)
    whole = generate(model, PROMPTS, sampling, max_tokens=10)
    assert len({tuple(row) for row in whole}) == 3
    for prefill in (1, 3):
        steps = stream(model, PROMPTS, sampling, max_tokens=10, prefill=prefill)
        assert [list(row) for row in zip(*steps, strict=True)] == whole


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
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    probabilities, tokens = sampling.distribution(LOGITS[None])
    by_token = torch.zeros(5, dtype=torch.float64).scatter_(0, tokens[0], probabilities[0])
    torch.testing.assert_close(by_token, expected, rtol=1e-6, atol=1e-9)
    count = 20_000
    drawn = torch.bincount(Sampler(sampling)(LOGITS.expand(count, 5)), minlength=5).double() / count
    deviation = (expected * (1 - expected) / count).sqrt()
    assert bool(((drawn - expected).abs() <= 5 * deviation).all()), (drawn, expected)


def test_temperature_zero_takes_the_first_of_the_most_likely():
    assert Sampler(Sampling())(torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])).tolist() == [1, 0]


@pytest.mark.parametrize("min_p", [None, 0.0, 0.1, 0.3, 0.7, 1.0])
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, None, None), (0.7, None, 0.8), (1.4, 4, None), (0.9, 7, 0.8)])
def test_cuts_keep_what_transformers_keeps(temperature, top_k, top_p, min_p):
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    # In the order of its `generate`.
    for made, value in ((TopKLogitsWarper, top_k), (TopPLogitsWarper, top_p), (MinPLogitsWarper, min_p)):
        expected = expected if value is None else made(value)(None, expected)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probabilities, tokens = sampling.distribution(logits)
    found = torch.zeros_like(logits).scatter_(1, tokens, probabilities)
    torch.testing.assert_close(found, expected.softmax(-1), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_equals_that_of_transformers(make, penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    # The last prompt holds every second token: about half of its choices depend on what the prompt says.
    model, prompts = make(spread=10.0), [[5, 6, 7, 5, 8], [90, 1], list(range(0, 97, 2))]
    found = generate(model, prompts, Sampling(repetition_penalty=penalty), max_tokens=10)
    process = RepetitionPenaltyLogitsProcessor(penalty)
    for prompt, row in zip(prompts, found, strict=True):
        ids = list(prompt)
        for token in row:
            with torch.no_grad():
                logits = model(torch.tensor([ids]))[:, -1]
            assert token == int(process(torch.tensor([ids]), logits).argmax())
            ids.append(token)
    assert found != generate(model, prompts, max_tokens=10)


def test_rows_stop_at_a_text_that_spans_tokens(make):
    model = make(spread=10.0)

    def decode(tokens):
        return "".join(f"<{token}>" for token in tokens)

    free = generate(model, PROMPTS, max_tokens=12)
    # The end of one token's text and the beginning of the next one's: complete only with the latter.
    stop = f"{free[0][2]}><{free[0][3]}"
    expected = []
    for row in free:
        ends = [n for n in range(1, len(row) + 1) if stop in decode(row[:n])]
        expected.append(row[: ends[0]] if ends else row)
    assert 3 < len(expected[0]) <= 12
    assert generate(model, PROMPTS, max_tokens=12, stop=stop, decode=decode) == expected
    assert generate(model, PROMPTS, max_tokens=12, stop=["never", stop], decode=decode) == expected


def test_text_before_a_stop():
    assert before_stop("one two three", ["three", "two"]) == "one "
    assert before_stop("one two", "x") == "one two"
