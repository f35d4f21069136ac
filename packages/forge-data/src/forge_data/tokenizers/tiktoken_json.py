"""Converts encodings of tiktoken to a `tokenizer.json`, which transformers opens, and verifies that the ids are equal.

Both libraries merge by ranks. They differ in three points: tiktoken has ranks but no merges, drops text that its pattern does
not match, and interprets patterns by fancy-regex, while `tokenizers` uses Oniguruma.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain, islice
from random import Random
from typing import TYPE_CHECKING, Any

from forge_core.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

IN_UTF8 = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}
"""Bytes that occur in UTF-8."""
_LARGEST = 0x32400
"""Exclusive limit of the code points with letters; planes of private use and tags follow."""
_ALIKE = (*((0x3500, 0x4D00), (0x4F00, 0x9F00), (0xAD00, 0xD700), (0xD800, 0xF800), (0x17100, 0x18700), (0x20100, 0x2A600)),)
"""Ranges [first, end) of code points that are not tested: similar to their neighbors, unassigned, or for private use."""
_RUNS = (" ", "\n", "\r\n", "\t", "a", "A", "1", "0", ".", "=", "é", "字", "\U0001f600", "\u0301", " a", "a ", "'s", "\n ")
_MOST_UNUSED = 4096
_NO_LETTER = "\u2400"
"""A character that represents no byte, so no word of a text contains it."""
_LENGTHS = (*range(1, 13), 15, 16, 17, 31, 32, 33, 63, 64, 65)
_GROUPS = ("(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:")
"""Beginnings of groups, besides plain ones, that both regex engines interpret in the same way."""


def as_json(name: str, pattern: str, ranks: Mapping[bytes, int], special: Mapping[str, int]) -> bytes:
    """Returns the content of a `tokenizer.json` that produces the ids of an encoding.

    Args:
        name: name of the encoding, for messages.
        pattern: regular expression that splits text before merging.
        ranks: token id of every byte string.
        special: token id of every special string.

    Raises:
        DataError: the encoding cannot be converted; the message says why.
    """
    import tiktoken

    where = f"the tiktoken encoding {name!r} cannot be converted to a tokenizer.json"
    if missing := [byte for byte in sorted(IN_UTF8) if bytes([byte]) not in ranks]:
        raise DataError(f"{where}: it has no token for byte {missing[0]:#04x}")
    vocab = {_letters(token): rank for token, rank in ranks.items()}
    if both := [text for text in special if text in vocab]:
        raise DataError(f"{where}: {both[0]!r} is the spelling of both a special token and an ordinary token")
    merges = _merges(ranks)
    cut = _oniguruma(pattern, where)
    lookup = _needs_lookup(vocab, merges)
    last = max(vocab.values())
    if lookup and any(index <= last for index in special.values()):
        raise DataError(
            f"{where}: it has tokens that merges do not produce, and special tokens whose ids are below those of ordinary tokens"
        )
    converted = _backend(vocab, merges, cut, special, lookup, where)
    for text, index in special.items():
        if converted.token_to_id(text) != index:
            raise DataError(f"{where}: its special token {text!r} would get id {converted.token_to_id(text)} instead of {index}")
    probe, others = _probe_ranks()
    cuts = tiktoken.Encoding("probe", pat_str=pattern, mergeable_ranks=dict(probe), special_tokens={})
    _compare(cuts, _backend(*others, cut, {}, False, where), chain(_characters(), _runs()), where)
    whole = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens=dict(special))
    converted.encode_special_tokens = True
    _compare(whole, converted, _texts(ranks, special), where)
    converted.encode_special_tokens = False
    return converted.to_str().encode()


def _backend(
    vocab: Mapping[str, int],
    merges: list[tuple[str, str]],
    pattern: str,
    special: Mapping[str, int],
    lookup: bool,
    where: str,
) -> "Backend":
    """Builds the tokenizer of the library. `lookup`: a word that is a token is not merged."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ordered = sorted(special, key=special.__getitem__)
    if lookup:  # special tokens cannot be in the model's vocabulary, so their ids must follow it without gaps
        taken, last = {index: text for text, index in special.items()}, max(vocab.values())
        unused = set(range(max(taken, default=last))) - {*vocab.values(), *taken}
        if len(unused) > _MOST_UNUSED:
            raise DataError(
                f"{where}: it has tokens that merges do not produce, and {len(unused)} unused ids, more than {_MOST_UNUSED}"
            )
        ordered = [taken.get(index, f"<|unused_{index}|>") for index in range(last + 1, max(taken, default=-1) + 1)]
        vocab = {**vocab, **{f"{_NO_LETTER}{index}": index for index in unused if index < last}}
    else:
        vocab = {**vocab, **special}
    tokenizer = Tokenizer(models.BPE(dict(vocab), merges, ignore_merges=lookup))
    try:
        split = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)  # drops text that does not match
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{where}: Oniguruma does not accept its pattern {pattern!r}: {error}") from error
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, letters])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ordered])
    return tokenizer


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """Returns all pairs of tokens whose concatenation is a token, ordered by its rank."""
    merges = []
    for token, rank in ranks.items():
        pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
        merges += [(rank, ranks[left], ranks[right], left, right) for left, right in pairs if left in ranks and right in ranks]
    return [(_letters(left), _letters(right)) for _, _, _, left, right in sorted(merges)]


