"""Every private name of torch that models use is there in the version that runs, and does what it is used for."""

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_models import torch_private as private


class _Asks(torch.autograd.Function):
    kept: bool | None = None

    @staticmethod
    def forward(_, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(_, grad: Tensor) -> Tensor:  # type: ignore[override]
        _Asks.kept = private.graph_is_kept()
        return grad


@pytest.mark.parametrize("keep", [True, False])
def test_a_backward_knows_whether_another_follows(keep: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    _Asks.apply(x).sum().backward(retain_graph=keep)
    assert _Asks.kept is keep


def test_a_view_that_does_not_say_so() -> None:
    x = torch.arange(6.0)
    again = private.unsafe_view(x, (2, 3))
    assert again._base is None and again.data_ptr() == x.data_ptr()
    assert torch.equal(again, x.view(2, 3))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_a_product_by_onednn_is_that_of_torch() -> None:
    draw = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(5, 7, generator=draw), torch.randn(3, 7, generator=draw)
    torch.testing.assert_close(private.onednn_product(rows, weight), rows @ weight.T)


def test_a_write_in_place_is_seen() -> None:
    x = torch.zeros(3)
    before = private.version_of(x)
    assert private.version_of(x) == before
    x[:1] = 1
    assert private.version_of(x) != before
    with torch.inference_mode():
        assert private.version_of(torch.zeros(3)) != private.version_of(torch.zeros(3))  # writes are not counted there
