"""The commands `data ...` as a user calls them: nothing is lost that nobody gave up, and every damage has a place.

Also descriptions without torch.
"""

import contextlib
import io
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data import foreign
from forge_core.component import fields_of
from forge_core.errors import DataError
from forge_core.registry import GROUPS, Registry
from forge_data.__main__ import main
from forge_data.commands import convert as converting
from forge_data.commands import diff, inspect
from forge_data.commands.decontaminate import decontaminate, run_hashes, words_of
from forge_data.preparation.tokenization import tokenize
from forge_data.section import Data
from forge_data.sources.formats import detect, open_any
from forge_data.sources.scan import portions
from forge_data.sources.store import StoreSource
from forge_data.sources.store_writer import StoreWriter
from forge_data.sources.text import text_files
from forge_data.tokenizers.bytes import ByteTokenizer

GROUPS_HERE = ("forge.sources", "forge.tokenizers")


def data(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "forge_data", *(str(argument) for argument in arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_prepare_inspect_and_verify(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text("the quick brown fox " * (number + 1))
    made = data("prepare", "--path", tmp_path / "*.txt", "--out", tmp_path / "store", "--tokenizer", "bytes", "--json")
    assert made.returncode == 0, made.stderr
    answer = json.loads(made.stdout)
    assert answer["documents"] == 8 and answer["tokens"] == 20 * 36 + 8

    looked = json.loads(data("inspect", tmp_path / "store", "--json").stdout)
    assert (
        looked["dtype"] == "uint16" and looked["lengths"]["longest"] == 161 and looked["sample"]["text"].startswith("the quick")
    )
    assert sum(bin_["documents"] for bin_ in looked["histogram"]) == 8
    drawn = data("inspect", tmp_path / "store").stdout
    assert "█" in drawn and "728 tokens in 8 documents" in drawn

    assert data("verify", tmp_path / "store").returncode == 0
    shard = tmp_path / "store" / "shard-00000.bin"
    shard.write_bytes(b"\x01" + shard.read_bytes()[1:])
    damaged = data("verify", tmp_path / "store")
    assert damaged.returncode == 2 and "shard-00000.bin" in damaged.stderr and "Traceback" not in damaged.stderr


def test_convert_diff_and_decontaminate(tmp_path: Path) -> None:
    """Text to a store to Megatron's format; equal until a byte is changed, which diff and verify both name."""
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"body": f"document {n} " * 8}) for n in range(5)))
    made = ask("prepare", "--path", tmp_path / "texts.jsonl", "--text", "body", "--out", tmp_path / "s", "--tokenizer", "bytes")
    assert made["documents"] == 5
    assert ask("convert", tmp_path / "s", "--to", "megatron", "--out", tmp_path / "m")["tokens"] == made["tokens"] == 445
    assert ask("verify", tmp_path / "m")["faults"] == []
    looked = ask("inspect", tmp_path / "m")
    assert (looked["format"], looked["documents"], looked["sequences"], looked["max_id"]) == ("megatron", 5, 5, 256)
    assert ask("diff", tmp_path / "s", tmp_path / "m")["equal"]
    content = (tmp_path / "m.bin").read_bytes()
    (tmp_path / "m.bin").write_bytes(content[:200] + b"\x7a\x00" + content[202:])
    other = data("diff", tmp_path / "s", tmp_path / "m")
    assert other.returncode == 1 and f"{tmp_path}/m.bin at byte 200: id 122" in other.stdout, other.stderr
    damaged = data("verify", tmp_path / "m", "--vocab-size", "256")
    assert damaged.returncode == 2 and "m.bin at byte 176 (token 88): id 256 is not in a vocabulary of 256" in damaged.stderr
    (tmp_path / "eval.jsonl").write_text(json.dumps({"question": "document 3 document 3 document 3"}))
    found = ask(
        "decontaminate", tmp_path / "s", "--against", tmp_path / "eval.jsonl", "--words", "6", "--out", tmp_path / "clean"
    )
    assert (found["documents"], found["overlapping_documents"]) == (5, 1)
    assert ask("inspect", tmp_path / "clean")["documents"] == 4


