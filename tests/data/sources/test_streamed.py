"""Records that are streamed: the documents of the prepared store, from any place, and the same samples after any resume."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from data.steps import steps_of
from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext, StreamedSource
from forge_data.components import Bpe, Bytes, HuggingFace, JsonLines, Parquet, RecordComponent
from forge_data.loading.stream import open_stream
from forge_data.section import Data
from forge_data.tokenizers.bytes import ByteTokenizer

TEXTS = [f"document {number} " + "über " * (number % 7) for number in range(40)]


@pytest.fixture(autouse=True)
def quiet(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.disable_progress_bars()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


def as_jsonl(folder: Path, column: str, values: list[Any]) -> RecordComponent:
    for number in range(4):
        lines = "".join(json.dumps({column: value}) + "\n" for value in values[number * 10 : number * 10 + 10])
        (folder / f"{number}.jsonl").write_text(lines)
    (folder / "9.jsonl").write_text("")
    return JsonLines(path=str(folder))


def as_parquet(folder: Path, column: str, values: list[Any]) -> RecordComponent:
    for number in range(4):
        parquet.write_table(
            pa.table({column: values[number * 10 : number * 10 + 10]}), folder / f"{number}.parquet", row_group_size=3
        )
    return Parquet(path=str(folder))


def as_saved(folder: Path, column: str, values: list[Any]) -> RecordComponent:
    datasets.Dataset.from_dict({column: values}).save_to_disk(folder / "set")
    return HuggingFace(path=str(folder / "set"))


def as_data_files(folder: Path, column: str, values: list[Any]) -> RecordComponent:
    """What a dataset of the hub is: a directory of files that the library streams."""
    as_parquet(folder, column, values)
    for file in folder.glob("*.parquet"):
        file.rename(file.with_name(f"train-{file.name}"))  # the library reads the split out of names
    return HuggingFace(path=str(folder))


FORMATS: Any = [as_jsonl, as_parquet, as_saved, as_data_files]


def changed(component: RecordComponent, **fields: Any) -> RecordComponent:
    return type(component)(**{**vars(component), **fields})


def built(component: RecordComponent, tokenizer: Any = None) -> Any:
    return component.build(SourceContext(Path("unused"), tokenizer, 16, lambda _: None))


@pytest.mark.parametrize("write", FORMATS)
def test_streams_give_every_document_from_any_place(tmp_path: Path, write: Any) -> None:
    source = built(changed(write(tmp_path, "text", TEXTS), stream=True), ByteTokenizer())
    assert isinstance(source, StreamedSource) and source.tokenizer == ByteTokenizer().fingerprint
    shards = [[ids.tolist() for ids in source.stream(shard)] for shard in range(source.shards)]
    found = [bytes(ids[:-1]).decode() for shard in shards for ids in shard]
    assert sorted(found) == sorted(TEXTS) and all(ids[-1] == 256 for shard in shards for ids in shard)
    for number, shard in enumerate(shards):
        for start in (1, len(shard) // 2, len(shard), len(shard) + 3):
            assert [ids.tolist() for ids in source.stream(number, start)] == shard[start:]


@pytest.mark.parametrize("write", FORMATS)
def test_streams_of_ids(tmp_path: Path, write: Any) -> None:
    ids = [[number, number + 1, 7] for number in range(1, 41)]
    component = changed(write(tmp_path, "ids", ids), stream=True, ids="ids", eos=7)
    source = built(component)
    assert [document.tolist() for shard in range(source.shards) for document in source.stream(shard)] == ids
    closed = built(changed(component, eos=0))
    assert next(iter(closed.stream(0))).tolist() == [*ids[0], 0]
    with pytest.raises(DataError, match=r"holds token id 300, but the vocabulary has only 257 ids"):
        folder = tmp_path / "large"
        folder.mkdir()
        large = built(changed(write(folder, "ids", [[300]] * 40), stream=True, ids="ids"), ByteTokenizer())
        list(large.stream(0))


@pytest.mark.parametrize("write", FORMATS)
def test_fingerprints_of_streams(tmp_path: Path, write: Any) -> None:
    for name, texts in (("a", TEXTS), ("b", [*TEXTS[:-1], "another"])):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "text", texts)
    path = "set" if write is as_saved else ""
    components = [changed(write(tmp_path / "a", "text", TEXTS), stream=True, path=str(tmp_path / name / path)) for name in "ab"]
    first, other = (built(component, ByteTokenizer()).fingerprint for component in components)
    assert built(components[0], ByteTokenizer()).fingerprint == first != other
    assert built(changed(components[0], split="train"), ByteTokenizer()).fingerprint != first


def test_a_tokenizer_is_trained_on_a_stream_without_downloading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("the whole dataset was loaded"))
    component = changed(as_data_files(tmp_path, "text", TEXTS), stream=True)
    data = Data(sequence_length=16, sources=[component], tokenizer=Bpe(vocab_size=270))
    opened = open_stream(data, workspace=tmp_path / "w", seed=0, global_batch=4, micro_batch=2)
    assert 257 < opened.tokenizer.vocab_size <= 270
    next(iter(opened.from_cursor(opened.start())))


def test_streams_refuse_what_they_cannot_read(tmp_path: Path) -> None:
    component = changed(as_jsonl(tmp_path, "text", TEXTS), stream=True)
    with pytest.raises(DataError, match="is text and needs a tokenizer"):
        built(component)
    (tmp_path / "0.jsonl").write_text('{"text": "fine"}\nbroken\n{"text": "also"}\n')
    with pytest.raises(DataError, match=r"0\.jsonl at byte 17 \(line 2\) is not valid JSON"):
        list(built(component, ByteTokenizer()).stream(0))
    assert len(list(built(changed(component, skip=1), ByteTokenizer()).stream(0))) == 2
    with pytest.raises(DataError, match=r"cannot be loaded"):
        built(HuggingFace(path=str(tmp_path / "none"), stream=True), ByteTokenizer())
    as_saved(tmp_path, "body", TEXTS)
    with pytest.raises(DataError, match=r"has no column 'text'; it has body"):
        built(HuggingFace(path=str(tmp_path / "set"), stream=True), ByteTokenizer())


def test_splits_of_a_stream_share_nothing(tmp_path: Path) -> None:
    for write in (as_jsonl, as_saved):
        component = changed(write(tmp_path, "text", TEXTS), stream=True)
        taken = {}
        for split in ("all", "train", "held_out"):
            source = built(changed(component, split=split, held_out=0.3), ByteTokenizer())
            taken[split] = [tuple(ids) for shard in range(source.shards) for ids in source.stream(shard)]
        assert sorted(taken["train"] + taken["held_out"]) == sorted(taken["all"]) and 3 < len(taken["held_out"]) < 25


@pytest.mark.parametrize("write", [as_jsonl, as_data_files])
def test_a_run_over_a_stream_resumes_anywhere_on_other_ranks(tmp_path: Path, write: Any) -> None:
    component = changed(write(tmp_path, "text", TEXTS), stream=True)
    data = Data(sequence_length=16, sources=[component], tokenizer=Bytes())
    whole, _ = steps_of(data, 6, batch=4, workspace=tmp_path / "w")
    before, cursor = steps_of(data, 2, batch=4, ranks=2, workspace=tmp_path / "w")
    after, _ = steps_of(data, 4, batch=4, ranks=1, micro=2, cursor=json.loads(json.dumps(cursor)), workspace=tmp_path / "w")
    assert before + after == whole
    assert np.ptp([len(step) for step in whole]) == 0


BROKEN_STREAMS = [["fine", 7, "also", None] * 3, ["fine", "also", ["list"]]]


def as_broken_files(folder: Path, write: str) -> RecordComponent:
    """Two files with six and one broken records."""
    for number, values in enumerate(BROKEN_STREAMS):
        lines = "".join(json.dumps({"text": value if isinstance(value, str) else None}) + "\n" for value in values)
        (folder / f"train-{number}.jsonl").write_text(lines)
    return JsonLines(path=str(folder)) if write == "jsonl" else HuggingFace(path=str(folder))


@pytest.mark.parametrize("write", ["jsonl", "huggingface"])
def test_trials_b8_a_stream_counts_and_names_each_record_that_it_skips_once(tmp_path: Path, write: str) -> None:
    component = changed(as_broken_files(tmp_path, write), stream=True, skip=7)
    said: list[str] = []
    source: Any = component.build(SourceContext(Path("unused"), ByteTokenizer(), 16, said.append))
    for _ in range(3):  # epochs
        assert [len(list(source.stream(shard))) for shard in range(2)] == [6, 2]
    assert len(list(source.stream(0, 4))) == 2  # as a resume reads it
    assert [int(message.split()[0]) for message in said] == [1, 2, 3, 4, 5, 6, 7]
    assert all(f"of {source.name} left out so far: " in message and "'text' is missing or null" in message for message in said)
    places = [message.split("so far: ")[1] for message in said]
    assert len(set(places)) == 7 and ("line 2" in places[0] if write == "jsonl" else "shard 0, row 1" in places[0])


@pytest.mark.parametrize("write", ["jsonl", "huggingface"])
def test_trials_b8_skip_bounds_all_shards_of_a_stream_together(tmp_path: Path, write: str) -> None:
    source = built(changed(as_broken_files(tmp_path, write), stream=True, skip=6), ByteTokenizer())
    assert len(list(source.stream(0))) == 6
    with pytest.raises(DataError, match=r"it is broken record 7, and `skip` allows 6\n  before it: "):
        list(source.stream(1))


def test_trials_b8_of_many_skipped_records_the_number_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("nothing\n" * 250 + '{"text": "fine"}\n')
    said: list[str] = []
    component = JsonLines(path=str(tmp_path), stream=True, skip=250)
    source: Any = component.build(SourceContext(Path("unused"), ByteTokenizer(), 16, said.append))
    assert len(list(source.stream(0))) == 1
    assert [int(message.split()[0]) for message in said] == [*range(1, 11), *range(20, 100, 10), 100, 200]


@pytest.mark.parametrize("workers", [0, 1])
def test_trials_b8_a_run_is_told_what_a_stream_skips(tmp_path: Path, workers: int) -> None:
    component = changed(as_broken_files(tmp_path, "jsonl"), stream=True, skip=7)
    data = Data(sequence_length=16, sources=[component], tokenizer=Bytes(), loader_workers=workers)
    said: list[str] = []
    stream = open_stream(data, workspace=tmp_path / "w", seed=0, global_batch=4, micro_batch=2, report=said.append)
    assert said == []
    reading = iter(stream.from_cursor(stream.start()))
    for _ in range(4):
        next(reading)
    reading.close()  # type: ignore[attr-defined]
    assert [int(message.split()[0]) for message in said] == [1, 2, 3, 4, 5, 6, 7]
