"""Drafting changes how many forwards a text takes, and not one token of it."""

from functools import cache

import pytest
import torch

from forge_core.batch import Batch
from forge_models.components.attentions import GQA, MLA
from forge_models.components.decoder import DecoderConfig, MTPConfig
from forge_models.components.experts import MoEConfig
from forge_models.generation import GenerationError, generate
from forge_models.inner_values import listening
from forge_models.objectives import CrossEntropy
from forge_models.shape import Rope
from forge_models.speculation import Tally, _Rounds, speculate
from models.conftest import TINY, fill

PROMPTS = [[5, 17, 3, 60, 8, 9, 41], [90], [2, 2, 31, 7]]


def drafted(model, prompts=PROMPTS, tally=None, **options):
    rows = [[] for _ in prompts]
    for made in speculate(model, prompts, tally=tally, **options):
        for row, tokens in zip(rows, made, strict=True):
            row += tokens
    return rows


def cycle(start, length, vocab=97):
    """A sequence that a small model learns at once: each token follows from the one before."""
    found = [start % vocab]
    while len(found) < length:
        found.append((5 * found[-1] + 3) % vocab)
    return found


@cache
def learned(depth):
    """Weights, by name, of a model that has learned `cycle`."""
    model = DecoderConfig(**TINY, mtp=MTPConfig(depth=depth, weight=1.0)).build()
    fill(model, model.specs(), 0)
    model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        starts = torch.randint(97, (16,), generator=generator).tolist()
        rows = torch.tensor([cycle(start, 17) for start in starts])
        batch = Batch(rows[:, :-1], rows[:, 1:]).with_mtp_targets(depth)
        terms = model(batch.tokens, labels=batch.labels, objective=CrossEntropy().build(), mtp_targets=batch.mtp_targets)
        (terms.sum / terms.tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.fixture
def trained(make):
    """trained(depth, noise) -> a model that has learned `cycle`; noise in its modules has them guess wrong now and then."""

    def trained(depth, noise=0.0):
        model = make(dtype=torch.float64, mtp=MTPConfig(depth=depth))
        model.load_state_dict(learned(depth))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for module in model.mtp.depths.values():
                weight = module.projection.weight
                weight.add_(noise * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
        return model

    return trained


VARIANTS = {
    "plain": {},
    "windows": {"attention": GQA(window=4)},
    "latent": {"kv_heads": None, "attention": MLA(kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10)},
    "experts": {"moe": MoEConfig(experts=4, ffn_dim=24, capacity=1.0)},
    "tied": {"tied_embeddings": True, "embed_multiplier": 3.0},
}


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_of_a_model_that_guesses_wrong_are_the_same(make, name, depth):
    model = make(spread=10.0, dtype=torch.float64, mtp=MTPConfig(depth=depth), **VARIANTS[name])
    tally = Tally()
    assert drafted(model, tally=tally, max_tokens=14) == generate(model, PROMPTS, max_tokens=14)
    assert tally.tokens == 3 * 14
    assert tally.drafted == depth * tally.rounds
    assert tally.rounds + tally.accepted >= 3 * 13  # a round makes one token and those that it accepts, some of them too many


@pytest.mark.parametrize("depth", [1, 2])
def test_a_model_that_guesses_right_needs_fewer_forwards(trained, depth):
    model, tally = trained(depth), Tally()
    prompts = [cycle(4, 6), cycle(50, 1), cycle(77, 3)]
    calls = []
    model.norm.register_forward_hook(lambda *_: calls.append(1))
    expected = generate(model, prompts, max_tokens=24)
    plain = len(calls)
    calls.clear()
    assert drafted(model, prompts, tally, max_tokens=24) == expected
    assert expected[0] == cycle(4, 30)[6:]  # it has learned, so guesses can be right
    assert plain == 24
    assert len(calls) < 24 / (1 + 0.5 * depth)  # forwards of the model, counted at its last norm
    assert tally.accepted / tally.drafted > 0.7


def test_modules_that_guess_right_now_and_then_change_no_token(trained):
    model, tally = trained(2, noise=0.15), Tally()
    assert drafted(model, tally=tally, max_tokens=40) == generate(model, PROMPTS, max_tokens=40)
    assert 0.1 < tally.accepted / tally.drafted < 0.9


@torch.no_grad()
def by_hand(model, prompt, count):
    """(rounds, accepted, guesses) when every round runs model and modules over the whole row again, without any cache."""

    def next_token(row):
        return int(model(torch.tensor([row]))[0, -1].argmax())

    row, rounds, accepted, seen, guesses = [*prompt, next_token(prompt)], 0, 0, {}, []
    while len(row) < len(prompt) + count:
        guessed = list(row)
        with listening(lambda name, value: seen.update({name: value})):
            model(torch.tensor([row[:-1]]))
        x, turn = seen["residual"], model.blocks["0"].attention.rotary(torch.arange(len(row) - 1))
        for k, module in enumerate(model.mtp.depths.values(), 1):
            x, hidden = module(x, model.embed(torch.tensor([guessed[k : k + len(row) - 1]])), turn, None)
            guessed.append(int(model.head(hidden)[0, -1].argmax()))
        right, rounds = len(row), rounds + 1
        guesses.append(guessed[len(row) :])
        row.append(next_token(row))
        while len(row) < len(prompt) + count and right < len(guessed) and row[-1] == guessed[right]:
            accepted, right = accepted + 1, right + 1
            row.append(next_token(row))
        if right < len(guessed) and row[-1] == guessed[right] and len(row) == len(prompt) + count:
            accepted += 1  # the last token that was wanted was itself a guess
    return rounds, accepted, guesses


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("right", ["never", "sometimes"])
def test_guesses_are_those_of_modules_that_see_the_whole_row(make, trained, monkeypatch, depth, right):
    """Were a module to build on a token that did not come to be, its guesses would be worse, and no text would tell."""
    alike = {"spread": 10.0, "dtype": torch.float64, "mtp": MTPConfig(depth=depth)}
    model = make(**alike) if right == "never" else trained(depth, noise=0.15)
    verified, guesses = _Rounds._verified, []

    def listened(self):
        known = self.rows[0].known
        guesses.append(self.tokens[0, known : known + depth].tolist())
        return verified(self)

    monkeypatch.setattr(_Rounds, "_verified", listened)
    for prompt in PROMPTS:
        tally = Tally()
        guesses.clear()
        drafted(model, [prompt], tally, max_tokens=16)
        assert (tally.rounds, tally.accepted, guesses) == by_hand(model, prompt, 16)


def test_prompts_may_be_taken_in_portions(trained):
    model, tally = trained(2, noise=0.15), Tally()
    expected = drafted(model, tally=tally, max_tokens=12)
    for prefill in (1, 2, 3, 5):
        portions = Tally()
        assert drafted(model, tally=portions, max_tokens=12, prefill=prefill) == expected
        assert tally == portions


def test_rows_stop_at_their_own_end(trained):
    model = trained(2, noise=0.15)
    free = generate(model, PROMPTS, max_tokens=20)
    for eos in (free[0][3], free[1][0], free[2][7]):
        assert drafted(model, max_tokens=20, eos=eos) == generate(model, PROMPTS, max_tokens=20, eos=eos)

    def decode(row):
        return " ".join(str(token) for token in row)

    stop = decode(free[0][2:4])
    options = {"max_tokens": 20, "stop": stop, "decode": decode}
    assert drafted(model, **options) == generate(model, PROMPTS, **options)


def test_a_row_alone_equals_the_row_in_a_batch(trained):
    model = trained(2, noise=0.15)
    together, alone = Tally(), Tally()
    rows = drafted(model, tally=together, max_tokens=15)
    assert rows == [drafted(model, [prompt], alone, max_tokens=15)[0] for prompt in PROMPTS]
    assert together == alone


def test_the_last_tokens_up_to_max_length_can_be_made(make):
    model = make(spread=10.0, dtype=torch.float64, mtp=MTPConfig(depth=3))
    assert drafted(model, [[1, 2, 3]], max_tokens=61) == generate(model, [[1, 2, 3]], max_tokens=61)


def test_what_cannot_draft_is_refused(make):
    with pytest.raises(GenerationError, match="speculation needs MTP modules"):
        speculate(make(), PROMPTS, max_tokens=2)
    dynamic = make(mtp=MTPConfig(), rope=Rope(scaling="dynamic", factor=2.0, original_max_length=32))
    with pytest.raises(GenerationError, match="dynamic"):
        speculate(dynamic, PROMPTS, max_tokens=2)
    with pytest.raises(GenerationError, match="prompt 0 is empty"):
        speculate(make(mtp=MTPConfig()), [[]], max_tokens=2)
