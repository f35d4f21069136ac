"""Text to stores: tokenizers, splits, and the same bytes for any number of workers."""

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext
from forge_data.components import Bpe, Bytes, Stdlib, TextFiles, TokenStore
from forge_data.loading.evaluation import evaluation
from forge_data.loading.stream import open_stream
from forge_data.preparation import job, tokenization
from forge_data.section import Data
from forge_data.sources.records import Records, in_split
from forge_data.sources.store import StoreSource
from forge_data.sources.text import text_files
from forge_data.tokenizers.bpe import BpeTokenizer
from forge_data.tokenizers.bytes import ByteTokenizer
from forge_data.tokenizers.dump import tokenizer_of

WORDS = ["der", "Hund", "läuft", "über", "<|endoftext|>", "die", "Katze", "猫", "sleeps\n\tindented", "", "twice\r\n"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """60 files of words, one empty."""
    rng = np.random.default_rng(3)
    folder = tmp_path / "corpus"
    for number in range(60):
        file = folder / f"part-{number % 3}" / f"{number:02d}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(" ".join(rng.choice(WORDS, size=rng.integers(5, 300)).tolist()), encoding="utf-8", newline="")
    (folder / "empty.txt").write_text("")
    return folder


def context(workspace: Path, **more: Any) -> SourceContext:
    return SourceContext(workspace, more.pop("tokenizer", None), 16, lambda _: None, **more)


def trained(corpus: Path, workspace: Path, **fields: Any) -> BpeTokenizer:
    return Bpe(vocab_size=300, **fields).build(context(workspace, texts=(text_files(str(corpus)),)))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_text_survives_tokenizing(kind: str, corpus: Path, tmp_path: Path) -> None:
    tokenizer = Bytes().build(context(tmp_path)) if kind == "bytes" else trained(corpus, tmp_path / "w")

    @given(text=st.text(max_size=80) | st.lists(st.sampled_from(WORDS)).map(" ".join))
    @settings(max_examples=80, deadline=None)
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids.tolist()) == text
        assert tokenizer.eos not in ids.tolist()  # also where the text spells the end of a document
        assert not len(ids) or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size

    check()


