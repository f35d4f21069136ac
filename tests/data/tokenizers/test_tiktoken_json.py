"""A `tokenizer.json` made of an encoding of tiktoken: transformers gives the ids of tiktoken."""

from pathlib import Path
from typing import Any

import pytest
import tiktoken

from forge_core.errors import DataError
from forge_data.tokenizers.tiktoken_json import as_json
from harness.siblings import fast

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    ]
)
"""Of the encodings with these names in tiktoken 0.14."""
PATTERNS = {"gpt2": GPT2, "cl100k": CL100K, "o200k": O200K, "drops": r"\p{L}+|\p{N}{2,3}+"}
TEXTS = [
    "",
    "The cat's DON'T I'LL \u017f '\u017f we'VE",
    "1234567890 12 345\u0661\u0662\u0663\u0664 ½²³",
    "  a\n\n  b \t\t c\r\n\r\n   ",
    "\n \n  \n",
    "trailing   ",
    "line\n$end\n\nx",
    "Größe, naïve cafe\u0301, ÅÉÎ, ДОМ, 日本語のテキスト, 한국어, नमस्ते, ابجد",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f600\ufe0f \u2028\u0085\u00a0\u3000x",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" + "0" * 50 + " " * 50 + "\n" * 9,
    "<|endoftext|> a<|end|>b <|fim|><|end",
    "\x00\x7f\ud7ff\ue000\ufffd\uffff\U0010ffff",
    "def f(x):\n    return {'a': [x, 1.5e-3]}  # !!??//\n",
]
SPECIAL = {"<|endoftext|>": 700, "<|end|>": 703, "<|fim|>": 710}


def ranks() -> dict[bytes, int]:
    """All bytes, and words with what merges need of them; no library trains an encoding of tiktoken."""
    found = {bytes([value]): value for value in range(256)}
    for word in (b" the", b" cat", b"'s", b"'LL", b"000", b"    ", b"aaaa", b"\n\n", b" \n", b"ing", "ö".encode(), "é".encode()):
        for end in range(2, len(word) + 1):
            found.setdefault(word[:end], len(found))
    for word in ("日本語".encode(), b"123", b"456", b"12", b" 12", b"return", b"aa a"):
        for end in range(2, len(word) + 1):
            found.setdefault(word[:end], len(found))
    return found


def opened(folder: Path, content: bytes) -> Any:
    import transformers

    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(content)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", fast("cl100k", "drops", of=PATTERNS))
def test_transformers_gives_the_ids_of_tiktoken(name: str, tmp_path: Path) -> None:
    """Special tokens only where they are asked for; what they decode to, too."""
    pattern = PATTERNS[name]
    wanted = tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks(), special_tokens=SPECIAL)
    found = opened(tmp_path / "out", as_json("small", pattern, ranks(), SPECIAL))
    for text in TEXTS:
        ids = found.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ids == wanted.encode_ordinary(text), text
        assert found.encode(text) == wanted.encode(text, allowed_special="all"), text
        assert found.decode(ids) == wanted.decode(ids)
    assert {text: found.convert_tokens_to_ids(text) for text in SPECIAL} == SPECIAL


@pytest.mark.slow
def test_a_token_that_no_merges_make(tmp_path: Path) -> None:
    """tiktoken takes a word that is a token as it is. Special tokens are then no words, also where the pattern cuts them out."""
    given, special = ranks() | {b"whole": 640}, {"<|endoftext|>": 645, "<|b|>": 642}
    wanted = tiktoken.Encoding("small", pat_str=r"\s+|\S+", mergeable_ranks=given, special_tokens=special)
    found = opened(tmp_path / "out", as_json("small", r"\s+|\S+", given, special))
    for text in [*TEXTS, "whole", "a whole <|b|>", "<|b|> <|endoftext|>", "wholesale"]:
        assert found.encode(text, split_special_tokens=True) == wanted.encode_ordinary(text), text
        assert found.encode(text) == wanted.encode(text, allowed_special="all"), text
    with pytest.raises(DataError, match="tokens that merges do not produce, and special tokens whose ids are below"):
        as_json("small", r"\s+|\S+", given, {"<|endoftext|>": 600})
    low = {"<|endoftext|>": 600}
    assert opened(tmp_path / "low", as_json("small", GPT2, ranks() | {b"zz": 640}, low)).convert_tokens_to_ids([*low]) == [600]


def test_what_cannot_be_converted_is_named() -> None:
    given = ranks()
    for pattern, tokens, special, why in (
        (r"\w+|\W+", given, {}, "the text near .* would get other ids"),  # \w has superscript digits in one library alone
        (r"(?m)^a$|.", given, {}, r"its pattern has '\(\?m\)', which means something else in `tokenizers`"),
        (r"(?P<x>a)|.", given, {}, r"its pattern has '\(\?P<'"),
        (r"[\w--a]|.", given, {}, "its pattern has '--' in a set"),
        (r"a{2}?|.", given, {}, r"its pattern has '\{2\}\?'"),
        (r"\p{Script=Latin}+|.", given, {}, "Oniguruma does not accept its pattern"),
        (GPT2, {token: rank for token, rank in given.items() if token != b"q"}, {}, "has no token for byte 0x71"),
        (GPT2, given | {b"whole": 9000}, {"<|x|>": 9001}, "unused ids, more than 4096"),
        (GPT2, given | {b"<|x|>": 640}, {"<|x|>": 700}, "'<|x|>' is the spelling of both a special token and an ordinary token"),
    ):
        with pytest.raises(
            DataError, match=r"^the tiktoken encoding 'small' cannot be converted to a tokenizer\.json: "
        ) as refused:
            as_json("small", pattern, tokens, special)
        refused.match(why.replace("|", r"\|"))
