"""The chunked loss head against torch's cross_entropy on whole logits."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forge_core.protocols.model import LossHead
from forge_models.blocks import head as loss_head
from forge_models.blocks.head import ChunkedCrossEntropy
from forge_models.objectives import CrossEntropy
from harness.closeness import assert_no_farther, below
from harness.wide import Wide

HEAD = ChunkedCrossEntropy(rows=4)


def naive(hidden, weight, labels, z_loss, soft_cap):
    """The same loss by its definition, whole logits."""
    logits = (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32))
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    nll = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
    z = torch.logsumexp(logits, -1).square() * (labels != -100)
    return (nll + z_loss * z).sum(), nll, z


def problem(rows=11, dim=6, vocab=23, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[[1, 5]] = -100
    return hidden, weight, labels


def gradients(head, hidden, weight, labels, z_loss=0.0, soft_cap=None, scale=1.0):
    total, nll, z = head(hidden, weight, labels, z_loss, soft_cap)
    return total.detach(), nll.detach(), z.detach(), *torch.autograd.grad(total * scale, (hidden, weight))


@pytest.mark.parametrize("rows", [1, 4, 11, 64])
@pytest.mark.parametrize(("z_loss", "soft_cap"), [(0.0, None), (0.3, None), (0.0, 2.0), (0.3, 2.0)])
def test_equals_cross_entropy_in_fp64(rows, z_loss, soft_cap):
    arguments = (*problem(), z_loss, soft_cap, 0.7)
    for ours, theirs in zip(gradients(ChunkedCrossEntropy(rows), *arguments), gradients(naive, *arguments), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("z_loss", [0.0, 0.2])
def test_gradcheck(z_loss):
    hidden, weight, labels = problem(rows=6, dim=3, vocab=7)
    assert torch.autograd.gradcheck(lambda h, w: HEAD(h, w, labels, z_loss, 3.0)[0], (hidden, weight))


def test_fp32_is_exact_to_its_precision():
    hidden, weight, labels = problem(rows=200, dim=32, vocab=500, dtype=torch.float32)
    exact = gradients(naive, hidden.double(), weight.double(), labels, 0.1)
    plain = gradients(naive, hidden, weight, labels, 0.1)
    for ours, theirs, wide in zip(gradients(ChunkedCrossEntropy(64), hidden, weight, labels, 0.1), plain, exact, strict=True):
        assert ours.dtype == torch.float32
        assert_no_farther(ours, theirs, wide)


def test_bf16_inputs_give_an_fp32_loss():
    hidden, weight, labels = problem(rows=4096, dim=64, vocab=500, dtype=torch.bfloat16)
    weight = (weight.detach() * 0.05).requires_grad_()
    exact = gradients(naive, hidden.double(), weight.double(), labels)
    ours = gradients(ChunkedCrossEntropy(512), hidden, weight, labels)
    assert [value.dtype for value in ours] == [torch.float32] * 3 + [torch.bfloat16] * 2
    # Logits are rounded to 8 bits, each way equally often: over 4096 rows the mean keeps four digits. A loss or a sum
    # kept in bf16 would be off by up to 4e-3.
    assert below(abs(float(ours[0] / exact[0]) - 1), 1e-4)
    for mine, theirs in zip(ours[3:], exact[3:], strict=True):
        assert below(float((mine.double() - theirs).norm() / theirs.norm()), 1e-2)


def test_many_chunks_do_not_lose_weight_gradient_in_bf16():
    # Sixteen equal rows, one per chunk: a sum kept in bf16 stops growing exactly; fp32 only rounds once at the end.
    hidden = torch.ones(512, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(3, 4, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(512, dtype=torch.int64)
    *_, grad = gradients(ChunkedCrossEntropy(1), hidden, weight, labels)
    third = float(torch.tensor(1 / 3).bfloat16())
    torch.testing.assert_close(grad[1].float(), torch.full((4,), 512 * third), rtol=4e-3, atol=0)


def test_fault_41_batch_without_valid_labels_gives_zero_with_a_graph():
    hidden, weight, _ = problem()
    total, nll, z = HEAD(hidden, weight, torch.full((11,), -100), 0.5, None)
    assert total == 0 and nll.tolist() == z.tolist() == [0.0] * 11
    total.backward()
    assert hidden.grad.count_nonzero() == weight.grad.count_nonzero() == 0


def test_a_label_outside_of_the_vocabulary_is_an_error():
    hidden, weight, labels = problem()
    for wrong in (-1, 23):
        labels[0] = wrong
        with pytest.raises(RuntimeError, match="out of bounds"):
            HEAD(hidden, weight, labels, 0.0, None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [4, 11])
def test_graph_can_be_used_as_often_as_it_is_kept(rows, dtype):
    hidden, weight, labels = problem(dtype=dtype)
    total, _, _ = ChunkedCrossEntropy(rows)(hidden, weight, labels, 0.0, None)
    first = torch.autograd.grad(2 * total, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    third = torch.autograd.grad(2 * total, (hidden, weight))
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, c) and torch.equal(a, 2 * b) and a.count_nonzero()
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total, (hidden, weight))


class Places(TorchDispatchMode):
    """Where the tensors of one size lie that operators returned."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.seen = shape, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen |= {value.data_ptr() for value in tree_leaves(out) if getattr(value, "shape", None) == self.shape}
        return out


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 4), (torch.float64, 4), (torch.bfloat16, 11)], ids=str)
def test_the_last_backward_makes_no_second_gradient_of_the_projection(monkeypatch, dtype, rows):
    monkeypatch.setattr(loss_head, "CPU_BLOCK", 3 * 23)
    hidden, weight, labels = problem(dtype=dtype)
    with Places(weight.shape) as forward:
        total, _, _ = ChunkedCrossEntropy(rows)(hidden, weight, labels, 0.0, None)
    with Places(weight.shape) as backward:
        (0.3 * total).backward()
    assert len(forward.seen) == 1 and backward.seen <= forward.seen and weight.grad.data_ptr() in forward.seen


