"""Padding that only a mask tells, as rows have it whose documents are ignored: no result of a forward depends on it.

Expected are, in fp64, the same rows each alone and without padding.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from forge_core.batch import IGNORE, PADDING
from forge_interp.attention_scores import capture_qk
from forge_interp.captures import capture
from forge_interp.edits import edit, mean, replace, zero
from forge_interp.methods.lens import TunedLens, lens_losses, logit_lens
from forge_interp.methods.sae import SAE, loss_recovered
from forge_interp.similarity import Moments, unbiased_cka
from forge_interp.store import ActivationStore, record
from forge_interp.tap_names import InterpError
from forge_models.components.experts import MoEConfig
from forge_models.inner_values import listening

LENGTHS = (5, 8, 2)
MASK = torch.arange(8) < torch.tensor(LENGTHS)[:, None]
NAMES = ["blocks.0.attention.q", "blocks.1.residual", "residual"]


@pytest.fixture
def model(make: Any) -> Any:
    return make(kv_heads=2).double()


@pytest.fixture
def rows(tokens: Any) -> Tensor:
    return tokens(3, 8)


def alone(model: Any, rows: Tensor, name: str) -> Tensor:
    """(tokens, ...) of every row without its padding, one after another."""
    found = []
    for row, length in zip(rows, LENGTHS, strict=True):
        with torch.no_grad(), capture(model, name) as seen:
            model(row[None, :length])
        found.append(seen[name][0])
    return torch.cat(found)


@pytest.mark.parametrize("positions", ["all", "mean", "last", [0, 1], slice(1, 4), [4], 1])
def test_a_selection_leaves_out_what_the_mask_says(model: Any, rows: Tensor, positions: Any) -> None:
    expected: dict[str, list[Tensor]] = {}
    for row, length in zip(rows, LENGTHS, strict=True):
        if positions == [4] and length < 5:
            continue
        with torch.no_grad(), capture(model, NAMES, positions=positions) as seen:
            model(row[None, :length])
        for name, value in seen.items():
            expected.setdefault(name, []).append(value if isinstance(positions, slice) else value[0])
    for given in ({"token_mask": MASK}, {"token_mask": MASK, "documents": torch.where(MASK, 0, PADDING).int()}):
        with torch.no_grad(), capture(model, NAMES, positions=positions) as seen:
            model(rows, **given)
        for name, parts in expected.items():
            found, wanted = seen[name], torch.cat(parts)
            assert found.reshape(wanted.shape).dtype == torch.float64
            torch.testing.assert_close(found.reshape(wanted.shape), wanted, rtol=1e-12, atol=1e-12)


def test_no_position_that_is_padding_in_every_row_can_be_meant(model: Any, rows: Tensor) -> None:
    short = torch.arange(8) < torch.tensor([4, 3, 2])[:, None]
    with pytest.raises(InterpError, match="are padding, or outside of the documents"), capture(model, "norm", positions=[5, 6]):
        model(rows, token_mask=short)
    with pytest.raises(InterpError, match="a row has no token"), capture(model, "norm", positions="mean"):
        model(rows, token_mask=MASK & (torch.arange(3) > 0)[:, None])


def test_a_word_ends_before_padding(model: Any, rows: Tensor) -> None:
    words = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 2, 2, 2], [3, 3, 3, 3, 4, 4, 4, 4]])
    ends = [(0, 1), (0, 4), (1, 2), (1, 4), (1, 7), (2, 1)]
    with torch.no_grad(), capture(model, "residual", positions="last_of_word", words=words) as seen:
        model(rows, token_mask=MASK)
    assert [tuple(pair) for pair in seen.tokens[0].tolist()] == ends


@pytest.mark.parametrize("how", ["mean", "zero"])
def test_an_edit_changes_tokens_only_and_its_mean_is_of_tokens(model: Any, rows: Tensor, how: str) -> None:
    name = "blocks.0.residual"
    with torch.no_grad(), capture(model, name) as plain:
        model(rows)
    edited: dict[str, Tensor] = {}
    made = mean() if how == "mean" else zero()
    with torch.no_grad(), edit(model, name, made), listening(lambda name, x: edited.update({name: x.clone()})):
        model(rows, token_mask=MASK)
    wanted = alone(model, rows, name).mean(0) * (how == "mean")
    torch.testing.assert_close(edited[name][MASK], wanted.expand(sum(LENGTHS), -1), rtol=1e-12, atol=1e-12)
    assert torch.equal(edited[name][~MASK], plain[name][~MASK])


def test_scores_of_padding_count_nowhere(model: Any, rows: Tensor) -> None:
    with torch.no_grad(), capture_qk(model) as scores:
        model(rows, token_mask=MASK)
    singles = []
    for row, length in zip(rows, LENGTHS, strict=True):
        with torch.no_grad(), capture_qk(model) as single:
            model(row[None, :length])
        singles.append((single.entropy(1)[0], single.max_logit(1)))
    entropy = scores.entropy(1)
    for at, (length, (wanted, _)) in enumerate(zip(LENGTHS, singles, strict=True)):
        torch.testing.assert_close(entropy[at, :, :length], wanted, rtol=1e-12, atol=1e-12)
        assert entropy[at, :, length:].isnan().all()
    largest = torch.stack([largest for _, largest in singles]).amax(0)
    torch.testing.assert_close(scores.max_logit(1), largest, rtol=1e-12, atol=1e-12)


def test_similarities_of_captured_tokens_are_those_without_padding(model: Any, rows: Tensor) -> None:
    names = ["blocks.0.residual", "blocks.1.residual"]
    with torch.no_grad(), capture(model, names) as seen:
        model(rows, token_mask=MASK)
    found = unbiased_cka(Moments.of(*(seen[name] for name in names)))
    wanted = unbiased_cka(Moments.of(*(alone(model, rows, name) for name in names)))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_a_recorder_that_pads_stores_what_rows_alone_have(model: Any, rows: Tensor, tmp_path: Path) -> None:
    """Batches of rows of different lengths; autoencoders and lenses are fitted to what is stored."""
    inputs = [row[:length] for row, length in zip(rows, LENGTHS, strict=True)]
    record(model, inputs, tmp_path / "store", NAMES, batch=3)
    store = ActivationStore(tmp_path / "store")
    assert store.rows == sum(LENGTHS)
    for name in NAMES:
        torch.testing.assert_close(store.read(name, 0, store.rows), alone(model, rows, name), rtol=1e-12, atol=1e-12)


def test_losses_of_a_lens_leave_out_places_without_a_label(model: Any, rows: Tensor) -> None:
    labels = rows.roll(-1, 1).masked_fill(~MASK, IGNORE)
    sums = sum(
        lens_losses(model, row[None, :length], label[None, :length]) * length
        for row, label, length in zip(rows, labels, LENGTHS, strict=True)
    )
    torch.testing.assert_close(lens_losses(model, rows, labels), sums / sum(LENGTHS), rtol=1e-12, atol=1e-12)


def lens_of(model: Any) -> TunedLens:
    """Maps that are neither the identity nor alike."""
    generator = torch.Generator().manual_seed(3)
    layers, dim = model.shape.layers, model.shape.dim
    drawn = [torch.randn(*shape, generator=generator).double() for shape in ((layers, dim, dim), (layers, dim))]
    return TunedLens(*(0.1 * each for each in drawn), torch.zeros(layers), torch.zeros(layers))


@pytest.mark.parametrize("lens", ["logit", "tuned"])
@pytest.mark.parametrize("positions", ["last", 1, [0, 1], "all"])
def test_a_lens_leaves_out_what_the_mask_says(model: Any, rows: Tensor, lens: str, positions: Any) -> None:
    read = partial(logit_lens if lens == "logit" else lens_of(model).logits, model)
    singles = [read(row[None, :length], positions=positions) for row, length in zip(rows, LENGTHS, strict=True)]
    found = read(rows, positions=positions, token_mask=MASK)
    if positions == "all":
        assert found.shape[:2] == (3, sum(LENGTHS)), "rows have different numbers of tokens"
        wanted = torch.cat([single[:, 0] for single in singles], 1)
    else:
        wanted = torch.cat(singles, 1)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(read(rows, positions=positions, token_mask=MASK | True), read(rows, positions=positions))


@pytest.mark.parametrize("lens", ["logit", "tuned"])
def test_a_position_of_a_lens_that_is_padding_in_some_rows_is_refused(model: Any, rows: Tensor, lens: str) -> None:
    read = partial(logit_lens if lens == "logit" else lens_of(model).logits, model)
    for options in ({}, {"positions": [0, 4]}, {"positions": -1}):
        with pytest.raises(InterpError, match=r"padding in row (0|2); give positions='last'"):
            read(rows, **options, token_mask=MASK)
    with pytest.raises(InterpError, match=r"token_mask \(3, 7\) .* tokens \(3, 8\)"):
        read(rows, positions="last", token_mask=MASK[:, :7])


def test_the_recovered_loss_is_of_tokens_only(model: Any, rows: Tensor) -> None:
    generator = torch.Generator().manual_seed(4)
    dim, latents = model.shape.dim, 48
    encoder, decoder = (torch.randn(latents, dim, generator=generator).double() for _ in range(2))
    sae = SAE(encoder, torch.zeros(latents).double(), decoder / 20, torch.zeros(dim).double(), 8)
    labels = rows.roll(-1, 1)
    name, clean, zeroed, rebuilt = "blocks.1.residual", 0.0, 0.0, 0.0

    def summed(row: Tensor, label: Tensor) -> float:
        return float(F.cross_entropy(model(row)[0].double(), label, reduction="sum"))

    for row, label, length in zip(rows, labels, LENGTHS, strict=True):
        row, label = row[None, :length], label[:length]
        with torch.no_grad():
            clean += summed(row, label)
            with edit(model, name, zero()):
                zeroed += summed(row, label)
            with edit(model, name, replace(sae.reconstruct)):
                rebuilt += summed(row, label)
    wanted = (zeroed - rebuilt) / (zeroed - clean)
    assert loss_recovered(model, name, sae, rows, labels, token_mask=MASK) == pytest.approx(wanted, rel=1e-12)
    assert loss_recovered(model, name, sae, rows, labels) != pytest.approx(wanted, rel=1e-3), "padding counts without the mask"
    ignored = labels.masked_fill(~MASK, IGNORE)
    assert loss_recovered(model, name, sae, rows, ignored, token_mask=MASK) == pytest.approx(wanted, rel=1e-12)
    with pytest.raises(InterpError, match=r"token_mask \(3, 7\) .* tokens \(3, 8\)"):
        loss_recovered(model, name, sae, rows, labels, token_mask=MASK[:, :7])


def test_experts_see_no_padding_under_a_lens(make: Any, rows: Tensor) -> None:
    """With a capacity, tokens that are padding would take the places of tokens."""
    model = make(layers=2, moe=MoEConfig(experts=2, top_k=1, capacity=0.6)).double()
    rows = rows % model.shape.vocab_size
    with torch.no_grad():
        expected = model(rows, token_mask=MASK)
    found = logit_lens(model, rows, positions="all", token_mask=MASK)[-1]
    torch.testing.assert_close(found, expected[MASK], rtol=1e-12, atol=1e-12)
    labels = rows.roll(-1, 1)
    losses = lens_losses(model, rows, labels, token_mask=MASK)
    wanted = F.cross_entropy(expected[MASK], labels[MASK])
    torch.testing.assert_close(losses[-1], wanted, rtol=1e-12, atol=1e-12)
