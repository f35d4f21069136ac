"""Tokenizers of other libraries: the ids that the library gives, and a store that carries all it takes to read them."""

import json
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken

from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext
from forge_data.components import Bpe, SentencePiece, Tiktoken
from forge_data.preparation.tokenization import tokenize
from forge_data.sources.store import open_store
from forge_data.sources.text import text_files
from forge_data.tokenizers.dump import restore, tokenizer_of

PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
TEXT = "the cat sat on the mat; the dog <|endoftext|> sat on the cat.\n\nDie Katze läuft über 42 漢字 "


def built(component: Any) -> Any:
    return component.build(SourceContext(Path("unused"), None, 1, lambda _: None))


@pytest.fixture
def ranks(tmp_path: Path) -> tuple[Path, dict[bytes, int]]:
    """A file of all bytes and a few merges."""
    tokens = [*(bytes([value]) for value in range(256)), b"th", b"the", b" t", b" th", b" the", b"at", b"cat", b" cat"]
    found = {token: rank for rank, token in enumerate(tokens)}
    path = tmp_path / "small.tiktoken"
    path.write_bytes(b"".join(b64encode(token) + b" %d\n" % rank for token, rank in found.items()))
    return path, found


def test_tiktoken_gives_the_ids_of_its_library(ranks: tuple[Path, dict[bytes, int]]) -> None:
    path, found = ranks
    reference = tiktoken.Encoding("small", pat_str=PATTERN, mergeable_ranks=found, special_tokens={"<|endoftext|>": 264})
    tokenizer = built(Tiktoken(path=str(path), pattern=PATTERN))
    assert tokenizer.encode(TEXT).tolist() == reference.encode_ordinary(TEXT)
    assert max(tokenizer.encode(TEXT)) < 264 == tokenizer.eos and tokenizer.vocab_size == 265
    assert tokenizer.decode([*tokenizer.encode(TEXT).tolist(), 264]) == TEXT
    special = built(Tiktoken(path=str(path), pattern=PATTERN, special_tokens={"<|pad|>": 300, "<|end|>": 301}, eos="<|end|>"))
    assert (special.eos, special.vocab_size) == (301, 302)


def test_tiktoken_refuses_what_it_cannot_know(tmp_path: Path, ranks: tuple[Path, dict[bytes, int]]) -> None:
    with pytest.raises(DataError, match="set `pattern` to the regular"):
        built(Tiktoken(path=str(ranks[0])))
    with pytest.raises(DataError, match="no special token '<eos>'"):
        built(Tiktoken(path=str(ranks[0]), pattern=PATTERN, special_tokens={"<pad>": 300}, eos="<eos>"))
    with pytest.raises(DataError, match=r"has no encoding 'gpt9'; it has .*gpt2"):
        built(Tiktoken(encoding="gpt9"))
    (tmp_path / "bad.tiktoken").write_text("YQ== 0\nnonsense\n")
    with pytest.raises(DataError, match=r"bad\.tiktoken, line 2 is not a base64 token with a rank"):
        built(Tiktoken(path=str(tmp_path / "bad.tiktoken"), pattern=PATTERN))
    with pytest.raises(DataError, match="cannot be read: No such file"):
        built(Tiktoken(path=str(tmp_path / "none.tiktoken"), pattern=PATTERN))


def test_an_encoding_that_cannot_be_fetched_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(_: str) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(DataError, match="'gpt2' cannot be fetched: no route to host; set TIKTOKEN_CACHE_DIR"):
        built(Tiktoken())


@pytest.fixture(scope="session")
def model() -> bytes:
    """A small model; trained in a process of its own, because its library writes to the terminal."""
    script = (
        "import io, sys, sentencepiece as s; out = io.BytesIO(); lines = sys.argv[1].split()\n"
        "s.SentencePieceTrainer.train(sentence_iterator=iter([' '.join(lines[i % 7:]) for i in range(60)]), model_writer=out,\n"
        "  vocab_size=60, hard_vocab_limit=False, byte_fallback=False, minloglevel=2)\nsys.stdout.buffer.write(out.getvalue())"
    )
    return subprocess.run([sys.executable, "-c", script, TEXT], check=True, capture_output=True).stdout


def test_sentencepiece_gives_the_ids_of_its_library(tmp_path: Path, model: bytes) -> None:
    (tmp_path / "m.model").write_bytes(model)
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = built(SentencePiece(path=str(tmp_path / "m.model")))
    assert tokenizer.encode("the cat sat").tolist() == reference.encode("the cat sat")
    assert tokenizer.decode(tokenizer.encode("the cat sat").tolist()) == "the cat sat"
    assert (tokenizer.eos, tokenizer.vocab_size) == (reference.eos_id(), reference.get_piece_size())
    assert built(SentencePiece(path=str(tmp_path / "m.model"), eos="<s>")).eos == reference.bos_id()
    with pytest.raises(DataError, match="has no piece '<end>'"):
        built(SentencePiece(path=str(tmp_path / "m.model"), eos="<end>"))
    (tmp_path / "bad.model").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="is not a sentencepiece model"):
        built(SentencePiece(path=str(tmp_path / "bad.model")))
    with pytest.raises(DataError, match="cannot be read"):
        built(SentencePiece(path=str(tmp_path / "none.model")))