def test_frozen_sides_get_no_gradient():
    hidden, weight, labels = problem()
    expected = gradients(naive, hidden, weight, labels)
    HEAD(hidden, weight.detach(), labels, 0.0, None)[0].backward()
    torch.testing.assert_close(hidden.grad, expected[3])
    HEAD(hidden.detach(), weight, labels, 0.0, None)[0].backward()
    torch.testing.assert_close(weight.grad, expected[4])


class Allocations(TorchDispatchMode):
    """Largest tensor that any operator returned, and the number of matrix products."""

    def __init__(self):
        super().__init__()
        self.largest = 0
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += "mm" in str(func)
        sizes = [value.numel() for value in tree_leaves(out) if isinstance(value, torch.Tensor)]
        self.largest = max(self.largest, *sizes) if sizes else self.largest
        return out


def test_logits_of_a_batch_never_exist_in_training(make, tokens):
    model = make(vocab_size=701, dim=16, heads=2, kv_heads=1)
    rows = tokens(8, 33, vocab=701)
    arguments = {"labels": rows[:, 1:], "objective": CrossEntropy(z_loss=1e-4).build()}
    model.head.core = ChunkedCrossEntropy(rows=32)
    with Allocations() as seen:
        model(rows[:, :-1], **arguments).sum.backward()
    assert seen.largest == 701 * 32  # a chunk's logits; those of the batch are 701 x 256
    with Allocations() as seen:
        model(rows[:, :-1])
    assert seen.largest == 701 * 256  # the instrument does see logits where there are some


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_blocks_of_a_chunk_change_no_gradient(monkeypatch, dtype, soft_cap):
    arguments = (*problem(dtype=dtype), 0.3, soft_cap)
    whole = gradients(ChunkedCrossEntropy(8), *arguments)
    monkeypatch.setattr(loss_head, "CPU_BLOCK", 3 * 23)  # 3 + 3 + 2 rows, then 3
    parts = gradients(ChunkedCrossEntropy(8), *arguments)
    for ours, theirs in zip(parts[:3], whole[:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6 if dtype != torch.float64 else 1e-14, atol=0)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(parts[3:], whole[3:], strict=True))


