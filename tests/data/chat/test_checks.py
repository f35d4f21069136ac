"""What `check` refuses about conversations before a run."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data.chat.templates import SIX, TALK, unmarked
from data.tokenizers.kinds import KINDS, fast
from forge_core.errors import Fault
from forge_data import Bpe, Bytes, Conversations, Data, TokenStore
from forge_data.checks import conversations_train, packing_keeps_documents
from forge_data.sources.store import MaskEntry
from forge_data.sources.store_writer import StoreWriter

TOKENS = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = fast(KINDS["byte_level"](), **TOKENS)
    tokenizer.chat_template = unmarked(SIX["chatml"])
    tokenizer.save_pretrained(path)
    (path / "talks.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    return path


def faults(folder: Path, source: Any, tokenizer: Any = None, **more: Any) -> list[Fault]:
    own = tokenizer or Bpe(path=str(folder / "tokenizer.json"), eos="<|im_end|>")
    data = Data(sources=[source], tokenizer=own, **({"packing": "best_fit", "sequence_length": 256} | more))
    return list(conversations_train(SimpleNamespace(data=data), None))  # type: ignore[arg-type]


def test_good_conversations_have_no_fault(folder: Path) -> None:
    assert faults(folder, Conversations(path=str(folder / "talks.jsonl"))) == []
    assert faults(folder, Conversations(path=str(folder / "absent.jsonl"))) == [], "reported by files_exist"
    assert faults(folder, Conversations(path=str(folder / "absent.jsonl"), weight=0.0), Bytes()) == []


def test_a_template_that_cannot_mark_the_assistants_tokens(folder: Path) -> None:
    changes = "{% for m in messages %}{{ m.content if loop.last else '...' }}{% endfor %}"
    (fault,) = faults(folder, Conversations(path=str(folder / "talks.jsonl"), template=changes))
    assert fault.key == "data.sources.0.path" and "line 1" in fault.message
    assert "mark those words in the template with {% generation %}" in fault.message
    (fault,) = faults(folder, Conversations(path=str(folder / "talks.jsonl"), template="{% for m in messages %}"))
    assert "is not valid Jinja" in fault.message
    (fault,) = faults(folder, Conversations(path=str(folder / "talks.jsonl"), template=str(folder / "absent")))
    assert fault.key == "data.sources.0.template"


def test_a_stop_token_that_no_example_trains(folder: Path) -> None:
    (fault,) = faults(folder, Conversations(path=str(folder / "talks.jsonl"), stop=("</s>",)))
    assert fault.key == "data.sources.0.stop" and "set data.tokenizer.eos" in fault.hint
    assert "none of the first 2 trained turns ends with a stop token" in fault.message and "pad" not in fault.message
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "</s>"}))
    (fault,) = faults(folder, Conversations(path=str(folder / "talks.jsonl"), stop=("</s>",)))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "is also the pad token" in fault.message


def test_rows_that_are_cut_so_that_nothing_is_trained(folder: Path, tmp_path: Path) -> None:
    long = [{"role": "user", "content": "why " * 100}, {"role": "assistant", "content": "So."}]
    (tmp_path / "long.jsonl").write_text(json.dumps({"messages": TALK}) + "\n" + json.dumps({"messages": long}) + "\n")
    path = str(tmp_path / "long.jsonl")
    (fault,) = faults(folder, Conversations(path=path, too_long="truncate"), sequence_length=128)
    assert fault.key == "data.sources.0.too_long" and "nothing to train on in its first 128 tokens" in fault.message
    (fault,) = faults(folder, Conversations(path=path), sequence_length=128)
    assert "tokens, but a row has 128" in fault.message and "long.jsonl:" in fault.message
    assert faults(folder, Conversations(path=path, too_long="skip"), sequence_length=128) == []
    assert faults(folder, Conversations(path=path), sequence_length=1024) == []


@pytest.mark.parametrize(
    ("pad", "why"), [(0, "0 is also the pad token, and whatever made the mask masked both"), (None, "would not learn to stop")]
)
def test_a_pad_token_that_is_the_stop_token_and_is_masked(pad: int | None, why: str, folder: Path, tmp_path: Path) -> None:
    """As a collator does that masks the id of the pad token wherever it is."""
    ids = np.array([5, 6, 7, 0, 8, 9, 0])
    for name, learned in (("wrong", ids != 0), ("right", ids > -1)):
        with StoreWriter(tmp_path / name, dtype="uint16", mask=MaskEntry(stops={"0": [0, 0]}, pad=pad)) as writer:
            writer.add(ids, np.array([4, 7]), learned=learned)
            writer.commit()
    (fault,) = faults(folder, TokenStore(path=str(tmp_path / "wrong")))
    assert fault.key == "data.sources.0.path" and why in fault.message
    assert faults(folder, TokenStore(path=str(tmp_path / "right"))) == []
    (fault,) = faults(folder, TokenStore(path=str(tmp_path / "right")), packing="concatenate")
    assert fault.key == "data.packing" and "are conversations and must stay whole" in fault.message


def test_settings_that_conversations_do_not_support(folder: Path, tmp_path: Path) -> None:
    (fault,) = faults(folder, Conversations(path=str(folder / "talks.jsonl"), format="preference"))
    assert fault.key == "data.sources.0.format" and "the rejected answers" in fault.message
    for tokenizer in (Bpe(),):
        (fault,) = faults(folder, Conversations(path=str(folder / "talks.jsonl")), tokenizer)
        assert fault.key == "data.tokenizer.path" and "need the tokenizer of their model" in fault.message
    (fault,) = faults(folder, Conversations(path=str(folder / "talks.jsonl"), format="alpaca"))
    assert "it looks like format = 'messages'" in fault.message
    data = Data(sources=[Conversations(path="x")], packing="concatenate")
    (fault,) = packing_keeps_documents(SimpleNamespace(data=data), None)  # type: ignore[arg-type]
    assert "documents of data.sources.0 are conversations and must stay whole" in fault.message
    with StoreWriter(tmp_path / "pairs", dtype="uint16", mask=MaskEntry("pairs")) as writer:
        writer.add(np.array([1, 2, 1, 3]), np.array([2, 4]), learned=np.ones(4, dtype=bool))
        writer.commit()
    (fault,) = faults(folder, TokenStore(path=str(tmp_path / "pairs")))
    assert "has preference pairs" in fault.message
