"""Runs with mixtures, phases and streams: every layout reads the same samples, killed anywhere and taken up anywhere.

Also the keys of sources that the mixture reads.
"""

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from data import foreign
from data.steps import Drip, Row, opened, steps_of
from forge_core.component import Component
from forge_core.errors import ConfigError, DataError
from forge_core.protocols.data import SourceComponent
from forge_core.registry import Registry
from forge_data import example_corpus
from forge_data.components import (
    Arrow,
    Bytes,
    Conversations,
    Datatrove,
    Exercises,
    HuggingFace,
    JsonLines,
    Labeled,
    Llmc,
    Megatron,
    Parquet,
    RandomTokens,
    Stdlib,
    TextFiles,
    Tokens,
    TokenStore,
)
from forge_data.order.cursor import fingerprint_of
from forge_data.order.phases import base_weights, label_of, labels_of, max_epochs_of, weight_of
from forge_data.section import Data, Phase
from forge_data.sources.megatron import MegatronWriter
from forge_data.sources.store import StoreSource

LENGTH, G = 8, 8


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One component of each kind of source."""
    from forge_data.sources.store_writer import StoreWriter

    folder = tmp_path_factory.mktemp("corpora")
    rng = np.random.default_rng(0)
    for name, tokens, shard in (("one", 1500, 1 << 20), ("sharded", 900, 200)):
        with StoreWriter(folder / name, dtype="uint16", shard_tokens=shard) as writer:
            for start in range(0, tokens, 13):
                ids = np.arange(start, start + int(rng.integers(1, 26))) + 1
                writer.add(np.append(ids, 0), np.array([len(ids) + 1]))
            writer.commit()
    np.save(folder / "ids.npy", (np.arange(700) % 23).astype(np.uint16))
    with MegatronWriter(folder / "megatron", "int32") as writer:
        writer.add(np.arange(1, 601), np.append(np.arange(17, 600, 17), 600))
        writer.commit()
    (folder / "records").mkdir()
    for shard in range(3):
        lines = [json.dumps({"ids": [100 * shard + number] * (number % 13 + 1)}) for number in range(30)]
        (folder / "records" / f"{shard}.jsonl").write_text("\n".join(lines))
    records = JsonLines(path=str(folder / "records"), ids="ids", eos=0)
    texts = [f"text {number} " * (number % 5 + 1) for number in range(25)]
    (folder / "texts").mkdir()
    for number, text in enumerate(texts):
        (folder / "texts" / f"{number:02}.txt").write_text(text)
    asked = [{"prompt": text[: number % 7], "completion": text[:9]} for number, text in enumerate(texts)]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, asked)))
    pieces = [[*range(number, number + number % 9 + 2), 0] for number in range(1, 90)]
    for shard in range(2):
        half = datasets.Dataset.from_dict({"text": texts[shard::2], "ids": pieces[: len(texts)][shard::2]})
        half.to_parquet(str(folder / f"{shard}.parquet"))
        with pyarrow.ipc.new_file(folder / f"{shard}.arrow", half.data.table.schema) as file:
            file.write_table(half.data.table)
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder / "saved", num_shards=2)
    np.array(sum(pieces, []), dtype="<u4").tofile(folder / "raw.bin")  # noqa: RUF017
    eager = HuggingFace(path=str(folder / "saved"))
    by_rows = Parquet(path=str(folder / "*.parquet"))
    return {
        "llmc": Llmc(path=str(foreign.llmc(folder / "llmc.bin", sum(([999, *piece] for piece in pieces), []))), bos=999),  # noqa: RUF017
        "datatrove": Datatrove(path=str(foreign.datatrove(folder / "a.ds", pieces))),
        "raw": Tokens(path=str(folder / "raw.bin"), dtype="uint32", eos=0),
        "text": TextFiles(path=str(folder / "texts")),
        "stdlib": Stdlib(split="held_out", held_out=0.01),
        "exercises": Exercises(count=300, letters=3, too_long="skip"),
        "parquet": by_rows,
        "streamed_parquet": dataclasses.replace(by_rows, stream=True),
        "arrow": Arrow(path=str(folder / "*.arrow"), ids="ids", eos=0),
        "huggingface": eager,
        "streamed_huggingface": dataclasses.replace(eager, stream=True),
        "megatron": Megatron(path=str(folder / "megatron")),
        "records": records,
        "streamed": dataclasses.replace(records, stream=True),
        "chat": Conversations(path=str(folder / "asked.jsonl"), format="prompt_completion", too_long="truncate"),
        "labeled": Labeled(path=example_corpus.labeled(folder), labels=example_corpus.LABELS, too_long="truncate"),
        "workspace": folder / "work",
        "one": TokenStore(path=str(folder / "one")),
        "sharded": TokenStore(path=str(folder / "sharded")),
        "tokens": Tokens(path=str(folder / "ids.npy"), eos=0),
        "random": RandomTokens(vocab_size=90, tokens=500, document=21),
        "drip": Drip(),
    }


COUNTED = [
    *("one", "sharded", "tokens", "random", "megatron", "records", "llmc", "datatrove", "raw", "text", "parquet", "arrow"),
    "huggingface",
]
STREAMED = ["drip", "streamed", "streamed_parquet", "streamed_huggingface"]
WEIGHT = st.integers(0, 8).map(lambda value: value / 4)


@st.composite
def recipes(draw: Any) -> Callable[[dict[str, Any]], Data]:
    """A random recipe: sources of several kinds, weights, phases, order, packing."""
    offered = COUNTED + STREAMED * draw(st.integers(0, 1))
    names = draw(st.lists(st.sampled_from(offered), min_size=1, max_size=4, unique=True))
    streamed = any(name in STREAMED for name in names)
    packing = "concatenate" if streamed else draw(st.sampled_from(["concatenate", "best_fit", "pad"]))
    weights = draw(st.lists(WEIGHT, min_size=len(names), max_size=len(names)).filter(any))
    phases = []
    for start in sorted(draw(st.sets(st.integers(1, 9), max_size=2))):
        changed = draw(st.dictionaries(st.sampled_from(names), WEIGHT.filter(bool), max_size=2)) if len(names) > 1 else {}
        length = draw(st.none() | st.sampled_from([4, 8, 16])) if packing == "concatenate" else None
        batch = draw(st.none() | st.sampled_from([8, 16]))
        ramping = bool(phases) and start < phases[-1].start + phases[-1].ramp  # nothing may begin inside a ramp
        if (changed or length or batch) and not ramping:
            ramp = draw(st.sampled_from([0, 0, 2])) if changed else 0
            phases.append(Phase(start=start, weights=changed, sequence_length=length, global_batch=batch, ramp=ramp))
    most = draw(st.none() | st.sampled_from([0.4, 1.0, 2.5]))
    order = draw(st.sampled_from(["permute", "block", "none"]))
    temperature = draw(st.sampled_from([1.0, 2.0]))

    def make(corpora: dict[str, Any]) -> Data:
        sources = [
            dataclasses.replace(
                corpora[name],
                label=name,
                weight=weight,
                max_epochs=most if index == 0 and name not in STREAMED and len(names) > 1 else None,
            )
            for index, (name, weight) in enumerate(zip(names, weights, strict=True))
        ]
        return Data(
            sequence_length=LENGTH,
            sources=sources,
            phases=phases,
            packing=packing,
            shuffle=order,
            shuffle_block=3,
            shuffle_window=2,
            shuffle_buffer=4,
            readers=4,
            temperature=temperature,
            tokenizer=Bytes(),
        )

    return make


SHAPES = st.sampled_from([(1, 1), (1, 8), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)])


@given(recipe=recipes(), before=SHAPES, after=SHAPES, kill=st.integers(0, 11))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_fault_20_killed_anywhere_and_resumed_anywhere_equals_the_uninterrupted_run(
    corpora: dict[str, Any], recipe: Any, before: tuple[int, int], after: tuple[int, int], kill: int
) -> None:
    data, workspace = recipe(corpora), corpora["workspace"]
    expected, end = steps_of(data, 13, batch=G, workspace=workspace)
    first, cursor = steps_of(data, kill, batch=G, ranks=before[0], micro=before[1], workspace=workspace)
    assert first == expected[:kill]
    stored = json.loads(json.dumps(cursor))
    rest, last = steps_of(data, 13 - kill, batch=G, ranks=after[0], micro=after[1], cursor=stored, workspace=workspace)
    assert rest == expected[kill:] and last == end


@given(
    recipe=recipes(), kills=st.lists(st.integers(0, 5), min_size=3, max_size=3), shapes=st.lists(SHAPES, min_size=4, max_size=4)
)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_fault_20_three_resumes_read_what_one_run_reads(corpora: dict[str, Any], recipe: Any, kills: Any, shapes: Any) -> None:
    """Wherever they fall: often twice in one epoch, and in the step in which a phase begins."""
    data, workspace = recipe(corpora), corpora["workspace"]
    most = 4 if any(source.label in STREAMED for source in data.sources) else 8  # type: ignore[attr-defined]
    expected, end = steps_of(data, 16, batch=G, workspace=workspace)
    found, cursor = [], None
    for steps, (ranks, micro) in zip([*kills, 16 - sum(kills)], shapes, strict=True):
        given = {"ranks": min(ranks, most), "micro": micro, "workspace": workspace}
        more, cursor = steps_of(data, steps, batch=G, cursor=cursor, **given)
        found += more
        cursor = json.loads(json.dumps(cursor))
    assert found == expected and cursor == json.loads(json.dumps(end))


def test_fault_20_a_resume_at_every_end_of_an_epoch_and_switch_of_a_phase(corpora: dict[str, Any]) -> None:
    """Phases begin after 7 and 12 steps of 8 rows, the second one in stairs; the 87 rows of `tokens` are used up behind it."""
    sources = [dataclasses.replace(corpora[name], label=name) for name in ("tokens", "random")]
    phases = [Phase(start=7, weights={"random": 3.0}), Phase(start=12, weights={"random": 0.0}, ramp=3)]
    data = Data(sequence_length=LENGTH, sources=sources, phases=phases)
    expected, _ = steps_of(data, 28, batch=G)
    found, cursor = [], None
    for at, until in itertools.pairwise([0, 6, 7, 8, 12, 13, 14, 15, 17, 18, 19, 20, 21, 28]):
        more, cursor = steps_of(data, until - at, batch=G, ranks=1 + at % 2, cursor=cursor)
        found += more
        cursor = json.loads(json.dumps(cursor))
    assert found == expected


@pytest.mark.parametrize("kind", [*COUNTED, "stdlib", "chat", "labeled", *STREAMED])
def test_fault_18_and_20_a_run_over_every_kind_of_source_moves_between_worlds(corpora: dict[str, Any], kind: str) -> None:
    most = 2 if kind == "streamed_huggingface" else 8  # whose library takes a second to import and to open a data set
    packing = "best_fit" if getattr(corpora[kind], "keeps_documents", False) else "concatenate"
    data = Data(sequence_length=LENGTH, sources=[corpora[kind]], shuffle_buffer=4, tokenizer=Bytes(), packing=packing)
    expected, end = steps_of(data, 6, batch=G, workspace=corpora["workspace"])
    workers = 2 if kind in ("llmc", "raw", "text", *STREAMED) else 0
    found, cursor = [], None
    for steps, ranks, ahead in ((1, 1, 0), (1, most, 0), (2, 1, workers), (2, 2, 0)):
        more, cursor = steps_of(data, steps, batch=G, ranks=ranks, workers=ahead, cursor=cursor, workspace=corpora["workspace"])
        found += more
        cursor = json.loads(json.dumps(cursor))
    assert found == expected and cursor == json.loads(json.dumps(end))


def test_no_kind_of_source_is_left_out(corpora: dict[str, Any]) -> None:
    registry = Registry()
    ours = [entry for entry in registry.of("forge.sources") if entry.distribution == "forge-data"]
    tested = {type(component) for component in corpora.values()}
    assert ours and {registry.load("forge.sources", entry.name) for entry in ours} <= tested
    assert set(COUNTED) | set(STREAMED) | {"stdlib", "chat", "exercises", "labeled", "workspace"} == corpora.keys()


@given(recipe=recipes(), workers=st.sampled_from([1, 2, 8]), shape=SHAPES, kill=st.integers(0, 5))
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
def test_fault_18_the_same_with_loader_workers(
    corpora: dict[str, Any], recipe: Any, workers: int, shape: tuple[int, int], kill: int
) -> None:
    data, workspace = recipe(corpora), corpora["workspace"]
    assume(all(source.label != "streamed_huggingface" for source in data.sources))  # type: ignore[attr-defined]  # as above
    ranks, micro = min(shape[0], 2 if workers < 8 else 1), shape[1]
    expected, end = steps_of(data, 7, batch=G, workspace=workspace)
    first, cursor = steps_of(data, kill, batch=G, workspace=workspace)
    rest, last = steps_of(
        data,
        7 - kill,
        batch=G,
        ranks=ranks,
        micro=micro,
        workers=workers,
        cursor=json.loads(json.dumps(cursor)),
        workspace=workspace,
    )
    assert first + rest == expected and last == end


def text_of(rows: list[Row]) -> Counter[tuple[int, ...]]:
    return Counter(row[1] for row in rows)


def test_lengths_and_batches_change_and_nothing_is_read_twice(corpora: dict[str, Any]) -> None:
    """One epoch, in order, while rows grow from 4 over 8 to 16 tokens: together the rows are the corpus."""
    phases = [
        Phase(start=4, sequence_length=8),
        Phase(start=8, sequence_length=16, global_batch=4),
        Phase(start=12, global_batch=8),
    ]
    data = Data(sequence_length=4, sources=[corpora["one"]], shuffle="none", phases=phases, epochs=1)
    stream = opened(data, batch=G)
    steps, _ = steps_of(data, stream.steps, batch=G)
    shapes = [(len(step), len(step[0][1])) for step in steps]
    assert shapes[:13] == [(8, 4)] * 4 + [(8, 8)] * 4 + [(4, 16)] * 4 + [(8, 16)]
    assert [stream.tokens_at(step) for step in (0, 4, 8, 12)] == [32, 64, 64, 128]
    source = StoreSource(Path(corpora["one"].path))  # type: ignore[attr-defined]
    flat = [token for step in steps for row in step for token in row[1]]
    assert flat == source.read(0, len(flat)).tolist()
    assert [row[0] for step in steps for row in step] == list(range(sum(len(step) for step in steps)))
    shuffled = dataclasses.replace(data, shuffle="permute")
    again = [row for step in steps_of(shuffled, stream.steps, batch=G)[0] for row in step]
    # A sample is 16 tokens in every phase; each is read once, whatever the rows it is cut into.
    starts = [source.read(16 * unit, 16 * unit + 16).tolist() for unit in range((source.tokens - 1) // 16)]
    tokens = [token for row in again for token in row[1]]
    found = [tokens[start : start + 16] for start in range(0, len(tokens), 16)]
    assert len({tuple(unit) for unit in found}) == len(found) and all(unit in starts for unit in found)


@pytest.mark.parametrize(("ranks", "micro"), [(2, 1), (2, 4), (8, 1)])
def test_a_rank_may_begin_inside_a_sample(corpora: dict[str, Any], ranks: int, micro: int) -> None:
    """Rows of 4 tokens, samples of 16: with 8 ranks each has a quarter of a sample."""
    phases = [Phase(start=3, sequence_length=16)]
    data = Data(sequence_length=4, sources=[corpora["one"], corpora["random"]], phases=phases)
    assert steps_of(data, 5, batch=G, ranks=ranks, micro=micro) == steps_of(data, 5, batch=G)


def test_phases_ahead_may_change_and_phases_behind_may_not(corpora: dict[str, Any]) -> None:
    sources = [dataclasses.replace(corpora[name], label=name) for name in ("one", "random")]
    data = Data(sequence_length=LENGTH, sources=sources, phases=[Phase(start=3, weights={"one": 4})])
    cursor = steps_of(data, 5, batch=G)[1]
    anneal = Phase(start=6, weights={"one": 0})
    longer = dataclasses.replace(data, phases=[*data.phases, anneal])
    steps = steps_of(longer, 4, batch=G, cursor=cursor)[0]
    assert steps[0] == steps_of(data, 1, batch=G, cursor=cursor)[0][0]
    assert steps == steps_of(longer, 9, batch=G)[0][5:]
    changed = dataclasses.replace(data, phases=[Phase(start=3, weights={"one": 3})])
    with pytest.raises(DataError, match=r"phases\.3\.weights\.one was 4, is 3"):
        steps_of(changed, 1, batch=G, cursor=cursor)
    with pytest.raises(DataError, match="is not the first of a step"):
        steps_of(data, 1, batch=G, cursor=dict(cursor) | {"sample": 41})


def test_the_identity_of_a_cursor_is_that_of_its_step(corpora: dict[str, Any]) -> None:
    phases = [Phase(start=2, weights={"one": 4}), Phase(start=4, sequence_length=4), Phase(start=5, lr_scale=0.5)]
    sources = [dataclasses.replace(corpora[name], label=name) for name in ("one", "random")]
    stream = opened(Data(sequence_length=LENGTH, sources=sources, phases=phases), batch=G)
    steps = zip(range(1, 9), stream.from_cursor(stream.start()), strict=False)
    cursors = {0: stream.start()} | {step: cursor for step, (_, cursor) in steps}
    for step, cursor in cursors.items():
        identity = stream.order.identity_at(step)
        assert (cursor["identity"], cursor["fingerprint"]) == (identity, fingerprint_of(identity))
    assert len({cursor["fingerprint"] for cursor in cursors.values()}) == 3


def test_batches_of_phases_fit_the_ranks(corpora: dict[str, Any]) -> None:
    data = Data(sequence_length=LENGTH, sources=[corpora["one"]], phases=[Phase(start=3, global_batch=12)])
    opened(data, batch=G, ranks=4)
    with pytest.raises(ConfigError, match=r"phases\.0\.global_batch: 12 is not a multiple of 8 = 8 data ranks x micro_batch 1"):
        opened(data, batch=G, ranks=8)


def test_epochs_of_a_source_are_limited_and_the_others_take_over(corpora: dict[str, Any]) -> None:
    small = dataclasses.replace(corpora["random"], label="small", max_epochs=1.5)
    big = dataclasses.replace(corpora["one"], label="big")
    stream = opened(Data(sequence_length=LENGTH, sources=[small, big]), batch=G)
    rows = stream.samples.rows[0]
    assert stream.steps is None and rows == 499 // LENGTH
    assert stream.describe(1000)["sources"][0]["samples"] == int(1.5 * rows)
    ended = opened(Data(sequence_length=LENGTH, sources=[small]), batch=G)
    assert ended.steps == int(1.5 * rows) // G
    counts = Counter(row[1] for step in steps_of(ended.data, ended.steps, batch=G)[0] for row in step)
    assert set(counts.values()) <= {1, 2}
    with pytest.raises(DataError, match="is less than one whole sample"):
        opened(Data(sequence_length=LENGTH, sources=[dataclasses.replace(small, max_epochs=0.001), big]), batch=G)


def test_a_source_that_only_a_phase_wants_is_opened(corpora: dict[str, Any]) -> None:
    later = dataclasses.replace(corpora["random"], label="later", weight=0.0)
    never = TokenStore(path="does not exist", weight=0.0, label="never")
    data = Data(
        sequence_length=LENGTH,
        sources=[corpora["one"], later, never],
        phases=[Phase(start=2, weights={"later": 1.0, "store": 0.0})],
    )
    stream = opened(data, batch=G)
    assert stream.labels == ("store", "later")
    sources = stream.samples.locate(0, 5 * G)[0].tolist()
    assert sources == [0] * 2 * G + [1] * 3 * G
    assert stream.mix(5) == {"store": (128, 128.0), "later": (192, 192.0)}


def test_each_epoch_covers_each_row_once_in_every_order(corpora: dict[str, Any]) -> None:
    for order in ("permute", "block", "none"):
        data = Data(sequence_length=LENGTH, sources=[corpora["random"]], shuffle=order, shuffle_block=5, shuffle_window=3)  # type: ignore[arg-type]
        stream = opened(data, batch=1)
        rows = stream.samples.rows[0]
        for epoch in range(3):
            assert sorted(stream.samples.locate(epoch * rows, rows)[1].tolist()) == list(range(rows))


@dataclass(frozen=True, kw_only=True)
class Bare(Component):
    """A plugin's source that does not derive from `SourceComponent`."""


def test_a_source_without_the_keys_has_the_defaults_of_those_with_them() -> None:
    default = SourceComponent()
    assert (weight_of(Bare()), max_epochs_of(Bare())) == (default.weight, default.max_epochs)
    assert label_of(Bare()) == "bare", "as a source without a label, it is named after its component"


def test_keys_that_are_set_are_read() -> None:
    given = RandomTokens(vocab_size=9, weight=0.25, max_epochs=2.0, label="web")
    assert (weight_of(given), max_epochs_of(given), label_of(given)) == (0.25, 2.0, "web")
    data = Data(sources=[given, Bare(), Bare()])
    assert base_weights(data) == (0.25, 1.0, 1.0)
    assert labels_of(data) == ["web", "bare", "bare-3"]


def test_the_label_of_a_source_of_forge_is_the_name_that_selects_it() -> None:
    """Labels decide the order of rows: another one would change what every run without labels reads."""
    registry = Registry()
    classes = {name: registry.load("forge.sources", name) for name in registry.names("forge.sources")}
    own = {name: kind for name, kind in classes.items() if kind.__module__ == "forge_data.components"}
    assert len(own) == 15 and {name: label_of(object.__new__(kind)) for name, kind in own.items()} == {name: name for name in own}