def ask(*arguments: str | Path) -> dict[str, Any]:
    """The answer of a command in this process."""
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.suppress(SystemExit):
        assert main([*(str(argument) for argument in arguments), "--json"]) == 0
    return json.loads(written.getvalue())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "nowhere"], "nowhere does not exist"),
        (["inspect", "raw.bin"], "dtype is unknown"),
        (["inspect", "raw.bin", "--dtype", "int7"], "unknown dtype 'int7'"),
        (["prepare", "--path", "nowhere", "--out", "out"], "nowhere does not exist"),
        (["prepare", "--path", "text.txt", "--out", "."], "not empty"),
        (["prepare", "--path", "text.txt"], "--out"),
        (["prepare", "--path", "text.txt", "--out", "out", "--ids", "x"], "source 'text' has no ids; remove --ids"),
        (["prepare", "--path", ".", "--out", "out"], "has files of several formats"),
        (["convert", "text.txt", "--out", "out"], "is text, not tokens"),
        (
            ["convert", "raw.bin", "--dtype", "uint16", "--out", "raw.npy", "--to", "npy", "--to-dtype", "float32"],
            "cannot be written as 'float32'",
        ),
        (["verify", "nowhere"], "nowhere does not exist"),
        (["diff", "raw.bin", "nowhere", "--dtype", "uint16"], "nowhere does not exist"),
        (["decontaminate", "raw.bin", "--against", "x"], "dtype is unknown"),
        (["prepare", "--out", "out"], "--path"),
        (["prepare", "--path", "text.txt", "--out", "out", "--unknown=1"], "--unknown"),
        (["prepare", "--path", "text.txt", "--out", "/proc/none/out", "--tokenizer", "bytes"], "cannot be written"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    tmp_path: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    np.arange(6, dtype="<u2").tofile(tmp_path / "raw.bin")
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "text.jsonl").write_text('{"text": "text"}')
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    assert exit_code(arguments) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before  # nothing half-written


def exit_code(arguments: list[str]) -> int | str | None:
    try:
        return main(arguments)
    except SystemExit as end:  # how the command line library refuses options
        return end.code


def registered() -> list[Any]:
    registry = Registry()
    entries = [entry for group in GROUPS_HERE for entry in registry.of(group) if entry.distribution == "forge-data"]
    assert len(entries) >= 7
    return [pytest.param(registry.load_entry(entry), entry.group, id=entry.name) for entry in entries]


@pytest.mark.parametrize(("component", "group"), registered())
def test_components_load_and_every_key_has_a_docstring(component: Any, group: str) -> None:
    assert GROUPS[group].build == ("context",)
    assert component.__doc__
    for field in fields_of(component):
        assert field.doc, f"{component.__name__}.{field.name} has no docstring"


def test_the_section_is_documented_and_has_defaults() -> None:
    assert Data() == Data(sequence_length=1024)
    assert all(field.doc for field in fields_of(Data))