def test_training_a_tokenizer_again_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    """In another process with another hash seed and one thread, so that no order of a hash table can hide."""
    first = trained(corpus, tmp_path / "w1").dump()
    script = (
        "import sys; from pathlib import Path; from forge_core.protocols.data import SourceContext\n"
        "from forge_data.components import Bpe; from forge_data.sources.text import text_files\n"
        "c = SourceContext(Path(sys.argv[2]), None, 16, lambda _: None, (text_files(sys.argv[1]),))\n"
        "sys.stdout.buffer.write(Bpe(vocab_size=300).build(c).dump())"
    )
    env = {"PYTHONHASHSEED": "77", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-c", script, str(corpus), str(tmp_path / "w2")]
    assert subprocess.run(command, capture_output=True, check=True, env=env).stdout == first


def test_a_tokenizer_is_trained_once(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = trained(corpus, tmp_path / "w")
    monkeypatch.setattr("forge_data.tokenizers.bpe.trained", lambda *_: pytest.fail("trained again"))
    assert trained(corpus, tmp_path / "w").fingerprint == first.fingerprint


def test_tokenizers_that_do_not_fit_are_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no text to train on"):
        Bpe().build(context(tmp_path))
    with pytest.raises(DataError, match="cannot be read"):
        Bpe(path=str(tmp_path / "none.json")).build(context(tmp_path))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"not a tokenizer\.json"):
        Bpe(path=str(tmp_path / "bad.json")).build(context(tmp_path))
    (tmp_path / "good.json").write_bytes(trained(corpus, tmp_path / "w").dump())
    with pytest.raises(DataError, match="no token '<eos>'"):
        Bpe(path=str(tmp_path / "good.json"), eos="<eos>").build(context(tmp_path))


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_store_has_the_same_bytes_for_any_number_of_workers(
    kind: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forge_data.preparation.job.CHUNK", 2000)
    monkeypatch.setattr(tokenization, "SMALLEST_PART", 3000)
    tokenizer = Bytes().build(context(tmp_path)) if kind == "bytes" else trained(corpus, tmp_path / "w")
    files: dict[int, dict[str, bytes]] = {}
    for workers in (1, 2, 5):
        path = tmp_path / f"store-{workers}"
        texts = text_files(str(corpus))
        tokenization.tokenize(texts, tokenizer, path, source="s", workers=workers, report=lambda _: None, shard_tokens=5000)
        files[workers] = {file.name: file.read_bytes() for file in path.iterdir()}
    assert files[1] == files[2] == files[5] and len(files[1]) > 6


def test_a_store_holds_the_text_and_its_tokenizer(corpus: Path, tmp_path: Path) -> None:
    tokenizer = trained(corpus, tmp_path / "w")
    store = tokenization.prepared(text_files(str(corpus)), context(tmp_path / "w", tokenizer=tokenizer), "text")
    files = sorted(corpus.rglob("*.txt"), key=lambda file: file.relative_to(corpus).as_posix())
    texts = [file.read_bytes().decode() for file in files if file.stat().st_size]
    starts = [0, *store.ends().tolist()]
    assert [tokenizer.decode(store.read(*part).tolist()[:-1]) for part in itertools.pairwise(starts)] == texts
    assert all(int(store.read(end - 1, end)[0]) == tokenizer.eos for end in starts[1:])
    assert store.text_bytes == sum(len(text.encode()) for text in texts)
    carried = tokenizer_of(store)
    assert carried is not None and carried.dump() == tokenizer.dump() and carried.eos == tokenizer.eos


def test_a_finished_store_is_used_again_and_a_changed_text_is_not(corpus: Path, tmp_path: Path, monkeypatch: Any) -> None:
    made = context(tmp_path / "w", tokenizer=Bytes().build(context(tmp_path)))
    first = TextFiles(path=str(corpus)).build(made)
    monkeypatch.setattr(tokenization, "tokenize", lambda *_, **__: pytest.fail("tokenized again"))
    assert TextFiles(path=str(corpus)).build(made).fingerprint == first.fingerprint
    (corpus / "new.txt").write_text("more")
    with pytest.raises(pytest.fail.Exception, match="tokenized again"):
        TextFiles(path=str(corpus)).build(made)


def test_half_written_stores_are_never_used(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = context(tmp_path / "w", tokenizer=Bytes().build(context(tmp_path)))
    with monkeypatch.context() as patched:
        patched.setattr(
            "forge_data.sources.store_writer.StoreWriter.commit", lambda _: (_ for _ in ()).throw(KeyboardInterrupt())
        )
        with pytest.raises(KeyboardInterrupt):
            TextFiles(path=str(corpus)).build(made)
    assert [path.name.partition(".")[2][:5] for path in (tmp_path / "w" / "stores").iterdir()] == ["parts"]  # kept for next time
    store = TextFiles(path=str(corpus)).build(made)
    # What a killed process leaves behind: never opened, and removed by the next one that writes this store.
    shutil.rmtree(store.name)
    left = Path(f"{store.name}.partial-1234")
    left.mkdir()
    (left / "shard-00000.bin").write_bytes(b"half")
    assert TextFiles(path=str(corpus)).build(made).fingerprint == store.fingerprint
    assert [path.name for path in (tmp_path / "w" / "stores").iterdir()] == [Path(store.name).name]


def test_long_documents_are_encoded_in_pieces_where_that_changes_no_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "LONGEST_PIECE", 10)
    text = "line\nline two\n" + "x" * 25 + "\nend"
    assert list(job.pieces(text, re.compile(""))) == [text[start : start + 10] for start in range(0, len(text), 10)]
    assert list(job.pieces(text, re.compile(r"(?<=\n)"))) == ["line\nline two\n", "x" * 25 + "\n", "end"]
    assert list(job.pieces(text, None)) == [text]


def test_splits_share_no_file_and_leave_none_out(corpus: Path) -> None:
    names = {split: [file.name for file in text_files(str(corpus), split, 0.3).files] for split in ("all", "train", "held_out")}
    assert sorted(names["train"] + names["held_out"]) == names["all"]
    assert 0.1 < len(names["held_out"]) / len(names["all"]) < 0.5
    assert not in_split("a", "train", 0.3) or not in_split("a", "held_out", 0.3)


def test_patterns_and_single_files_name_documents(corpus: Path) -> None:
    assert text_files(str(corpus / "part-*" / "1?.txt")).files[0].name == "part-0/12.txt"
    assert [file.name for file in text_files(str(corpus / "part-0" / "00.txt")).files] == ["00.txt"]


def test_bad_text_is_refused(corpus: Path, tmp_path: Path) -> None:
    for path, message in [
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path / "*.none", "matches no text file"),
        (corpus / "empty.txt", "has no text"),
    ]:
        with pytest.raises(DataError, match=message):
            text_files(str(path))
    with pytest.raises(DataError, match="none of 1 files is in split"):
        text_files(str(corpus / "part-0" / "00.txt"), "held_out", 1e-9)
    (corpus / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"latin\.txt at byte 3 is not UTF-8"):
        list(text_files(str(corpus)))
    with pytest.raises(DataError, match="needs a tokenizer"):
        TextFiles(path=str(corpus)).build(context(tmp_path))


def test_an_unwritable_workspace_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    tokenizer = Bytes().build(context(tmp_path))
    with pytest.raises(DataError, match="cannot be written"):
        TextFiles(path=str(corpus)).build(context(tmp_path / "file" / "w", tokenizer=tokenizer))


def test_the_standard_library_is_text() -> None:
    train, held_out = Stdlib().texts(), Stdlib(split="held_out").texts()
    assert isinstance(train, Records) and isinstance(held_out, Records)
    names = {file.name for file in train.files}
    assert names.isdisjoint(file.name for file in held_out.files)
    assert {"argparse.py", "json/decoder.py"} <= names | {file.name for file in held_out.files}
    assert not any("site-packages" in name or name.startswith("test/") for name in names)
    assert len(names) > 300 and 0.01 < len(held_out.files) / len(names) < 0.15
    assert Stdlib().texts().fingerprint == train.fingerprint
    assert all(text for _, text in held_out)


def test_text_recipe_end_to_end(corpus: Path, tmp_path: Path) -> None:
    """The tokenizer is trained on the training split, both splits are tokenized with it, and a store can follow alone."""
    data = Data(
        sequence_length=32,
        sources=[TextFiles(path=str(corpus), split="train", held_out=0.3)],
        tokenizer=Bpe(vocab_size=300),
        evaluation={"held_out": TextFiles(path=str(corpus), split="held_out", held_out=0.3)},
    )
    opened = open_stream(data, workspace=tmp_path / "w", seed=0, global_batch=8, micro_batch=4, vocab_size=300)
    held_out = evaluation(data, workspace=tmp_path / "w", vocab_size=300)["held_out"]
    assert opened.tokenizer is not None and held_out.tokens > 100
    batches, _ = next(opened.from_cursor(opened.start()))
    assert any(word in opened.tokenizer.decode(batches[0].tokens.flatten().tolist()) for word in ("Hund", "Katze"))
    source = opened.sources[0]
    assert isinstance(source, StoreSource)
    alone = Data(sequence_length=32, sources=[TokenStore(path=str(source.path), label="text")])
    again = open_stream(alone, workspace=tmp_path / "other", seed=0, global_batch=8, micro_batch=4)
    assert again.tokenizer is not None and again.tokenizer.fingerprint == opened.tokenizer.fingerprint
    assert again.fingerprint == opened.fingerprint


def test_stores_of_different_tokenizers_are_not_mixed(corpus: Path, tmp_path: Path) -> None:
    paths = []
    for tokenizer in (Bytes().build(context(tmp_path)), trained(corpus, tmp_path / "w")):
        paths.append(tmp_path / tokenizer.name)
        tokenization.tokenize(text_files(str(corpus)), tokenizer, paths[-1], source="s", report=lambda _: None)
    data = Data(sequence_length=32, sources=[TokenStore(path=str(path), label=path.name) for path in paths])
    with pytest.raises(DataError, match="different tokenizers"):
        open_stream(data, workspace=tmp_path, seed=0, global_batch=1, micro_batch=1)


def test_the_copy_of_a_plugins_tokenizer_is_not_read_if_the_tokenizer_is_known(corpus: Path, tmp_path: Path) -> None:
    class Foreign(ByteTokenizer):
        def dump(self) -> bytes:
            return b'{"type": "of-a-plugin"}\n'

    foreign = Foreign()
    store = tokenization.prepared(text_files(str(corpus)), context(tmp_path / "w", tokenizer=foreign), "text")
    assert tokenizer_of(store, foreign) is foreign
    for known in (None, ByteTokenizer()):
        with pytest.raises(DataError, match="is not a tokenizer"):
            tokenizer_of(store, known)
    data = Data(sequence_length=8, sources=[], tokenizer=None, evaluation={"held": TokenStore(path=str(store.path))})
    held = evaluation(data, workspace=tmp_path / "w", tokenizer=foreign)["held"]
    assert held.text_bytes == store.text_bytes
