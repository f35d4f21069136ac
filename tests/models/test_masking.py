"""Objectives of masked tokens against closed forms and loops over rows: what is hidden, the loss, and gradients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from forge_core.batch import IGNORE, PADDING, Batch
from forge_core.errors import ConfigError, DataError
from forge_models.components.attentions import GQA
from forge_models.masking import COUNTS, WEIGHTS, MaskedDiffusionLoss, MaskedLMLoss
from forge_models.objectives import MaskedDiffusion, MaskedLM
from forge_train.recipe.load import load_recipe

MASK, VOCAB = 96, 97


def rows_of(tokens: torch.Tensor, samples: tuple[int, ...] = (), starts: tuple[int, ...] = ()) -> Batch:
    """Rows as a loader makes them: the label is the next token, and none crosses the beginning of a document."""
    labels = torch.full_like(tokens, IGNORE)
    labels[:, :-1] = tokens[:, 1:]
    documents = torch.zeros_like(tokens, dtype=torch.int32)
    for start in starts:
        labels[:, start - 1] = IGNORE
        documents[:, start:] += 1
    return Batch(tokens, labels, documents=documents, samples=samples or tuple(range(len(tokens))))


def many(rows: int = 40, length: int = 512) -> Batch:
    ids = torch.randint(MASK, (rows, length), generator=torch.Generator().manual_seed(3))
    return rows_of(ids)


def test_shares_of_chosen_hidden_random_and_kept_tokens() -> None:
    batch = many()
    found = MaskedLMLoss(MASK, MASK, ratio=0.2, random=0.3, kept=0.1).prepared(batch)
    chosen = found.labels != IGNORE
    n, count = chosen[:, 1:].numel(), int(chosen.sum())
    assert abs(count - 0.2 * n) < 5 * (n * 0.2 * 0.8) ** 0.5 and not bool(chosen[:, 0].any())
    assert torch.equal(found.labels[chosen], batch.tokens[chosen]) and torch.equal(found.tokens[~chosen], batch.tokens[~chosen])
    new, old = found.tokens[chosen], batch.tokens[chosen]
    for share, wanted in (
        ((new == MASK).sum(), 0.6),
        (((new != MASK) & (new != old)).sum(), 0.3 * (1 - 1 / MASK)),
        ((new == old).sum(), 0.1 + 0.3 / MASK),
    ):
        assert abs(int(share) - wanted * count) < 5 * (count * wanted * (1 - wanted)) ** 0.5
    drawn = new[(new != MASK) & (new != old)]
    assert int(drawn.min()) == 0 and int(drawn.max()) == MASK - 1


def test_only_tokens_that_are_labels_are_hidden() -> None:
    batch = many(8, 64)
    labels = batch.labels.clone()
    labels[:, :20] = IGNORE  # a prompt
    labels[:, 40] = IGNORE  # the end of a document
    prepared = MaskedLMLoss(MASK, VOCAB, ratio=0.999, random=0.0, kept=0.0).prepared(replace(batch, labels=labels))
    chosen = (prepared.labels != IGNORE).float().mean(0)
    assert float(chosen[:21].sum()) == 0 and float(chosen[41]) == 0
    assert float(chosen[21:41].mean()) > 0.97 and float(chosen[42:].mean()) > 0.97


def ends(objective, batch: Batch) -> tuple[torch.Tensor, ...]:
    prepared = objective.prepared(batch)
    return (prepared.tokens, prepared.labels, *(prepared.targets[name] for name in sorted(prepared.targets)))


@pytest.mark.parametrize(
    "objective",
    [MaskedLMLoss(MASK, VOCAB, ratio=0.4), MaskedDiffusionLoss(MASK), MaskedDiffusionLoss(MASK, per="row")],
)
def test_what_is_hidden_depends_on_seed_row_number_and_position_only(objective) -> None:
    batch = rows_of(many(6, 40).tokens, samples=(7, 3, 90, 2**40, 5, 0), starts=(11, 25))
    whole = ends(objective, batch)
    for row in range(6):  # alone, in any micro-batch
        alone = rows_of(batch.tokens[row : row + 1], samples=batch.samples[row : row + 1], starts=(11, 25))
        assert all(torch.equal(a[0], b[row]) for a, b in zip(ends(objective, alone), whole, strict=True))
    padded = Batch(
        F.pad(batch.tokens, (0, 9)),
        F.pad(batch.labels, (0, 9), value=IGNORE),
        documents=F.pad(batch.documents, (0, 9), value=PADDING),
        samples=batch.samples,
    )
    longer = ends(objective, padded)
    assert all(torch.equal(a[:, :40] if a.dim() > 1 else a, b) for a, b in zip(longer, whole, strict=True))
    other = ends(objective, replace(batch, samples=tuple(number + 1 for number in batch.samples)))
    assert not torch.equal(other[1] == IGNORE, whole[1] == IGNORE)
    objective.seed += 1
    assert not torch.equal(ends(objective, batch)[1] == IGNORE, whole[1] == IGNORE)
    objective.seed -= 1
    again = ends(objective, replace(batch, tokens=(batch.tokens + 1) % MASK))
    assert torch.equal(again[1] == IGNORE, whole[1] == IGNORE)


def test_rows_without_a_number_are_known_by_their_tokens() -> None:
    batch = replace(many(4, 40), samples=())
    objective = MaskedLMLoss(MASK, VOCAB, ratio=0.4)
    whole = objective.prepared(batch).labels
    alone = objective.prepared(Batch(batch.tokens[2:3], batch.labels[2:3])).labels
    assert torch.equal(alone[0], whole[2]) and not torch.equal(whole[0] == IGNORE, whole[1] == IGNORE)


def test_the_mask_of_a_row_is_that_of_every_version() -> None:
    """Numbers of numpy's Philox, which promises its stream; the key is computed here from the definition."""
    from hashlib import blake2b

    key = np.frombuffer(blake2b(b"5/9", digest_size=16).digest(), dtype="<u8").astype(np.uint64)
    units = (np.random.Philox(key=key).random_raw(4 * 30) >> np.uint64(11)) * 2.0**-53
    wanted = [position for position in range(1, 30) if units[4 * position] < 0.3]
    found = MaskedLMLoss(MASK, VOCAB, ratio=0.3, random=0.0, kept=0.0, seed=5).prepared(rows_of(many(1, 30).tokens, samples=(9,)))
    assert (found.labels[0] != IGNORE).nonzero().flatten().tolist() == wanted and len(wanted) > 3
    batch = rows_of(many(1, 30).tokens, samples=(9,), starts=(12,))
    weights = MaskedDiffusionLoss(MASK, smallest=0.2, seed=5).prepared(batch).targets[WEIGHTS][0].tolist()
    for first, after in ((0, 12), (12, 30)):
        ratio = 0.2 + 0.8 * units[4 * first + 3]
        places = [position for position in range(first + 1, after) if units[4 * position] < ratio]
        assert [position for position in range(first, after) if weights[position]] == places and places
        assert all(weights[position] == pytest.approx(1 / ratio, rel=1e-12) for position in places)