def test_libraries_of_extras_are_imported_on_use() -> None:
    script = (
        "import sys, forge_data.loading.stream, forge_data.sources.formats\n"
        "import forge_data.preparation.streaming, forge_data.preparation.job\n"
        "import forge_data.commands.convert, forge_data.commands.decontaminate\n"
        "import forge_data.commands.diff, forge_data.commands.inspect, forge_data.commands.prepare\n"
        "names = ('pyarrow', 'datasets', 'fsspec', 'tiktoken', 'sentencepiece', 'zstandard')\n"
        "print([name for name in names if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_descriptions_import_no_heavy_library() -> None:
    names = ["components", "section", "checks", "order.phases", "commands.cli"]
    script = f"import sys\nfor name in {names}: __import__('forge_data.' + name)\n"
    script += "print([name for name in ('torch', 'numpy', 'tokenizers', 'xxhash') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def silent(_: str) -> None:
    """Says nothing."""


def convert(path: Path, out: Path, target: str, **more: Any) -> dict[str, Any]:
    given = {key: more.pop(key) for key in ("eos", "bos") if key in more}
    stated = {"dtype": more.pop("of")} if "of" in more else {}
    return converting.convert(open_any(str(path), **stated, **given), out, target, report=silent, **more)


sequences = st.lists(st.lists(st.integers(0, 120), min_size=1, max_size=9), min_size=1, max_size=12)


@given(
    documents=sequences, dtype=st.sampled_from(["uint8", "int8", "int16", "int32", "int64", "uint16"]), shard=st.integers(1, 40)
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_megatron_to_a_store_and_back_is_bit_equal(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], dtype: str, shard: int
) -> None:
    folder = tmp_path_factory.mktemp("round")
    foreign.megatron(folder / "first", [[document] for document in documents], dtype)
    convert(folder / "first", folder / "store", "store", shard_tokens=shard)
    assert StoreSource(folder / "store").verify() == []
    convert(folder / "store", folder / "second", "megatron")
    for suffix in (".bin", ".idx"):
        assert (folder / f"second{suffix}").read_bytes() == (folder / f"first{suffix}").read_bytes()


@pytest.mark.parametrize(("target", "name"), [("store", "s"), ("megatron", "m"), ("npy", "a.npy"), ("bin", "a.bin")])
def test_every_format_keeps_every_id_and_border(tmp_path: Path, target: str, name: str) -> None:
    documents = [[5, 6, 7, 0], [0], [9, 300, 0], [1, 0]]
    first = foreign.datatrove(tmp_path / "a.ds", documents)
    answer = convert(first, tmp_path / name, target)
    assert answer["documents"] == 4 and answer["tokens"] == 10 and answer["dtype"] == "uint16"
    again = open_any(str(tmp_path / name), dtype="uint16" if target == "bin" else None, eos=answer.get("eos"))
    assert diff.diff_corpora(open_any(str(first)), again)["equal"]
    assert answer.get("eos", 0) == 0
    with pytest.raises(DataError, match="exists"):
        convert(first, tmp_path / name, target)
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_what_was_written_can_be_read_by_others(tmp_path: Path) -> None:
    foreign.datatrove(tmp_path / "a.ds", [[5, 6, 0], [7, 0]])
    convert(tmp_path / "a.ds", tmp_path / "a.npy", "npy")
    assert np.load(tmp_path / "a.npy").tolist() == [5, 6, 0, 7, 0]
    convert(tmp_path / "a.ds", tmp_path / "wide.bin", "bin", dtype="int64")
    assert np.fromfile(tmp_path / "wide.bin", dtype="<i8").tolist() == [5, 6, 0, 7, 0]
    convert(tmp_path / "a.ds", tmp_path / "m", "megatron")
    foreign.megatron(tmp_path / "theirs", [[[5, 6, 0]], [[7, 0]]])
    assert (tmp_path / "m.idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()
    assert len((tmp_path / "m.idx").read_bytes()) == 34 + 12 * 2 + 8 * 3


def test_nothing_is_lost_unless_somebody_says_so(tmp_path: Path) -> None:
    foreign.megatron(tmp_path / "m", [[[1, 2], [3, 0]], [[4, 0]]])
    with pytest.raises(DataError, match=r"has 3 sequences in 2 documents, .* --join-sequences"):
        convert(tmp_path / "m", tmp_path / "store", "store")
    convert(tmp_path / "m", tmp_path / "store", "store", join_sequences=True)
    assert StoreSource(tmp_path / "store").ends().tolist() == [4, 6]

    foreign.megatron(tmp_path / "holes", [[[1, 0]], [[]], [[2, 0]]])
    with pytest.raises(DataError, match=r"has 1 documents without tokens, .* --skip-empty"):
        convert(tmp_path / "holes", tmp_path / "whole", "store")
    assert not (tmp_path / "whole").exists()
    assert convert(tmp_path / "holes", tmp_path / "whole", "store", skip_empty=True)["empty_documents_skipped"] == 1

    for number, documents in enumerate(([[1, 2], [3, 4]], [[1, 0], [0, 2, 0]])):
        path = foreign.datatrove(tmp_path / f"{number}.ds", documents)
        with pytest.raises(DataError, match=r"do not all end with one token .* --lose-documents"):
            convert(path, tmp_path / f"{number}.npy", "npy")
        assert not (tmp_path / f"{number}.npy").exists()
        convert(path, tmp_path / f"{number}.npy", "npy", lose_documents=True)
        assert np.load(tmp_path / f"{number}.npy").tolist() == [token for document in documents for token in document]

    path = foreign.datatrove(tmp_path / "large.ds", [[70_000, 0]], "I")
    for target, name in (("store", "s"), ("megatron", "x"), ("npy", "x.npy")):
        with pytest.raises(DataError, match="token id 70000 does not fit uint16"):
            convert(path, tmp_path / name, target, dtype="uint16")


def test_a_store_keeps_its_tokenizer_when_it_is_converted(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    with StoreWriter(tmp_path / "a", dtype="uint16", tokenizer=tokenizer) as writer:
        writer.add(np.array([65, 256]), np.array([2]))
        writer.commit()
    convert(tmp_path / "a", tmp_path / "b", "store", dtype="uint32")
    assert StoreSource(tmp_path / "b").tokenizer == tokenizer.fingerprint
    foreign.datatrove(tmp_path / "c.ds", [[400, 0]])
    with pytest.raises(DataError, match="holds id 400, but tokenizer bytes has only 257 ids"):
        convert(tmp_path / "c.ds", tmp_path / "c", "store", tokenizer=tokenizer)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20), size=st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_portions_are_whole_documents(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], size: int) -> None:
    documents = [[number] * length for number, length in enumerate(lengths)]
    source = open_any(str(foreign.datatrove(tmp_path_factory.mktemp("p") / "a.ds", documents)))
    found = [
        ids[start:stop].tolist()
        for _, ids, ends in portions(source, size)
        for start, stop in itertools.pairwise([0, *ends.tolist()])
    ]
    assert found == documents
    assert all(len(ids) <= size or len(ends) == 1 for _, ids, ends in portions(source, size))


@pytest.mark.parametrize(
    ("make", "path", "expected"),
    [
        (lambda f: foreign.megatron(f / "m", [[[1]]]), "m", "megatron"),
        (lambda f: foreign.megatron(f / "m", [[[1]]]), "m.bin", "megatron"),
        (lambda f: foreign.megatron(f / "m", [[[1]]]), "", "megatron"),
        (lambda f: foreign.llmc(f / "a.bin", [1, 2]), "a.bin", "llmc"),
        (lambda f: foreign.llmc(f / "a.bin", [1, 2]), "", "llmc"),
        (lambda f: foreign.datatrove(f / "a.ds", [[1]]), "a.ds", "datatrove"),
        (lambda f: foreign.datatrove(f / "a.ds", [[1]]), "", "datatrove"),
        (lambda f: np.save(f / "a.npy", np.array([1])), "a.npy", "tokens"),
        (lambda f: np.save(f / "a.npy", np.array([1])), "*.npy", "tokens"),
        (lambda f: (f / "a.bin").write_bytes(b"12"), "a.bin", "tokens"),
    ],
)
def test_formats_are_told_apart(tmp_path: Path, make: Any, path: str, expected: str) -> None:
    make(tmp_path)
    assert detect(str(tmp_path / path) if path else str(tmp_path)) == expected


def test_text_is_no_token_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(DataError, match="is text, not tokens; tokenize it with"):
        detect(str(tmp_path / "a.jsonl"))
    with pytest.raises(DataError, match="not a token store"):
        detect(str(tmp_path))


def verified(path: Path, vocab_size: int | None = None, **more: Any) -> dict[str, Any]:
    return inspect.verify_tokens(open_any(str(path), **more), vocab_size, silent)


def test_verify_finds_what_opening_cannot_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_data.storage.shards._WHOLE", 1)
    monkeypatch.setattr("forge_data.storage.shards.CHECKED", 2)  # blocks: the first and the last
    foreign.megatron(tmp_path / "m", [[[number % 9, 0]] for number in range(20_000)])
    assert verified(tmp_path / "m")["faults"] == []
    content = bytearray((tmp_path / "m.idx").read_bytes())
    n = 20_000
    at = 34 + 4 * n + 8 * 15_000
    content[at : at + 8] = (60_004).to_bytes(8, "little")
    (tmp_path / "m.idx").write_bytes(content)
    faults = verified(tmp_path / "m")["faults"]
    assert any(f"m.idx at byte {at}: sequence 15000 does not begin where sequence 14999 ends" in fault for fault in faults)

    path = foreign.datatrove(tmp_path / "a.ds", [[1, 0] for _ in range(20_000)])
    index = bytearray((tmp_path / "a.ds.index").read_bytes())
    index[80_000:80_008] = (1).to_bytes(8, "little")
    (tmp_path / "a.ds.index").write_bytes(index)
    (fault,) = verified(path)["faults"]
    assert fault.endswith("a.ds.index at byte 80000: document 10000 ends before it begins")

    foreign.megatron(tmp_path / "holes", [[[1, 0]], [[]], [[2, 0]]])
    found = verified(tmp_path / "holes")
    assert (found["faults"], found["empty_documents"]) == ([], 1)
    assert "1 documents have no tokens" in inspect.verification_text(found)


def test_verify_checks_every_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_data.sources.token_files.SCANNED", 1)
    monkeypatch.setattr("forge_data.sources.token_files.TOKEN_BLOCKS", 0)  # opening sees the first block and the last
    ids = np.ones(300_000, dtype="<i4")
    ids[123_457] = 50_000
    ids.tofile(tmp_path / "a.bin")
    (fault,) = verified(tmp_path / "a.bin", 50_000, dtype="int32")["faults"]
    assert fault == f"{tmp_path}/a.bin at byte 493828 (token 123457): id 50000 is not in a vocabulary of 50000 ids"
    assert verified(tmp_path / "a.bin", 50_001, dtype="int32")["faults"] == []
    ids[123_457] = -3
    ids.tofile(tmp_path / "a.bin")
    found = verified(tmp_path / "a.bin", dtype="int32")
    assert "token 123457): id -3" in found["faults"][0] and found["ids_outside"] == 1


def test_verify_counts_duplicates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(1, 900, size=12).tolist(), 0] for _ in range(400)]
    path = foreign.datatrove(tmp_path / "a.ds", [*documents, *documents[:100], *documents[:50]])
    assert verified(path)["duplicates"] == {"documents_compared": 550, "copies": 150}
    monkeypatch.setattr(inspect, "_HASHES_KEPT", 100)
    sampled = verified(path)["duplicates"]
    assert sampled["documents_compared"] <= 100 and 5 < sampled["copies"] < 60