@pytest.fixture
def any_tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "tiktoken":
        return built(Tiktoken(path=str(request.getfixturevalue("ranks")[0]), pattern=PATTERN))
    if request.param == "sentencepiece":
        (tmp_path / "m.model").write_bytes(request.getfixturevalue("model"))
        return built(SentencePiece(path=str(tmp_path / "m.model")))
    (tmp_path / "train.txt").write_text(TEXT * 20)
    return Bpe(vocab_size=300, files=(str(tmp_path / "train.txt"),)).build(SourceContext(tmp_path / "w", None, 1, lambda _: None))


@pytest.mark.parametrize("any_tokenizer", ["tiktoken", "sentencepiece", "bpe"], indirect=True)
def test_a_store_carries_its_tokenizer_and_processes_can_make_it_again(any_tokenizer: Any, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("the cat sat on the mat " * (number + 1))
    texts = text_files(str(tmp_path / "[012].txt"))
    options: Any = {"source": "s", "report": lambda _: None}
    tokenize(texts, any_tokenizer, tmp_path / "threads", **options)
    tokenize(texts, any_tokenizer, tmp_path / "processes", workers=2, processes=True, **options)
    stores = [open_store(tmp_path / name, any_tokenizer) for name in ("threads", "processes")]
    assert stores[0].fingerprint == stores[1].fingerprint
    carried = tokenizer_of(stores[0])
    assert carried is not None and carried.dump() == any_tokenizer.dump() and carried.eos == any_tokenizer.eos
    first = stores[0].read(0, int(stores[0].ends()[0]))[:-1].tolist()
    assert carried.decode(first).strip() == ("the cat sat on the mat " * 1).strip()
    assert first == any_tokenizer.encode("the cat sat on the mat ").tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "is not a tokenizer"),
        (b"\xff", "is not a tokenizer"),
        (b'{"type": "forge-tiktoken"}', "damaged tokenizer: KeyError"),
        (b'{"type": "forge-sentencepiece", "model": "!", "eos": 1}', "damaged tokenizer|not a sentencepiece model"),
        (b'{"type": "other"}', "not a tokenizer.json of the tokenizers library"),
    ],
)
def test_a_damaged_copy_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        restore(content, 1, "tokenizer.json")


def test_pieces_of_tiktoken_are_those_of_its_library(ranks: tuple[Path, dict[bytes, int]]) -> None:
    path, found = ranks
    special = {"<|endoftext|>": 264, "<|im|>": 270, "<|im|><|x|>": 271}
    reference = tiktoken.Encoding("small", pat_str=PATTERN, mergeable_ranks=found, special_tokens=special)
    tokenizer = built(Tiktoken(path=str(path), pattern=PATTERN, special_tokens=special))
    pieces = [("<|im|>the", True), (" cat läuft", False), ("<|endoftext|>the 漢", True), ("字 cat", False)]
    whole = "".join(text for text, _ in pieces)
    ids, places = tokenizer.encode_pieces(pieces)
    assert ids.tolist() == reference.encode(whole, allowed_special="all")
    starts = reference.decode_with_offsets(ids.tolist())[1]
    of_character = [number for number, (text, _) in enumerate(pieces) for _ in text]
    assert places[:, 0].tolist() == [of_character[start] for start in starts]
    spelled = tokenizer.encode_pieces([("<|im|><|x|>", True), ("<|im|><|x|> the", False), ("<|x|>", True)])[0].tolist()
    assert spelled == [271, *reference.encode_ordinary("<|im|><|x|> the<|x|>")]
    parted = tokenizer.encode_pieces([("the", True), ("", True), ("cat", True)], cuts=[2])[0].tolist()
    assert parted == [*reference.encode_ordinary("the"), *reference.encode_ordinary("cat")]


def test_pieces_of_sentencepiece_are_those_of_its_library(tmp_path: Path, model: bytes) -> None:
    (tmp_path / "m.model").write_bytes(model)
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = built(SentencePiece(path=str(tmp_path / "m.model")))
    pieces = [("the ca", False), ("t sat on", True), ("  the mat", False)]
    ids, places = tokenizer.encode_pieces(pieces)
    assert ids.tolist() == reference.encode("the cat sat on  the mat")
    lengths = [len(piece.surface) for piece in reference.encode("the cat sat on  the mat", return_type="proto").pieces]
    assert sum(lengths) == 23 and places[0].tolist() == [0, 0] and places[-1].tolist() == [2, 2]
    ids = tokenizer.encode_pieces([("<s>", True), ("the cat</s>", False), ("</s>", True)])[0].tolist()
    assert ids == [reference.bos_id(), *reference.encode("the cat</s>"), reference.eos_id()]


def test_what_stands_around_a_text_of_sentencepiece_is_set_next_to_the_model(tmp_path: Path, model: bytes) -> None:
    path = tmp_path / "m.model"
    path.write_bytes(model)
    bare = built(SentencePiece(path=str(path)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "add_eos_token": True}))
    full, off = built(SentencePiece(path=str(path))), built(SentencePiece(path=str(path), add_special_tokens=False))
    assert (bare.prefix, bare.suffix, off.prefix) == ((), (), ()) and off.fingerprint == bare.fingerprint
    assert (full.prefix, full.suffix) == ((1,), ()) and full.fingerprint != bare.fingerprint
    assert built(SentencePiece(path=str(path), eos="<s>")).suffix == (2,)
    again = restore(full.dump(), None, "tokenizer.json")
    assert (again.prefix, again.fingerprint) == (full.prefix, full.fingerprint)


def test_dumps_are_json(ranks: tuple[Path, dict[bytes, int]]) -> None:
    content = json.loads(built(Tiktoken(path=str(ranks[0]), pattern=PATTERN)).dump())
    assert content["pattern"] == PATTERN and len(content["ranks"]) == 264
