"""Encoding by words seen before gives the ids of the tokenizers library, whatever the text; and applies only where it does."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from forge_data.tokenizers import bpe
from forge_data.tokenizers.bpe import BpeTokenizer

TEXT = "the cat's 12 hats aren't there;\n\n  def f(x):\n\treturn x + 1  # they'll we've I'm he'd you're\r\n été 漢字 \u00a0\n"
END = "<|endoftext|>"


def trained(**changed: Any) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = changed.pop("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([TEXT] * 9, trainer)
    return backend


def of(backend: Tokenizer) -> BpeTokenizer:
    return BpeTokenizer(backend.to_str().encode(), END)


LIBRARY = trained()
TOKENIZER = of(LIBRARY)
LIBRARY.encode_special_tokens = True

SPACES = " \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\u00a0\u180e\u2028\u3000\ufeff\u200b"
ALPHABET = st.sampled_from(
    [*SPACES, *" \n\n' ", "'", "s", "t", "re", "ll", "d", "x", "X", "7", "é", "漢", "²", "́", "!", "_", END]
)


@given(text=st.lists(ALPHABET, max_size=30).map("".join) | st.text(max_size=30))
@settings(max_examples=1500, deadline=None)
@example(text="a  \nb")  # the line feed is a word of its own only because of what follows
@example(text="é\n\na\n é")
@example(text="a\n\u180e")
@example(text=f"a{END}\n'{END}")
def test_ids_are_those_of_the_library(text: str) -> None:
    assert TOKENIZER._words is not None
    assert TOKENIZER.encode(text).tolist() == LIBRARY.encode(text, add_special_tokens=False).ids


def test_parts_of_a_text_make_it_up_and_most_of_it_is_not_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "plain\n" * 50 + "naïve\n" + "plain\n" * 50
    assert [(len(part), ascii_only) for part, ascii_only in bpe._ascii_parts(text)] == [(299, True), (6, False), (301, True)]
    taken = []
    real = bpe.WordCache._library
    monkeypatch.setattr(bpe.WordCache, "_library", lambda self, part: (taken.append(part), real(self, part))[1])
    TOKENIZER.encode(text)
    assert taken == ["\nnaïve"]


def test_words_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe, "_MOST_WORDS", 20)
    tokenizer = of(trained())
    assert tokenizer._words is not None
    for start in range(0, 200, 7):
        text = " ".join(str(number) for number in range(start, start + 9)) + " " + "long" * 30
        assert tokenizer.encode(text).tolist() == LIBRARY.encode(text, add_special_tokens=False).ids
        assert len(tokenizer._words._ids) <= 20 and "long" * 30 not in "".join(tokenizer._words._ids)


def test_threads_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe, "_MOST_WORDS", 30)
    tokenizer = of(trained())
    texts = [" ".join(str(number * 7 % 90) for number in range(start, start + 30)) for start in range(300)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(tokenizer.encode, texts))
    expected = [LIBRARY.encode(text, add_special_tokens=False).ids for text in texts]
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def changed(**keys: Any) -> Tokenizer:
    content = json.loads(trained().to_str())
    content["model"] |= keys
    return Tokenizer.from_str(json.dumps(content))


def test_tokenizers_that_look_beyond_words_are_left_to_the_library() -> None:
    added, normal = trained(), trained()
    added.add_tokens([AddedToken("return x", special=False)])
    normal.normalizer = normalizers.Lowercase()
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    others = [
        added,
        normal,
        trained(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        trained(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
        trained(pre_tokenizer=split),
        changed(dropout=0.5),
    ]
    for backend in others:
        tokenizer = of(backend)
        assert tokenizer._words is None
    for backend in others[:-1]:  # the last one is random
        backend.encode_special_tokens = True
        assert of(backend).encode(TEXT).tolist() == backend.encode(TEXT, add_special_tokens=False).ids
    with_dropout = BpeTokenizer(trained().to_str().encode(), END)
    assert with_dropout._words is not None, "the plain one does apply"