def test_diff_names_the_first_difference(tmp_path: Path) -> None:
    documents = [[1, 2, 0], [3, 4, 5, 0], [6, 0]]
    one = open_any(str(foreign.datatrove(tmp_path / "a.ds", documents)))
    same = open_any(str(foreign.megatron(tmp_path / "m", [[document] for document in documents], "int64")))
    assert diff.diff_corpora(one, same)["equal"]
    token = open_any(str(foreign.datatrove(tmp_path / "b.ds", [[1, 2, 0], [3, 9, 5, 0], [6, 0]])))
    found = diff.diff_corpora(one, token)
    assert found["first_token"] == {
        "token": 4,
        "document": 1,
        "ids": [4, 9],
        "places": [f"{tmp_path}/a.ds at byte 8", f"{tmp_path}/b.ds at byte 8"],
    }
    assert found["first_border"] is None and not found["equal"]
    border = open_any(str(foreign.datatrove(tmp_path / "c.ds", [[1, 2, 0], [3, 4], [5, 0], [6, 0]])))
    assert diff.diff_corpora(one, border)["first_border"] == {"token": 5, "only_in": border.name}
    for beginning in (documents[:2], [[1, 2, 0], [3, 4]]):  # the second ends inside a document
        shorter = diff.diff_corpora(one, open_any(str(foreign.datatrove(tmp_path / "d.ds", beginning))))
        assert shorter["first_token"] is None and shorter["first_border"] is None and not shorter["equal"]
    assert "the beginning of the longer one" in diff.corpora_text(shorter, ("a", "d"))