@pytest.mark.parametrize("per", ["document", "row"])
def test_each_document_or_row_has_a_share_of_its_own(per) -> None:
    batch = rows_of(many(60, 600).tokens, starts=(200, 400))
    found = MaskedDiffusionLoss(MASK, per=per, smallest=0.05).prepared(batch)
    hidden, weights = found.labels != IGNORE, found.targets[WEIGHTS]
    assert bool(((weights > 0) == hidden).all()) and bool((found.tokens[hidden] == MASK).all())
    assert torch.equal(found.targets[COUNTS], torch.full((60,), 600 - 3))
    ratios = []
    for row in range(60):
        each = [1 / weights[row, a:b][hidden[row, a:b]] for a, b in ((0, 200), (200, 400), (400, 600))]
        assert all(len(set(part.tolist())) == 1 for part in each)
        shares = [float(part[0]) for part in each]
        ratios += shares if per == "document" else shares[:1]
        assert len(set(shares)) == (3 if per == "document" else 1)
        for (a, b), share in zip(((0, 200), (200, 400), (400, 600)), shares, strict=True):
            assert abs(int(hidden[row, a:b].sum()) - 199 * share) < 5 * (200 * share * (1 - share)) ** 0.5 + 1
    assert min(ratios) >= 0.05 and max(ratios) <= 1
    assert abs(float(np.mean(ratios)) - 0.525) < 5 * 0.95 / (12 * len(ratios)) ** 0.5


