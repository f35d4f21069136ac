"""Where images stand and which of them a token sees, by hand."""

import pytest
import torch

from forge_vlm.fusion import fusion
from forge_vlm.fusion.fusion import check_placeholders, feature_places, image_blocks, seen_images

I = 9  # noqa: E741 (an image's placeholder)


def test_a_token_sees_the_images_of_the_last_group() -> None:
    #                        before, one image, text, two neighbors, text
    tokens = torch.tensor([[1, 2, I, 3, 4, I, I, 5, 6]])
    first, end = seen_images(tokens, I, None)
    assert first.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, 1]]
    assert end.tolist() == [[0, 0, 1, 1, 1, 2, 3, 3, 3]]
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2]])
    first, end = seen_images(tokens, I, documents)
    assert [(a, b) for a, b in zip(first[0].tolist(), end[0].tolist(), strict=True)] == [
        *((0, 0), (0, 0), (0, 1), (0, 1)),
        *((1, 1), (1, 2), (1, 3)),
        *((3, 3), (3, 3)),  # a document without images
    ]


def test_neighbors_in_two_documents_are_two_groups() -> None:
    tokens, documents = torch.tensor([[1, I, I, 2]]), torch.tensor([[0, 0, 1, 1]])
    first, end = seen_images(tokens, I, documents)
    assert (first.tolist(), end.tolist()) == ([[0, 0, 1, 1]], [[0, 1, 2, 2]])


def test_placeholders_take_the_vectors_of_their_row_in_order() -> None:
    tokens = torch.tensor([[1, I, I, 2, I, I], [I, I, 1, 1, 1, 1]])
    rows = torch.tensor([[2, 0], [1, -1]])
    assert feature_places(tokens, I, rows, 2).tolist() == [[-1, 4, 5, -1, 0, 1], [2, 3, -1, -1, -1, -1]]
    assert image_blocks(tokens, I, 2).tolist() == [[-1, 0, 0, -1, 1, 1], [0, 0, -1, -1, -1, -1]]
    assert feature_places(tokens, I, torch.tensor([[2, -1], [-1, -1]]), 2).tolist() == [[-1, 4, 5, -1, -1, -1], [-1] * 6]


def test_rows_with_other_images_than_placeholders_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host names the row. A device is given a condition, which here is seen where it is given."""
    tokens, none = torch.tensor([[1, I, I, 2]]), torch.tensor([[-1]])
    check_placeholders(tokens, I, torch.tensor([[0]]), 2)
    with pytest.raises(ValueError, match=r"row 0 has 2 placeholders .* text must not contain that id"):
        check_placeholders(tokens, I, none, 2)
    monkeypatch.setattr(fusion, "on_host", lambda _: False)
    check_placeholders(tokens, I, torch.tensor([[0]]), 2)
    with pytest.raises(RuntimeError, match="more or fewer placeholders"):
        check_placeholders(tokens, I, none, 2)
