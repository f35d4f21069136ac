"""The device itself: its numbers are those of a CPU, its memory is NaN before and after, its collectives are NCCL's."""

import ctypes
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from harness.pool import World

pytestmark = pytest.mark.rehearsal


def _found() -> dict[str, Any]:
    before = torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.is_initialized()
    torch.cuda.set_device(3)
    after = torch.cuda.is_initialized()
    here = torch.cuda.current_device(), str(torch.zeros(1, device="cuda").device)
    with torch.cuda.device(1):
        inside = str(torch.zeros(1, device="cuda").device)
    return {
        "before": before,
        "after": after,
        "here": here,
        "inside": inside,
        "nccl": dist.is_nccl_available(),
    }


def test_it_is_found_as_a_real_one_is(devices: World) -> None:
    assert devices.run(_found, 1, group=False, fresh=True) == [
        {"before": (True, 8, False), "after": True, "here": (3, "cuda:3"), "inside": "cuda:1", "nccl": True}
    ]
    assert not torch.cuda.is_available(), "the test process has none"


def _trained(device: str) -> list[torch.Tensor]:
    """Three steps of a small network with attention, an embedding, views, sorting, and all that a step of AdamW does."""
    torch.manual_seed(0)
    tokens = torch.randint(11, (2, 6)).to(device)
    weights = [torch.randn(*shape).to(device).requires_grad_() for shape in ((11, 8), (8, 24), (8, 11))]
    optimizer = torch.optim.AdamW(weights, lr=1e-2, fused=True)
    seen: list[torch.Tensor] = []
    for _ in range(3):
        q, k, v = (F.embedding(tokens, weights[0]) @ weights[1]).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)).masked_fill(~torch.ones(6, 6, dtype=torch.bool, device=device).tril(), -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        logits = mixed @ weights[2]
        order = logits.detach().sort(dim=-1, stable=True).indices
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + logits.gather(-1, order)[..., 0].square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    assert all(str(tensor.device).startswith(device) for tensor in (*seen, *weights, order))
    return [tensor.detach().cpu() for tensor in (*seen, *weights, order)]


def test_training_gives_the_bits_of_a_cpu(devices: World) -> None:
    (found,) = devices.run(_trained, 1, "cuda", group=False)
    for one, other in zip(_trained("cpu"), found, strict=True):
        assert torch.equal(one, other)


def _copies() -> dict[str, bool]:
    source = torch.arange(12.0).view(3, 4)
    there = source.cuda()
    column, wide = there[:, 1], there.to(torch.float64)
    column.mul_(10)
    generators = [torch.Generator(device).manual_seed(5) for device in ("cpu", "cuda")]
    drawn = [torch.empty(7, device=one.device).normal_(generator=one).cpu() for one in generators]
    torch.manual_seed(3)
    first = torch.rand(4, device="cuda")
    torch.rand(4)  # of the host's stream, which is another one
    torch.manual_seed(3)
    storage = there.untyped_storage()
    return {
        "there and back": torch.equal(wide.cpu(), source.double()),
        "a view writes through": torch.equal(there.cpu()[:, 1], source[:, 1] * 10),
        "the source is its own": source[1, 1] == 5,
        "views share their storage": column.untyped_storage().data_ptr() == storage.data_ptr(),
        "generators": torch.equal(*drawn),
        "global seed": torch.equal(first, torch.rand(4, device="cuda")),
        "pinned": source.pin_memory().is_pinned() and not source.is_pinned(),
        "between devices": torch.equal(there.to("cuda:1").cpu(), there.cpu()),
    }


def test_copies_views_and_random_numbers(devices: World) -> None:
    (found,) = devices.run(_copies, 1, group=False)
    assert all(found.values()), found


def _memory() -> dict[str, Any]:
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
    fresh = [torch.empty(5, device="cuda", dtype=kind).float().isnan().all().item() for kind in kinds]
    before = torch.cuda.memory_allocated()
    made, product = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda") * 2
    held = torch.cuda.memory_allocated() - before
    addresses = made.data_ptr(), product.data_ptr()
    del made
    freed = set((ctypes.c_ubyte * 4000).from_address(addresses[0]))
    del product
    after = torch.cuda.memory_allocated() - before
    return {"fresh": fresh, "held": held, "freed": freed, "after": after, "peak": torch.cuda.max_memory_allocated() - before}


def test_memory_is_nan_before_and_after(devices: World) -> None:
    (found,) = devices.run(_memory, 1, group=False)
    assert found["fresh"] == [True] * 5
    assert found["freed"] == {255}
    assert found["held"] == 8000 and found["after"] == 0 and found["peak"] >= 8000


def _used_after_free() -> dict[str, Any]:
    whole = torch.ones(6, device="cuda")
    view, storage = whole[2:], whole.untyped_storage()
    storage.resize_(0)
    sizes = storage.size(), view.shape, view.view(2, 2).shape
    try:
        view.sum()
        said = ""
    except RuntimeError as error:
        said = str(error)
    storage.resize_(24)
    again = view.isnan().all().item()
    whole.fill_(3)
    return {"sizes": sizes, "said": said, "nan": again, "then": view.sum().item()}


def test_a_use_after_free_shows(devices: World) -> None:
    """FSDP frees what it gathered by `resize_(0)`, under views that live on."""
    (found,) = devices.run(_used_after_free, 1, group=False)
    assert found["sizes"] == (0, (4,), (2, 2))
    assert "use after free" in found["said"] and "aten::sum" in found["said"]
    assert found["nan"] is True
    assert found["then"] == 12


def _refused() -> list[str]:
    one, other = torch.ones(3, device="cuda"), torch.ones(3)
    index = torch.tensor([0, 2])
    calls: list[Callable[[], Any]] = [
        lambda: one + other,
        lambda: other.addcmul_(one, one),
        lambda: one.index_select(0, index),
        lambda: F.embedding(index, one.view(3, 1)),
        lambda: one + one.to("cuda:1"),
        lambda: torch.cat([one, other]),
    ]
    return [_error(call) for call in calls]


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def test_tensors_of_two_devices_are_refused_as_cuda_refuses_them(devices: World) -> None:
    (found,) = devices.run(_refused, 1, group=False)
    assert [said for said in found if "same device" not in said or "cuda:0" not in said] == []


def _collectives() -> dict[str, bool]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=size)
    mine = torch.full((4,), float(rank + 1), device="cuda")
    total = mine.clone()
    dist.all_reduce(total)
    gathered = torch.empty(4 * size, device="cuda")
    dist.all_gather(list(gathered.chunk(size)), mine)
    cut = torch.empty(2, device="cuda")
    dist.reduce_scatter(cut, list(mine.chunk(size)))
    swapped = torch.empty(4, device="cuda")
    dist.all_to_all_single(swapped, mine)
    received = torch.empty(4, device="cuda")
    other = 1 - rank
    operations = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, received, other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    dist.barrier()
    on_host = torch.ones(2)
    dist.all_reduce(on_host)
    return {
        "backend": dist.get_backend_config() == "cpu:gloo,cuda:nccl",
        "all_reduce": total.eq(3).all().item() is True and total.device == torch.device("cuda", rank),
        "all_gather": gathered.tolist() == [1.0] * 4 + [2.0] * 4,
        "reduce_scatter": cut.tolist() == [3.0] * 2,
        "all_to_all": swapped.tolist() == [1.0] * 2 + [2.0] * 2,
        "received": received.eq(other + 1).all().item() is True,
        "host": on_host.tolist() == [2.0, 2.0],
    }


def test_collectives_of_nccl(devices: World) -> None:
    for found in devices.run(_collectives, 2, group=False):
        assert all(found.values()), found
