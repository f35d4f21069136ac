"""Runs whose tokenizer is of another library: samples while they train, and text from their checkpoints."""

import json
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext, Tokenizer
from forge_core.protocols.weights import WeightsInfo
from forge_core.registry import Registry
from forge_data.components import Bpe, Bytes, SentencePiece, Tiktoken
from forge_models.generation import Sampling
from forge_train.directory import SAMPLES
from forge_train.inference.continuation import Continuation
from forge_train.inference.stored import load_model, open_weights
from forge_train.inference.tokenizer import tokenizer_for, write_tokenizer
from harness.siblings import fast
from train.runs import TINY, train

TEXT = "the cat sat on the mat; the dog sat on the cat.\n" * 40
PATTERN = r" ?\p{L}+|\s+|."
KINDS = ["tiktoken", "sentencepiece", "bpe", "bytes"]


@pytest.fixture(scope="module")
def components(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "texts").mkdir()
    for number in range(4):
        (folder / "texts" / f"{number}.txt").write_text(TEXT)
    tokens = [*(bytes([value]) for value in range(256)), b"th", b"the", b" t", b" th", b" the", b"at", b" cat"]
    (folder / "small.tiktoken").write_bytes(b"".join(b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    train_it = (  # in a process of its own, because the library writes to the terminal
        "import io, sys, sentencepiece as s; out = io.BytesIO(); s.SentencePieceTrainer.train(sentence_iterator=iter("
        "[' '.join(sys.argv[1].split()[i % 7:]) for i in range(60)]), model_writer=out, vocab_size=60, hard_vocab_limit=False,"
        " minloglevel=2); sys.stdout.buffer.write(out.getvalue())"
    )
    made = subprocess.run([sys.executable, "-c", train_it, TEXT[:200]], check=True, capture_output=True)
    (folder / "small.model").write_bytes(made.stdout)
    return {
        "folder": folder,
        "tiktoken": Tiktoken(path=str(folder / "small.tiktoken"), pattern=PATTERN),
        "sentencepiece": SentencePiece(path=str(folder / "small.model")),
        "bpe": Bpe(vocab_size=280, files=(str(folder / "texts"),)),
        "bytes": Bytes(),
    }


def built(components: dict[str, Any], kind: str) -> Tokenizer:
    return components[kind].build(SourceContext(components["folder"] / "work", None, 1, lambda _: None))


def weights(**facts: Any) -> Any:
    return SimpleNamespace(facts=WeightsInfo(**facts))


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_is_read_from_its_dump(components: dict[str, Any], tmp_path: Path, kind: str) -> None:
    original = built(components, kind)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(original.dump())
    found = tokenizer_for(weights(), path, Registry(), lambda _: None)
    assert (found.fingerprint, found.eos) == (original.fingerprint, original.eos)
    assert found.encode("the cat sat").tolist() == original.encode("the cat sat").tolist()
    assert found.prefix == ()


def test_a_model_of_sentencepiece_is_read_as_it_is(components: dict[str, Any], tmp_path: Path) -> None:
    original = built(components, "sentencepiece")
    path = tmp_path / "tokenizer.model"
    path.write_bytes((components["folder"] / "small.model").read_bytes())
    found = tokenizer_for(weights(), path, Registry(), lambda _: None)
    assert found.encode("the cat sat").tolist() == original.encode("the cat sat").tolist() and found.eos == original.eos
    assert tokenizer_for(weights(special_tokens={"eos_token_id": 7}), path, Registry(), lambda _: None).eos == 7
    assert found.prefix == ()
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    assert tokenizer_for(weights(), path, Registry(), lambda _: None).prefix == (1,)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"type": "forge-tiktoken"}', b"\xff"])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        tokenizer_for(weights(), tmp_path / "tokenizer.json", Registry(), lambda _: None)
    with pytest.raises(DataError, match="cannot be read"):
        tokenizer_for(weights(), tmp_path / "none.json", Registry(), lambda _: None)


@pytest.mark.parametrize("kind", fast("sentencepiece", of=["tiktoken", "sentencepiece"]))
def test_a_run_samples_and_generates(components: dict[str, Any], tmp_path: Path, kind: str) -> None:
    coder = built(components, kind)
    tokenizer = {
        "tiktoken": f'path = "{components["folder"]}/small.tiktoken"\npattern = {json.dumps(PATTERN)}\n',
        "sentencepiece": f'path = "{components["folder"]}/small.model"\n',
    }
    recipe = tmp_path / "run.toml"
    data = f'name = "text"\npath = "{components["folder"]}/texts"\n\n[data.tokenizer]\nname = "{kind}"\n{tokenizer[kind]}'
    changed = TINY.replace('name = "random"\nvocab_size = 61\ntokens = 4000\ndocument = 23\n', data)
    changed = changed.replace("vocab_size = 61", f"vocab_size = {coder.vocab_size}")
    recipe.write_text(changed + '\n[[hooks]]\nname = "sample"\nprompts = ["the cat"]\nmax_tokens = 6\ntemperature = 0\n')
    train(recipe, [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=3"])
    (sample,) = json.loads((tmp_path / "run" / SAMPLES).read_text())
    held = open_weights(tmp_path / "run", Registry())
    found = tokenizer_for(held, None, Registry(), lambda _: None)
    assert found.fingerprint == coder.fingerprint
    ends = frozenset(() if found.eos is None else (found.eos,))
    text = "".join(Continuation(load_model(held), found, Sampling(temperature=0.0), max_tokens=6, ends=ends)("the cat"))
    assert text == sample["text"]
    if kind == "tiktoken":
        exported(held, found, tmp_path)


def exported(held: Any, coder: Tokenizer, folder: Path) -> None:
    """The tokenizer of the run's export gives its ids; one that cannot be converted is named, and not written."""
    import transformers

    said: list[str] = []
    assert write_tokenizer(held, folder / "out", Registry(), said.append) and not said
    theirs = transformers.AutoTokenizer.from_pretrained(folder / "out")
    for text in ("the cat\n\n  sat 1234567", "<|endoftext|> caté 日本", "  \t the<|endoftext|>\r\n"):
        assert theirs.encode(text, split_special_tokens=True) == coder.encode(text).tolist()
    assert theirs.eos_token_id == coder.eos and theirs.encode("a<|endoftext|>")[-1] == coder.eos
    held.meta["config"]["data"]["tokenizer"]["pattern"] = "(?s).+"
    assert not write_tokenizer(held, folder / "none", Registry(), said.append)
    assert len(said) == 1 and "'small' cannot be converted to a tokenizer.json: its pattern has '(?s)'" in said[0]
    assert not (folder / "none").exists()
