"""Of every family: what comes later, and other documents of a row, change no logit of a token."""

from typing import Any

import pytest
import torch

from forge_models.decoder import Decoder
from forge_models.hf.families import FAMILIES
from forge_models.hf.family import decoder_of
from harness.siblings import fast
from models.hf.test_new_families import CASES as MORE
from models.hf.zoo import CASES, sizes_of

ALL: dict[str, tuple[str, dict[str, Any]]] = CASES | {name: (keys.get("model_type", name), keys) for name, keys in MORE.items()}
FIRST = {kind: next(name for name, (other, _) in ALL.items() if other == kind) for kind in FAMILIES}
"""Family -> its first case; a family without one is an error here."""
EVERY = fast(*FIRST.values(), of=ALL)
LENGTHS = (9, 14, 1, 8)
"""Tokens of the documents of a row."""


def filled(case: str) -> Decoder:
    """Our model of a case in fp64, with random parameters."""
    kind, keys = ALL[case]
    model: Any = decoder_of(FAMILIES[kind], sizes_of(kind) | keys, case).build().double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
        for name, table in model.named_buffers():
            if name.endswith("router.table"):
                drawn = torch.rand(len(table), model.shape.moe.experts, generator=generator)
                table.copy_(drawn.argsort(-1)[:, : table.shape[1]])
    return model


def row() -> torch.Tensor:
    return torch.randint(0, 97, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))


def others(ids: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """The same tokens, but every one in first .. last - 1 is another."""
    changed = ids.clone()
    changed[:, first:last] = (changed[:, first:last] + 31) % 97
    return changed


@pytest.mark.parametrize("case", EVERY)
@torch.no_grad()
def test_later_tokens_change_no_earlier_logit(case: str) -> None:
    model, ids = filled(case), row()
    before = model(ids)
    for first in (1, 7, 20, ids.shape[1] - 1):
        after = model(others(ids, first, ids.shape[1]))
        torch.testing.assert_close(after[:, :first], before[:, :first], rtol=0, atol=1e-12)
        assert not torch.allclose(after[:, first:], before[:, first:], rtol=0, atol=1e-6), "the case shows nothing"


@pytest.mark.parametrize("case", EVERY)
@torch.no_grad()
def test_other_documents_of_a_row_change_no_logit(case: str) -> None:
    model, ids = filled(case), row()
    documents = torch.tensor([[number for number, length in enumerate(LENGTHS) for _ in range(length)]])
    positions = torch.tensor([[place for length in LENGTHS for place in range(length)]])
    before = model(ids, documents=documents, positions=positions)
    start = 0
    for length in LENGTHS:
        end = start + length
        around = others(others(ids, 0, start), end, ids.shape[1])
        after = model(around, documents=documents, positions=positions)
        torch.testing.assert_close(after[:, start:end], before[:, start:end], rtol=0, atol=1e-12)
        alone = model(ids[:, start:end])
        torch.testing.assert_close(alone, before[:, start:end], rtol=0, atol=1e-11)
        start = end
