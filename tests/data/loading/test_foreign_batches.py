"""Batches in other people's hands: pickled by a DataLoader, and given to models that shift labels themselves."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from forge_core.batch import IGNORE, Batch, Sources
from forge_data import StatefulLoader, for_transformers, open_stream
from forge_data.components import RandomTokens
from forge_data.section import Data

VOCABULARY = 50


def loader(**more: Any) -> StatefulLoader:
    source = RandomTokens(vocab_size=VOCABULARY, tokens=2000, document=11)
    data = Data(sequence_length=16, sources=[source], epochs=1, **more)
    return StatefulLoader(open_stream(data, workspace=Path("unused"), seed=3, global_batch=4, micro_batch=2))


def equal(one: Batch, other: Batch) -> bool:
    parts = ((one.tokens, other.tokens), (one.labels, other.labels), (one.positions, other.positions))
    return one.samples == other.samples and all(torch.equal(a, b) for a, b in parts if a is not None and b is not None)


class Rows(IterableDataset[Batch]):
    def __iter__(self) -> Any:
        return iter(loader())


def test_h9_a_batch_can_be_pickled_and_copied() -> None:
    tokens = torch.arange(6).reshape(2, 3)
    plain = Batch(tokens, tokens)
    whole = Batch(
        tokens, tokens, tokens, tokens, {"images": tokens}, (4, 5), Sources(("a", "b"), torch.tensor([0, 1]))
    ).with_mtp_targets(2)
    for batch in (plain, whole, plain.to("cpu")):
        for again in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):  # noqa: S301 (our own)
            assert isinstance(again, Batch) and equal(batch, again)
            assert (again.extras.keys() == batch.extras.keys() and again.sources is None) or again.sources.names == ("a", "b")
            assert (again.mtp_targets is None) == (batch.mtp_targets is None)
    assert torch.equal(pickle.loads(pickle.dumps(whole)).extras["images"], tokens)  # noqa: S301


def test_h9_a_dataloader_with_a_worker_gives_the_same_batches() -> None:
    expected = [copy.deepcopy(batch) for batch in loader()]
    found = list(DataLoader(Rows(), batch_size=None, num_workers=1, timeout=60))
    assert len(found) == len(expected) > 10
    assert all(equal(one, other) for one, other in zip(expected, found, strict=True))


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config).double().eval()


def our_loss(model: Any, batch: Batch, last: bool = True) -> torch.Tensor:
    """Each document of each row alone through the model, and the labels of the batch: nothing is shifted here.

    In float64; transformers turns logits into float32 before its loss.
    """
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in range(len(batch.tokens)):
        documents = torch.zeros_like(batch.tokens[row]) if batch.documents is None else batch.documents[row]
        for number in documents.unique().tolist():
            own = documents == number
            labels = batch.labels[row].clone()
            if not last:
                labels[-1] = IGNORE
            logits = model(batch.tokens[row][own][None]).logits[0]
            total = total + torch.nn.functional.cross_entropy(logits, labels[own], ignore_index=IGNORE, reduction="sum")
            count += int((labels[own] != IGNORE).sum())
    return total / count


@pytest.mark.parametrize("options", [{}, {"documents": "ignore"}, {"packing": "best_fit"}, {"packing": "pad"}])
def test_m7_the_loss_of_transformers_is_ours(tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    batch = next(iter(loader(**options)))
    if "documents" not in options:
        assert batch.documents is not None and len(batch.documents.unique()) > 1
    llama = model()
    with torch.no_grad():
        inputs = for_transformers(batch)
        torch.testing.assert_close(llama(**inputs).loss, our_loss(llama, batch), rtol=1e-6, atol=0, check_dtype=False)
        del inputs["shift_labels"]  # a model that only knows `labels` scores all but the last position of a row
        torch.testing.assert_close(llama(**inputs).loss, our_loss(llama, batch, last=False), rtol=1e-6, atol=0, check_dtype=False)
        wrong = llama(input_ids=batch.tokens, labels=batch.labels).loss  # shifted twice
    assert abs(wrong - our_loss(llama, batch)) > 1e-3


def test_m7_labels_are_moved_back_by_one() -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    batch = Batch(tokens, torch.tensor([[2, IGNORE, 4, 5, 6]]), positions=torch.tensor([[0, 1, 0, 1, 2]], dtype=torch.int32))
    inputs = for_transformers(batch)
    assert inputs["input_ids"].tolist() == [[1, 2, 3, 4, 5]]
    assert inputs["labels"].tolist() == [[IGNORE, 2, IGNORE, 4, 5]]
    assert inputs["shift_labels"].tolist() == [[2, IGNORE, 4, 5, 6]]
    assert inputs["position_ids"].tolist() == [[0, 1, 0, 1, 2]] and inputs["position_ids"].dtype == torch.int64
    assert "position_ids" not in for_transformers(Batch(tokens, tokens))
    assert batch.labels.tolist() == [[2, IGNORE, 4, 5, 6]]
