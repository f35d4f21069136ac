"""Attention in chunks: what a token sees, in whole and packed rows, with a cache, in any order; its counts; what is refused."""

from typing import Any

import pytest
import torch

from forge_core.batch import PADDING, Batch
from forge_interp.attention_scores import capture_qk
from forge_interp.tap_names import InterpError
from forge_models.blocks.attention import chunk_numbers
from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig, MTPConfig
from forge_models.flops import count_flops
from forge_models.generation import generate
from forge_parallel.timing.work import Scores
from forge_train.hooks.metrics import keys_met
from forge_vlm.components.model import VLM

SIZES: dict[str, Any] = {"dim": 16, "layers": 1, "heads": 2, "ffn_dim": 24, "vocab_size": 40, "max_length": 32}
SIZE = 5


def model(**changes: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    made = DecoderConfig(**SIZES | {"attention": GQA(chunk=SIZE)} | changes).build().double().eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0, 0.4)
    return made


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 40, (rows, length), generator=torch.Generator().manual_seed(1))


def seen_by(made: torch.nn.Module, ids: torch.Tensor, **packed: torch.Tensor) -> torch.Tensor:
    """(T, T): whether the logits of a token change with another one, found by changing it."""
    found = torch.zeros(ids.shape[1], ids.shape[1], dtype=torch.bool)
    with torch.no_grad():
        before = made(ids, **packed)
        for at in range(ids.shape[1]):
            other = ids.clone()
            other[:, at] = (other[:, at] + 17) % 40
            found[:, at] = (made(other, **packed) != before).any(-1).any(0)
    return found


