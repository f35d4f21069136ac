"""torchdata's interface both ways: our loader in a foreign loop, and foreign loaders behind ours.

Also batches in other people's hands: pickled by a DataLoader, and given to models that shift labels themselves.
"""

import copy
import dataclasses
import itertools
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from data.steps import Drip, opened, rows_of
from forge_core.batch import IGNORE, Batch, Sources
from forge_core.errors import DataError
from forge_core.protocols.data import SourceComponent, SourceContext, StatefulIterable
from forge_data import for_transformers, open_stream
from forge_data.components import RandomTokens, TokenStore
from forge_data.loading.interop import ForeignStream, StatefulLoader, as_plain, from_plain
from forge_data.order.cursor import merge_cursors
from forge_data.section import Data, Phase

LENGTH, G = 16, 8


@pytest.fixture
def data(numbered: Callable[..., Path]) -> Data:
    return Data(sequence_length=LENGTH, sources=[TokenStore(path=str(numbered("a", 3000))), Drip()], readers=4, shuffle_buffer=3)


def loader(data: Data, **shape: Any) -> StatefulLoader:
    return StatefulLoader(opened(data, batch=G, **shape))


def rows(batches: Any) -> list[Any]:
    return [row for batch in batches for row in rows_of([batch])]


@pytest.mark.parametrize(("taken", "workers"), [(0, 0), (1, 0), (3, 0), (4, 0), (9, 0), (5, 1)])
def test_the_state_is_behind_the_last_batch(data: Data, taken: int, workers: int) -> None:
    data = dataclasses.replace(data, loader_workers=workers)
    whole = rows(itertools.islice(loader(data, micro=2), 16))
    first = loader(data, micro=2)
    begun = rows(itertools.islice(first, taken))
    state = json.loads(json.dumps(first.state_dict()))
    second = loader(data, micro=2)
    second.load_state_dict(state)
    assert begun + rows(itertools.islice(second, 16 - taken)) == whole
    again = rows(itertools.islice(second, 4))
    assert again == whole[:8]  # a further iter() begins at the beginning, as torchdata's does
    assert isinstance(second, StatefulIterable)


def test_between_steps_the_state_is_elastic_and_inside_one_it_is_not(data: Data) -> None:
    first = loader(data, micro=2)
    reading = iter(first)
    for _ in range(8):
        next(reading)
    between = first.state_dict()
    rest = rows(itertools.islice(reading, 4))
    halves = [loader(data, ranks=2, rank=rank, micro=1) for rank in (0, 1)]
    for half in halves:
        half.load_state_dict(between)
    assert [row for half in halves for row in rows(itertools.islice(half, 4))] == rest
    first = loader(data, micro=2)
    next(iter(first))
    with pytest.raises(DataError, match="middle of a step of rank 0 of 1 with micro_batch 2, but this loader is rank 1 of 2"):
        halves[1].load_state_dict(first.state_dict())


def test_the_number_of_batches_is_known_where_there_is_an_end(data: Data) -> None:
    with pytest.raises(TypeError, match="endless"):
        len(loader(data))
    phases = [Phase(start=4, global_batch=16)]
    ended = loader(Data(sequence_length=LENGTH, sources=data.sources[:1], epochs=1, phases=phases), micro=4)
    assert len(ended) == len(list(ended)) == 4 * 2 + (ended.stream.steps - 4) * 4


class Counter:
    """A foreign loader: batches numbered from the state on, on this rank."""

    fingerprint = "counter"

    def __init__(self, context: SourceContext, length: int = LENGTH) -> None:
        self.context, self.length = context, length
        self.position = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.position < 30:
            self.position += 1
            ids = torch.full((self.context.micro_batch, self.length), 100 * self.context.rank + self.position)
            yield {"tokens": ids, "labels": ids}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, 7: (b"\xff", torch.arange(3), np.float64(0.5))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state[7][0] == b"\xff" and state[7][1].tolist() == [0, 1, 2]  # type: ignore[index]
        self.position = state["position"]


@dataclass(frozen=True, kw_only=True)
class Foreign(SourceComponent):
    """A component whose `build` gives a loader."""

    length: int = LENGTH

    def build(self, context: SourceContext) -> Counter:
        return Counter(context, self.length)