def _needs_lookup(vocab: Mapping[str, int], merges: list[tuple[str, str]]) -> bool:
    """Whether merging the bytes of some token does not produce this token."""
    from tokenizers import Tokenizer, models

    plain = Tokenizer(models.BPE(dict(vocab), merges))
    return any(plain.encode(text).ids != [index] for text, index in vocab.items())


def _compare(original: Any, converted: "Backend", texts: Iterator[str], where: str) -> None:
    """Compares the ids of texts.

    Raises:
        DataError: the ids of a text differ.
    """
    while chunk := list(islice(texts, 256)):
        expected = original.encode_ordinary_batch(chunk, num_threads=1)
        encodings = converted.encode_batch_fast(chunk, add_special_tokens=False)
        for ids, encoding in zip(expected, encodings, strict=True):
            if ids != encoding.ids:
                place = next((at for at, pair in enumerate(zip(ids, encoding.ids, strict=False)) if pair[0] != pair[1]), 0)
                near = original.decode(ids[max(place - 4, 0) : place + 6])
                raise DataError(f"{where}: the text near {near!r} would get other ids")


def _characters() -> Iterator[str]:
    """Yields texts with every code point that may be a letter, digit, mark or white space, in different contexts."""
    for start in range(0, _LARGEST, 64):
        if not any(first <= start < end for first, end in _ALIKE):
            characters = map(chr, range(start, start + 64))
            yield "".join(f"a{letter}A1{letter} {letter}.'{letter}\n{letter}" for letter in characters)


def _texts(ranks: Mapping[bytes, int], special: Mapping[str, int]) -> Iterator[str]:
    """Yields runs of characters, spellings of special tokens, and shuffled tokens of the encoding."""
    yield from _runs()
    yield from (f"{before}{text}{after}" for text in special for before in ("", " ", "a") for after in ("", "b", text))
    words = [token.decode("utf-8", "ignore") for token in ranks]
    Random(0).shuffle(words)
    for start in range(0, len(words), 64):
        yield "".join(words[start : start + 64])


def _runs() -> Iterator[str]:
    for run in _RUNS:
        yield from (f"{before}{run * count}{after}" for count in _LENGTHS for before in ("", "x") for after in ("", "y", " z"))


@cache
def _probe_ranks() -> tuple[Mapping[bytes, int], tuple[Mapping[str, int], list[tuple[str, str]]]]:
    """Returns ranks of all bytes and, in random order, of all pairs of bytes, whose ids reveal the splits of a text; and their
    vocabulary and merges."""
    pairs = [bytes([first, second]) for first in range(256) for second in range(256)]
    Random(0).shuffle(pairs)
    tokens = [*(bytes([byte]) for byte in range(256)), *pairs]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return ranks, ({_letters(token): rank for token, rank in ranks.items()}, _merges(ranks))


def _letters(token: bytes) -> str:
    return token.decode("latin-1").translate(_byte_letters())


@cache
def _byte_letters() -> dict[int, str]:
    """Returns the letter of each byte in byte-level encodings (Radford et al., 2019): printable bytes keep their character."""
    printed = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(256 + number) for number in range(256))
    return {byte: chr(byte) if byte in printed else next(others) for byte in range(256)}


def _oniguruma(pattern: str, where: str) -> str:
    """Converts a pattern of fancy-regex to Oniguruma: `^` and `$` match only at the ends of the text, and `{m,n}+` is possessive.

    Raises:
        DataError: a part of the pattern has another meaning in Oniguruma.
    """
    out: list[str] = []
    opened: list[int] = []
    atom = at = 0
    while at < len(pattern):
        rest = pattern[at:]
        if match := re.match(r"\\(?:[pPx]\{[^}]*\}|.)", rest, re.DOTALL):
            atom, piece = len(out), match[0]
        elif rest[0] == "[":
            atom, piece = len(out), _class(rest, where)
        elif rest.startswith("("):
            kind = next((group for group in _GROUPS if rest.startswith(group)), "(")
            if kind == "(" and rest.startswith("(?"):
                raise DataError(f"{where}: its pattern has {rest[:4]!r}, which means something else in `tokenizers`")
            opened.append(len(out))
            piece = kind
        elif rest[0] == ")":
            atom, piece = opened.pop() if opened else 0, ")"
        elif match := re.match(r"\{\d*(,?)\d*\}([+?]?)", rest):
            piece = match[0].removesuffix("+")
            if match[2] == "+":
                out[atom:] = ["(?>", *out[atom:], piece, ")"]
                at += len(match[0])
                continue
            if match[2] == "?" and not match[1]:
                raise DataError(f"{where}: its pattern has {piece!r}, which means something else in `tokenizers`")
        elif rest[0] in "^$":
            out.append({"^": r"\A", "$": r"\z"}[rest[0]])
            at += 1
            continue
        else:
            piece = rest[0]
            atom = atom if piece in "*+?" else len(out)
        out.append(piece)
        at += len(piece)
    return "".join(out)


def _class(rest: str, where: str) -> str:
    """Returns the character class at the beginning of `rest`."""
    depth = at = 0
    while at < len(rest):
        step = 2 if rest[at] == "\\" else 1
        if rest[at : at + 2] in ("--", "~~", "&&"):
            raise DataError(
                f"{where}: its pattern has {rest[at : at + 2]!r} in a set, which means something else in `tokenizers`"
            )
        depth += (rest[at] == "[") - (rest[at] == "]")
        at += step
        if not depth:
            return rest[:at]
    raise DataError(f"{where}: its pattern has a set without an end, {rest[:20]!r}")