def test_a_token_sees_its_own_chunk_of_its_own_document() -> None:
    lengths = (12, 3, 7)
    documents = torch.tensor([[number for number, length in enumerate(lengths) for _ in range(length)]])
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    made, ids = model(), tokens(1, 22)
    chunks = [(0, at // SIZE) for at in range(22)]
    assert torch.equal(seen_by(made, ids), expected(chunks))
    pairs = list(zip(documents[0].tolist(), (positions[0] // SIZE).tolist(), strict=True))
    assert torch.equal(seen_by(made, ids, documents=documents, positions=positions), expected(pairs))


def expected(chunks: list[tuple[int, int]]) -> torch.Tensor:
    return torch.tensor([[key <= query and chunks[key] == chunks[query] for key in range(22)] for query in range(22)])


def test_two_local_layers_see_no_further_and_a_global_one_sees_all() -> None:
    ids = tokens(1, 22)
    assert torch.equal(seen_by(model(layers=2), ids), expected([(0, at // SIZE) for at in range(22)]))
    mixed = model(layers=2, attention=GQA(chunk=SIZE, global_every=2))
    assert torch.equal(seen_by(mixed, ids), torch.ones(22, 22, dtype=torch.bool).tril())


def test_numbers_differ_for_chunks_of_all_documents_and_of_padding() -> None:
    documents = torch.tensor([[0] * 12 + [1] * 6 + [PADDING] * 4])
    positions = torch.cat([torch.arange(12), torch.arange(6), torch.arange(4)])[None]
    found = chunk_numbers(documents, positions, SIZE, 12, 1)
    assert len(set(found[0].tolist())) == 3 + 2 + 1
    order = torch.randperm(22, generator=torch.Generator().manual_seed(0))
    assert torch.equal(chunk_numbers(documents[:, order], positions[:, order], SIZE, 12, 1), found[:, order])


def test_a_chunk_as_long_as_the_longest_row_hides_nothing() -> None:
    ids = tokens(2, 32)
    with torch.no_grad():
        assert torch.equal(model(attention=GQA(chunk=32))(ids), model(attention=GQA())(ids))
        assert not torch.equal(model(attention=GQA(chunk=31))(ids), model(attention=GQA())(ids))


@pytest.mark.parametrize("chunks", [(22,), (3, 1, 9, 9), (5, 5, 12)])
def test_a_cache_equals_whole_rows(chunks: tuple[int, ...]) -> None:
    made, rows = model(layers=2, attention=GQA(chunk=SIZE, global_every=2, nope_every=2, qk_norm="unit")), tokens(2, 22)
    with torch.no_grad():
        cache = made.new_cache(2, 22)  # type: ignore[operator]
        found = torch.cat([made(part, cache=cache) for part in rows.split(chunks, dim=1)], 1)
        torch.testing.assert_close(found, made(rows), rtol=0, atol=1e-11)


def test_prompts_of_different_lengths_are_continued_as_alone() -> None:
    made, prompts = model(layers=2), [[5, 6, 7, 8, 9, 10, 11], [1, 2], [3]]
    for prompt, row in zip(prompts, generate(made, prompts, max_tokens=9), strict=True):  # type: ignore[arg-type]
        ids = list(prompt)
        for token in row:
            with torch.no_grad():
                assert token == int(made(torch.tensor([ids]))[0, -1].argmax())
            ids.append(token)


def test_starts_of_documents_are_not_those_of_chunks() -> None:
    """A kernel for packed rows would let a chunk see the whole document."""
    made: Any = model(layers=2, attention=GQA(chunk=SIZE, global_every=2))
    told: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
    for name in ("0", "1"):
        made.blocks[name].attention.core = Listener(made.blocks[name].attention.core, told, name)
    documents, starts = torch.tensor([[0] * 12 + [1] * 4]), torch.tensor([0, 12], dtype=torch.int32)
    positions = torch.cat((torch.arange(12), torch.arange(4)))[None]
    made(tokens(1, 16), documents=documents, document_starts=starts, positions=positions)
    assert told["1"][0] is documents and told["1"][1] is starts
    assert told["0"][1] is None and len(set(told["0"][0][0].tolist())) == 4


class Listener:
    """A core that keeps the documents and starts that it is told."""

    def __init__(self, inner: Any, told: dict[str, Any], name: str) -> None:
        self.inner, self.told, self.name = inner, told, name

    def prepare_packed(self, documents: torch.Tensor, starts: torch.Tensor | None, *rest: Any) -> Any:
        self.told[self.name] = documents, starts
        return self.inner.prepare_packed(documents, starts, *rest)

    def __call__(self, *given: Any, **options: Any) -> torch.Tensor:
        return self.inner(*given, **options)


def test_mtp_modules_have_chunks_too() -> None:
    made: Any = model(mtp=MTPConfig(depth=1))
    assert made.mtp.depths["1"].block.attention.chunk == SIZE


@pytest.mark.parametrize("length", [1, 4, 5, 17, 20])
def test_counts_are_the_numbers_of_visible_keys(length: int) -> None:
    exact = sum(at % SIZE + 1 for at in range(length)) / length
    counts, dense = (count_flops(DecoderConfig(**SIZES, attention=one).shape) for one in (GQA(chunk=SIZE), GQA()))
    assert dict(counts.widths) == {SIZE: 2 * 2 * 8}
    width = 2 * 2 * 2 * 8
    assert counts.forward(length, causal=True) == pytest.approx(2 * counts.matrix + width * exact)
    assert counts.forward(length) == 2 * counts.matrix + width * min(SIZE, length)
    assert dense.forward(length, causal=True) == 2 * dense.matrix + width * (length + 1) / 2
    assert Scores(1.0, SIZE, chunked=True).keys(length) == pytest.approx(exact)
    window = next(iter(counts.widths))
    batch = Batch(torch.zeros(2, length), torch.zeros(2, length))
    assert keys_met([batch], length, window) == pytest.approx(exact)
    positions = torch.cat((torch.arange(length), torch.arange(7)))[None]
    packed = Batch(torch.zeros(1, length + 7), torch.zeros(1, length + 7), positions)
    assert keys_met([packed], length + 7, window) == pytest.approx((exact * length + 15 + 3) / (length + 7))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"chunk": 4, "window": 4}, "window and chunk exclude each other"),
        ({"chunk": 4, "causal": False}, "causal = false does not support a chunk"),
        ({"global_every": 2}, "need a window or a chunk"),
        ({"temperature_shift": 1}, "need a temperature"),
        ({"temperature_layers": "nope"}, "need a temperature"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        GQA(**fields)


def test_scores_of_chunks_are_not_recomputed_as_if_there_were_none() -> None:
    with pytest.raises(InterpError, match=r"blocks\.0\.attention has chunks"), capture_qk(model()):
        pass


def test_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"does not support attention\.chunk"):
        VLM(**SIZES | {"attention": GQA(chunk=SIZE), "layers": 2})


def test_heads_of_layers_that_rotate_have_unit_size() -> None:
    made: Any = model(attention=GQA(qk_norm="unit", nope_every=2), layers=2)
    kept: dict[str, torch.Tensor] = {}
    for name in ("0", "1"):
        attention = made.blocks[name].attention
        attention.core = Recorder(attention.core, kept, name)
    made(tokens(1, 9))
    sizes = {name: x.square().mean(-1) for name, x in kept.items()}
    torch.testing.assert_close(sizes["0"], torch.ones_like(sizes["0"]), rtol=0, atol=1e-3)
    assert (sizes["1"] - 1).abs().max() > 0.1  # a layer without positions has no such norm


class Recorder:
    """A core that keeps the queries that it gets."""

    def __init__(self, inner: Any, kept: dict[str, torch.Tensor], name: str) -> None:
        self.inner, self.kept, self.name = inner, kept, name
        self.prepare_packed = inner.prepare_packed

    def __call__(self, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        self.kept[self.name] = q.detach()
        return self.inner(q, *rest)
