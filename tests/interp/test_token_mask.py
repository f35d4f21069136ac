"""Padding that only a mask tells, as rows have it whose documents are ignored: no result of a forward depends on it.

Expected are, in fp64, the same rows each alone and without padding.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_core.batch import IGNORE, PADDING
from forge_interp.attention_scores import capture_qk
from forge_interp.captures import capture
from forge_interp.edits import edit, mean, zero
from forge_interp.methods.lens import lens_losses
from forge_interp.similarity import Moments, unbiased_cka
from forge_interp.store import ActivationStore, record
from forge_interp.tap_names import InterpError
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