def test_a_foreign_loader_is_a_stream() -> None:
    recipe = Data(sequence_length=LENGTH, sources=[Foreign()])
    streams = [opened(recipe, batch=G, ranks=2, rank=rank, micro=2) for rank in (0, 1)]
    assert all(isinstance(stream, ForeignStream) for stream in streams)
    readings = [stream.from_cursor(stream.start()) for stream in streams]
    cursors: list[Any] = []
    for step in range(4):
        for rank, reading in enumerate(readings):
            batches, after = next(reading)
            assert [int(batch.tokens[0, 0]) for batch in batches] == [100 * rank + 2 * step + 1, 100 * rank + 2 * step + 2]
            cursors.append(after)
    stored = json.loads(json.dumps(merge_cursors(cursors[-2:])))
    again = opened(recipe, batch=G, ranks=2, rank=1, micro=2)
    batches, after = next(again.from_cursor(stored))
    assert int(batches[0].tokens[0, 0]) == 109 and after["step"] == 5
    assert again.tokens_at(4) == G * LENGTH and again.lr_scale(3) == 1.0
    assert len(list(again.from_cursor(stored))) == 30 // 2 - 4  # it ends with its last whole step
    with pytest.raises(DataError, match="is valid only for 2 data ranks and a global batch of 8, not for 1 and 8"):
        opened(recipe, batch=G, micro=2).from_cursor(stored)
    with pytest.raises(DataError, match="no state of rank 1"):
        again.from_cursor(cursors[0])
    with pytest.raises(DataError, match="does not belong to the loader"):
        again.from_cursor({"version": 1, "sample": 3})


def test_what_a_foreign_loader_cannot_do_is_refused() -> None:
    with pytest.raises(DataError, match="cannot be mixed"):
        opened(Data(sources=[Foreign(label="mine"), Drip()]), batch=G)
    with pytest.raises(DataError, match=r"does not support data\.epochs"):
        opened(Data(sources=[Foreign()], epochs=1), batch=G)
    stream = opened(Data(sources=[Foreign()]), batch=G, micro=4)
    stream.loader.context = dataclasses.replace(stream.loader.context, micro_batch=3)
    with pytest.raises(DataError, match=r"yields tokens \(3, 16\) .* must be \(4, length\)"):
        next(stream.from_cursor(stream.start()))
    assert stream.entropy() is None


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.full((LENGTH,), index)
        return {"tokens": ids, "labels": ids}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own call
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_own_loader_resumes_exactly_behind_ours(workers: int) -> None:
    pytest.importorskip("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    def stream() -> ForeignStream:
        torch.manual_seed(3)
        made = StatefulDataLoader(Rows(), batch_size=4, shuffle=True, num_workers=workers)
        return ForeignStream(made, "torchdata", rank=0, ranks=1, global_batch=8, micro_batch=4)

    def ids(found: Any) -> list[int]:
        return [int(row[0]) for batches, _ in found for batch in batches for row in batch.tokens]

    first = stream()
    found = list(first.from_cursor(first.start()))
    assert sorted(ids(found)) == list(range(40))
    stored = json.loads(json.dumps(found[1][1]))
    torch.manual_seed(99)
    second = stream()
    assert ids(second.from_cursor(stored)) == ids(found[2:])


def test_plain_values_come_back_as_they_were() -> None:
    state = {
        "a": [1, 2.5, None, True, "x"],
        3: (b"\x00\xff", {"t": torch.tensor([[1, 2]], dtype=torch.int16)}),
        "n": np.arange(3, dtype=np.uint8),
        "s": np.float32(1.5),
        "__forge__": "taken",
    }
    plain = json.loads(json.dumps(as_plain(state, "loader")))
    back = from_plain(plain)
    assert back["a"] == state["a"] and back[3][0] == b"\x00\xff" and back["__forge__"] == "taken"
    assert torch.equal(back[3][1]["t"], torch.tensor([[1, 2]], dtype=torch.int16)) and back[3][1]["t"].dtype == torch.int16
    assert back["n"].tolist() == [0, 1, 2] and back["n"].dtype == np.uint8 and back["s"] == np.float32(1.5)
    with pytest.raises(DataError, match=r"the loader 'loader' has a object"):
        as_plain({"x": [object()]}, "loader")


def test_a_batch_of_the_loader_may_be_one_of_ours() -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)

    class Ours(Counter):
        def __iter__(self) -> Iterator[Any]:
            yield Batch(tokens=ids, labels=ids, samples=(7, 8))

    context = SourceContext(Path(), None, 4, print, micro_batch=2)
    stream = ForeignStream(Ours(context), "ours", rank=0, ranks=1, global_batch=2, micro_batch=2)
    ((batches, _),) = list(stream.from_cursor(stream.start()))
    assert batches[0].samples == (7, 8)


VOCABULARY = 50


def batch_loader(**more: Any) -> StatefulLoader:
    source = RandomTokens(vocab_size=VOCABULARY, tokens=2000, document=11)
    data = Data(sequence_length=16, sources=[source], epochs=1, **more)
    return StatefulLoader(open_stream(data, workspace=Path("unused"), seed=3, global_batch=4, micro_batch=2))


def equal(one: Batch, other: Batch) -> bool:
    parts = ((one.tokens, other.tokens), (one.labels, other.labels), (one.positions, other.positions))
    return one.samples == other.samples and all(torch.equal(a, b) for a, b in parts if a is not None and b is not None)


class Batches(IterableDataset[Batch]):
    def __iter__(self) -> Any:
        return iter(batch_loader())


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
    expected = [copy.deepcopy(batch) for batch in batch_loader()]
    found = list(DataLoader(Batches(), batch_size=None, num_workers=1, timeout=60))
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
    batch = next(iter(batch_loader(**options)))
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