def test_the_loss_of_diffusion_is_without_bias(make) -> None:
    """With constant logits, the mean over many masks of the loss is the mean nll of all tokens."""
    model = make(dtype=torch.float64, attention=GQA(causal=False))
    batch = many(1500, 12)
    objective = MaskedDiffusionLoss(MASK, smallest=0.05)
    prepared = objective.prepared(batch)
    nll = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(0).neg()

    class Constant:
        def loss(self, hidden, labels, weights):
            each = nll[labels.clamp(min=0)] * (labels != IGNORE)
            return (each * weights).sum(), each, each

    terms = objective.bound(prepared)(Constant(), torch.zeros(1500, 12, 4, dtype=torch.float64), prepared.labels)
    each_token = nll[batch.tokens[:, 1:]]
    assert float(terms.sum / terms.tokens) == pytest.approx(float(each_token.mean()), rel=0.03)
    assert int(terms.tokens) == 1500 * 11 == int(objective.counts(prepared).sum())
    assert float(terms.metrics["masked"] / terms.tokens) == pytest.approx(0.525, abs=0.02)
    del model


@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_losses_and_gradients_equal_whole_logits(make, tokens, soft_cap) -> None:
    model = make(dtype=torch.float64, spread=8.0, soft_cap=soft_cap, attention=GQA(causal=False))
    batch = rows_of(tokens(3, 18, vocab=MASK), samples=(4, 5, 6), starts=(7,))
    inputs = {"positions": batch.positions, "documents": batch.documents}
    for objective in (MaskedLMLoss(MASK, VOCAB, ratio=0.5), MaskedDiffusionLoss(MASK, smallest=0.3)):
        ready = objective.prepared(batch)
        logits = model(ready.tokens, **inputs)
        weights = ready.targets.get(WEIGHTS, torch.ones(3, 18, dtype=torch.float64))
        expected = torch.zeros((), dtype=torch.float64)
        for row in range(3):
            for at in range(18):
                if ready.labels[row, at] != IGNORE:
                    assert ready.labels[row, at] == batch.tokens[row, at]
                    expected = expected - weights[row, at] * logits[row, at].log_softmax(0)[batch.tokens[row, at]]
        wanted = torch.autograd.grad(expected, list(model.parameters()))
        terms = model(ready.tokens, labels=ready.labels, objective=objective.bound(ready), **inputs)
        found = torch.autograd.grad(terms.sum, list(model.parameters()))
        torch.testing.assert_close(terms.sum, expected, rtol=1e-12, atol=1e-11)
        torch.testing.assert_close(terms.rows.sum(), terms.sum.detach(), rtol=1e-12, atol=1e-12)
        assert int(terms.tokens) == int(objective.counts(ready).sum()) > 0
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"random 0\.6 and kept 0\.5 exceed 1"):
        MaskedLM(mask_id=3, random=0.6, kept=0.5, vocab_size=4)
    with pytest.raises(DataError, match=r"prepare it with objective\.prepared"):
        MaskedDiffusion(mask_id=3).build().bound(many(1, 8))
    with pytest.raises(DataError, match=r"call objective\.bound"):
        MaskedDiffusionLoss(3)(None, None, None)  # type: ignore[arg-type]


BOTH = ["--model.attention.name=gqa", "--model.attention.causal=false"]


@pytest.mark.parametrize(
    ("given", "world", "key", "what"),
    [
        (["--objective.name=masked_lm", "--objective.vocab_size=9"], 1, "model.attention.causal", "hides the tokens after"),
        (
            ["--objective.name=masked_diffusion", "--model.attention.name=mla", "--model.kv_heads=none"],
            1,
            "model.name",
            "is causal",
        ),
        ([*BOTH, "--objective.name=masked_diffusion", "--objective.mask_id=100000"], 1, "objective.mask_id", "is not in"),
        ([*BOTH, "--objective.name=masked_lm", "--objective.vocab_size=100000"], 1, "objective.vocab_size", "exceeds"),
        ([*BOTH, "--objective.name=masked_diffusion", "--parallel.cp=2"], 2, "parallel.cp", "needs whole rows"),
        (
            ["--objective.name=masked_lm", "--objective.vocab_size=9", "--model.mtp.depth=1"],
            1,
            "model.mtp",
            "does not train next",
        ),
    ],
)
def test_recipes_that_do_not_fit_are_refused_by_name(given: list[str], world: int, key: str, what: str) -> None:
    token = [] if any("mask_id" in option for option in given) else ["--objective.mask_id=3"]
    with pytest.raises(ConfigError) as error:
        load_recipe("debug", ["--hooks=[]", *given, *token], world)
    assert any(fault.key == key and what in fault.message for fault in error.value.faults), error.value.faults
