"""What generation takes from the conversations that a run was trained on: its template and its stop tokens."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.tokenizers.kinds import KINDS, content
from forge_core.errors import DataError
from forge_data.tokenizers.bpe import BpeTokenizer
from forge_train.inference.tokenizer import chat_for, ends_of_texts, stops_of

NONE: dict[str, Any] = {"name": "chat", "template": "none", "stop": []}


def weights(*sources: dict[str, Any], path: str = "none", ends: tuple[int, ...] = (), **special: int) -> Any:
    recipe = {"data": {"sources": list(sources), "tokenizer": {"name": "bpe", "path": path}}}
    facts = SimpleNamespace(recipe=recipe, ends=ends, special_tokens=special, tokenizer=None, origin="a run")
    return SimpleNamespace(facts=facts, meta={})


def test_generation_stops_at_the_stop_tokens_of_the_conversations() -> None:
    coder = BpeTokenizer(content(KINDS["byte_level"]()), "</s>")
    end, other = (int(coder.encode_pieces([(each, True)])[0][0]) for each in ("<|im_end|>", "[INST]"))
    run = weights({**NONE, "stop": ["<|im_end|>"]}, {"name": "store"})
    assert stops_of(run, coder) == {end} and ends_of_texts(run, coder) == {end, coder.eos}
    assert ends_of_texts(weights(NONE), coder) == {coder.eos} and stops_of(weights(NONE), coder) == frozenset()
    assert ends_of_texts(weights({**NONE, "stop": ["<|im_end|>"]}, ends=(other,)), coder) == {end, other}
    assert ends_of_texts(weights({**NONE, "stop": ["<|im_end|>"]}, eos_token_id=other), coder) == {end, other}


def test_the_template_is_that_of_the_tokenizer_of_the_conversations(tmp_path: Path) -> None:
    coder = BpeTokenizer(content(KINDS["byte_level"]()), "</s>")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    path = str(tmp_path / "tokenizer.json")
    assert chat_for(weights(NONE, path=path), coder).template == "{{ messages[0].content }}"
    assert chat_for(weights({**NONE, "template": "chatml"}, path=path), coder).template.startswith("{% for m in messages")
    for run in (weights(NONE), weights({"name": "store"}, path=path)):
        with pytest.raises(DataError, match="has no chat template; choose one with --template"):
            chat_for(run, coder)