TEXT = st.text(st.sampled_from("abcDE é漢.,!-  \n\u2019\u20140"), max_size=80)


@given(text=TEXT, n=st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_hashes_are_equal_where_runs_of_words_are(text: str, n: int) -> None:
    """Over two copies with other marks and capitals: the same words, so the same hashes; other runs have others."""
    words = words_of(text)
    found = run_hashes(text, n).tolist()
    runs = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
    assert len(found) == len(runs)
    assert len(set(found)) == len(set(runs)) and len(set(zip(found, runs, strict=True))) == len(set(runs))
    assert run_hashes("... " + text.upper().replace("É", "é") + " ?", n).tolist() == found
    assert run_hashes(" ; ".join(word.decode() for word in words), n).tolist() == found


def test_words_leave_marks_and_capitals_out() -> None:
    assert [word.decode() for word in words_of("Don\u2019t STOP — “now”, at 3.14! 漢字")] == [
        "don",
        "t",
        "stop",
        "now",
        "at",
        "3",
        "14",
        "漢字",
    ]


def test_decontaminate_finds_exactly_the_documents_that_overlap(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    vocabulary = [f"word{number}" for number in range(400)]
    texts = [" ".join(rng.choice(vocabulary, size=60)) for _ in range(50)]
    questions = [" ".join(rng.choice(vocabulary, size=20)) for _ in range(30)]
    texts[7] += "\n" + questions[3].upper().replace(" ", ", ")  # other capitals and marks
    texts[20] = " ".join(questions[5].split()[:13]) + " tail"  # just enough words
    texts[21] = " ".join(questions[6].split()[:12]) + " tail"  # one too few
    texts[30] = "before short question indeed after"
    examples = [{"question": text, "id": number} for number, text in enumerate(questions)]
    examples += [{"question": "short question indeed"}, {"question": "two words"}]
    (tmp_path / "eval.jsonl").write_text("\n".join(json.dumps(example) for example in examples))
    for number, text in enumerate(texts):
        (tmp_path / f"{number:02d}.txt").write_text(text)
    tokenize(text_files(str(tmp_path / "*.txt")), ByteTokenizer(), tmp_path / "s", source="s", report=silent)
    found = decontaminate(
        str(tmp_path / "s"),
        [str(tmp_path / "eval.jsonl")],
        ("question",),
        13,
        tmp_path / "clean",
        tmp_path / "report.jsonl",
        silent,
    )
    assert (found["documents"], found["overlapping_documents"], found["overlapping_examples"]) == (50, 3, 3)
    assert (found["examples"], found["too_short"]) == (32, 1)
    named = {json.loads(line)["document"] for line in (tmp_path / "report.jsonl").read_text().splitlines()}
    assert named == {7, 20, 30}
    clean = StoreSource(tmp_path / "clean")
    assert clean.verify() == [] and clean.documents == 47 and clean.tokenizer == StoreSource(tmp_path / "s").tokenizer
    kept = bytes(min(token, 255) for token in clean.read(0, clean.tokens).tolist()).split(b"\xff")[:-1]
    assert [text.decode() for text in kept] == [text for number, text in enumerate(texts) if number not in (7, 20, 30)]


def test_decontaminate_refuses_what_it_cannot_compare(tmp_path: Path) -> None:
    path = foreign.datatrove(tmp_path / "a.ds", [[1, 2, 0]])
    (tmp_path / "eval.jsonl").write_text('{"question": "a b"}\n')
    with pytest.raises(DataError, match="has no copy of its tokenizer"):
        decontaminate(str(path), [str(tmp_path / "eval.jsonl")], (), 13, None, None, silent)
    with StoreWriter(tmp_path / "s", dtype="uint16", tokenizer=ByteTokenizer()) as writer:
        writer.add(np.array([65, 256]), np.array([2]))
        writer.commit()
    with pytest.raises(DataError, match="no example has at least 3 words"):
        decontaminate(str(tmp_path / "s"), [str(tmp_path / "eval.jsonl")], (), 13, None, None, silent)
    with pytest.raises(DataError, match=r"eval\.jsonl at byte 0 has no text under answer"):
        decontaminate(str(tmp_path / "s"), [str(tmp_path / "eval.jsonl")], ("answer",), 13, None, None, silent)
    with pytest.raises(DataError, match="does not exist"):
        decontaminate(str(tmp_path / "s"), [str(tmp_path / "none.jsonl")], (), 13, None, None, silent)
