"""The device counts where the host waits for it, as it would for a GPU, and knows the line."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.pool import World

pytestmark = pytest.mark.rehearsal


def _waiting(do: Callable[[], Any]) -> dict[str, int]:
    from rehearsal.device.waits import counted

    with counted() as found:
        do()
    kinds: Counter[str] = Counter()
    for site, count in found.items():
        kinds[site.kind] += count
    return dict(kinds)


def _earlier(values: torch.Tensor, again: int = 0) -> None:
    event = torch.cuda.Event()
    event.record()
    values + 1
    for _ in range(again):
        event.record()
    event.synchronize()


def _waits() -> dict[str, dict[str, int]]:
    x, mask = torch.ones(4, device="cuda", requires_grad=True), torch.tensor([True, False, True, True], device="cuda")
    host, values, index = torch.ones(4), torch.zeros(4, device="cuda"), torch.tensor([0, 1])
    pinned = host.pin_memory()
    calls: dict[str, Callable[[], Any]] = {
        "item": lambda: x.sum().item(),
        "bool": lambda: bool((x > 0).all()),
        "tolist": lambda: x.tolist(),
        "tensor": lambda: torch.tensor([1, 2], device="cuda"),
        "number": lambda: torch.tensor(1.0, device="cuda"),
        "cpu": lambda: x.cpu(),
        "to": lambda: host.to("cuda"),
        "pageable, to the device, not waited for": lambda: host.to("cuda", non_blocking=True),
        "pinned, to the device, not waited for": lambda: pinned.to("cuda", non_blocking=True),
        "pageable, to the host, not waited for": lambda: host.copy_(values, non_blocking=True),
        "pinned, to the host, not waited for": lambda: pinned.copy_(values, non_blocking=True),
        "nonzero": lambda: mask.nonzero(),
        "mask": lambda: x[mask],
        "list": lambda: x[[0, 1]],
        "index of the host": lambda: x[index],
        "written by a mask": lambda: values.__setitem__(mask, values[:3] + 1),
        "written by an index of the host": lambda: values.__setitem__(index, 1.0),
        "filled mask": lambda: values.__setitem__(mask, 0.0),
        "number of repetitions": lambda: values.repeat_interleave(mask.long()),
        "known number of repetitions": lambda: values.repeat_interleave(mask.long(), output_size=3),
        "synchronize": lambda: torch.cuda.synchronize(),
        "event": lambda: torch.cuda.current_stream().record_event().synchronize(),
        "event with work behind it": lambda: _earlier(values),
        "event behind the work": lambda: _earlier(values, 1),
        "device alone": lambda: ((x * 2 + torch.full((), 3.0, device="cuda")).softmax(0).sum()).backward(),
        "index of the device": lambda: values[torch.arange(3, device="cuda")],
    }
    for call in calls.values():
        call()  # what is only done once is over
    return {name: _waiting(call) for name, call in calls.items()}


def test_waits_are_counted(devices: World) -> None:
    (found,) = devices.run(_waits, 1, group=False)
    assert found == {
        "item": {"item": 1},
        "bool": {"item": 1},
        "tolist": {"device to host": 1},
        "tensor": {"host to device": 1},
        "number": {"host to device": 1},
        "cpu": {"device to host": 1},
        "to": {"host to device": 1},
        "pageable, to the device, not waited for": {},
        "pinned, to the device, not waited for": {},
        "pageable, to the host, not waited for": {"device to host": 1},
        "pinned, to the host, not waited for": {},
        "nonzero": {"nonzero": 1},
        "mask": {"nonzero": 1},
        "list": {"host to device": 1},
        "index of the host": {"host to device": 1},
        "written by a mask": {"index by a mask": 1},
        "written by an index of the host": {"index on the host": 1},
        "filled mask": {},
        "number of repetitions": {"repeat_interleave": 1},
        "known number of repetitions": {},
        "synchronize": {"synchronize": 1},
        "event": {"synchronize": 1},
        "event with work behind it": {"event with work behind it": 1},
        "event behind the work": {"synchronize": 1},
        "device alone": {},
        "index of the device": {},
    }


def _sites() -> list[tuple[str, str, str]]:
    from forge_models.blocks.attention import LocalAttention
    from rehearsal.device.waits import counted

    documents = torch.zeros(2, 4, dtype=torch.int32, device="cuda")
    with counted() as found:
        LocalAttention("varlen").prepare(documents, 4, None, documents.device)
        documents.tolist()
    return sorted((site.file, site.function, site.kind) for site in found)


def test_a_wait_belongs_to_the_innermost_line_of_forge(devices: World) -> None:
    (found,) = devices.run(_sites, 1, group=False)
    assert found == [
        ("forge_models/blocks/attention.py", "boundaries", "nonzero"),
        ("torch", "", "device to host"),
    ]