def test_in_bf16_only_a_block_of_logits_is_in_fp32(monkeypatch):
    monkeypatch.setattr(loss_head, "CPU_BLOCK", 16 * 211)
    hidden, weight, labels = problem(rows=96, dim=8, vocab=211, dtype=torch.bfloat16)
    with Wide() as seen:
        ChunkedCrossEntropy(64)(hidden, weight, labels, 0.1, None)[0].backward()
    assert seen.sizes[-1] == 16 * 211  # a chunk's are 64 x 211; the sum of the weight's gradient is 8 x 211


@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_on_an_accelerator_too_only_a_block_is_in_fp32(soft_cap):
    """The head of an 8B model and 8,192 tokens, without its memory: beside the sum of the weight's gradient (2 GiB) all
    in fp32 is at most 256 MiB, where a chunk's logits would be 2 GiB."""
    hidden = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(128256, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    labels = torch.empty(8192, dtype=torch.int64, device="meta")
    with Wide() as forward:
        total = ChunkedCrossEntropy()(hidden, weight, labels, 0.1, soft_cap)[0]
    assert forward.sizes[-1] == weight.numel() and 2**25 < forward.sizes[-2] <= 2**26
    with Wide() as backward:
        total.backward()
    assert weight.grad.dtype == torch.bfloat16 and 2**25 < backward.sizes[-1] <= 2**26


@pytest.mark.parametrize(("dtype", "chunks"), [(torch.float32, 4), (torch.bfloat16, 2)], ids=str)
def test_rows_of_a_chunk_follow_its_bytes(monkeypatch, dtype, chunks):
    monkeypatch.setattr(loss_head, "CHUNK_BYTES", 512 * 23 * 2)
    hidden, weight, labels = problem(rows=1024, dtype=dtype)
    with torch.no_grad(), Allocations() as seen:
        ChunkedCrossEntropy()(hidden, weight, labels, 0.0, None)
    assert seen.products == chunks


@pytest.mark.parametrize(("dim", "chunks"), [(6, 4), (256, 4), (512, 2), (1024, 1)])
def test_rows_of_a_chunk_follow_the_width_too(monkeypatch, dim, chunks):
    """As many as the projection is wide, so that a chunk's logits are of its size; 256 at least."""
    monkeypatch.setattr(loss_head, "CHUNK_BYTES", 0)
    hidden, weight, labels = problem(rows=1024, dim=dim, dtype=torch.float32)
    with torch.no_grad(), Allocations() as seen:
        ChunkedCrossEntropy()(hidden, weight, labels, 0.0, None)
    assert seen.products == chunks


def test_no_rows_give_zero():
    hidden, weight, labels = problem()
    found = gradients(HEAD, hidden[:0], weight, labels[:0], 0.1)
    assert float(found[0]) == 0 and found[1].shape == found[2].shape == (0,)
    assert found[3].shape == (0, 6)
    assert found[4].count_nonzero() == 0


def test_evaluation_does_no_gradient_work():
    hidden, weight, labels = problem()
    with torch.no_grad(), Allocations() as evaluating:
        total, _, _ = HEAD(hidden, weight, labels, 0.1, None)
    with Allocations() as training:
        expected, _, _ = HEAD(hidden, weight, labels, 0.1, None)
    assert (evaluating.products, training.products) == (3, 9)
    assert not total.requires_grad
    assert torch.equal(total, expected)


def test_fulfils_the_protocol():
    assert isinstance(HEAD, LossHead)


@pytest.mark.parametrize("rows", [64, 16], ids=["one chunk", "four chunks"])
def test_gradients_in_bf16_are_scaled_by_what_comes_from_above(rows):
    """The gradient of 0.37 x the loss, against torch in fp64: to the rounding of bf16, for one chunk and for several."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 32).bfloat16().requires_grad_(), (torch.randn(50, 32) / 6).bfloat16().requires_grad_()
    labels = torch.randint(50, (64,))
    total, _, _ = ChunkedCrossEntropy(rows)(hidden, weight, labels, 0.0, None)
    (0.37 * total).backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    (0.37 * torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, labels, reduction="sum")).backward()
    for found, expected in zip((hidden, weight), exact, strict=True):
        assert float((found.grad.double() - expected.grad).norm() / expected.grad.norm()) < 0.01


def _split(head, hidden, weight, labels, z_loss, soft_cap):
    """Losses of two ranks that share the vocabulary, and the gradients, summed and put together."""
    half = len(weight) // 2 + 1
    bounds = ((0, half), (half, len(weight)))
    told = []
    for first, end in bounds:  # once for what each rank tells, once with all that was told
        head.split(first, lambda numbers: told.append(numbers) or numbers.unsqueeze(0))(
            hidden.detach(), weight.detach()[first:end], labels, z_loss, soft_cap
        )
    per_rank = len(told) // 2
    found = []
    for first, end in bounds:
        turn = iter(range(per_rank))

        def gather(numbers, turn=turn):
            at = next(turn)
            return torch.stack((told[at], told[per_rank + at]))

        part = weight.detach()[first:end].requires_grad_()
        found.append(gradients(head.split(first, gather), hidden, part, labels, z_loss, soft_cap))
    (total, nll, z, left, top), (_, _, _, right, bottom) = found
    return total, nll, z, left + right, torch.cat((top, bottom))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("rows", [4, 64])
@pytest.mark.parametrize(("z_loss", "soft_cap"), [(0.0, None), (0.3, 2.0)])
def test_fused_passes_equal_cross_entropy_in_fp64(monkeypatch, rows, z_loss, soft_cap, split):
    """What an accelerator has compiled, as it is written."""
    monkeypatch.setattr(loss_head, "_compiled", lambda function: function)
    head = ChunkedCrossEntropy(rows).compiled()
    assert head.fused and not ChunkedCrossEntropy(rows).fused
    arguments = (*problem(), z_loss, soft_cap)
    found = _split(head, *arguments) if split else gradients(head, *arguments)
    for ours, theirs in zip(found, gradients(naive, *arguments), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_fused_passes_in_bf16_are_no_farther_than_those_of_operators(monkeypatch):
    monkeypatch.setattr(loss_head, "_compiled", lambda function: function)
    hidden, weight, labels = problem(rows=64, dim=16, vocab=300, dtype=torch.bfloat16)
    exact = gradients(naive, hidden.double(), weight.double(), labels, 0.1)
    plain = gradients(ChunkedCrossEntropy(16), hidden, weight, labels, 0.1)
    for ours, theirs, wide in zip(
        gradients(ChunkedCrossEntropy(16, fused=True), hidden, weight, labels, 0.1), plain, exact, strict=True
    ):
        assert ours.dtype == theirs.dtype
        assert_no_farther(ours, theirs, wide)


@pytest.mark.filterwarnings("ignore")  # inductor itself uses what torch has deprecated
@pytest.mark.slow
@pytest.mark.parametrize(("z_loss", "soft_cap"), [(0.0, None), (0.3, 2.0)])
def test_fused_passes_compile(z_loss, soft_cap):
    """Twice with other numbers of rows: the second chunk of a batch is shorter."""
    arguments = (*problem(rows=11), z_loss, soft_cap)
    for ours, theirs in zip(gradients(ChunkedCrossEntropy(8, fused=True), *arguments), gradients(naive, *arguments), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
