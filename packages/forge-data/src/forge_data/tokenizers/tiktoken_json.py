"""Encodings of tiktoken as a `tokenizer.json` of the `tokenizers` library, which transformers opens. Ids are compared first.

Both merge by ranks. They differ in three things: tiktoken has ranks and no merges, drops text that its pattern does not match,
and reads patterns by fancy-regex, where `tokenizers` reads them by Oniguruma.
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
"""Bytes that a text may have."""
_LARGEST = 0x32400
"""Behind the last code point with letters; planes of private use and tags follow."""
_ALIKE = (*((0x3500, 0x4D00), (0x4F00, 0x9F00), (0xAD00, 0xD700), (0xD800, 0xF800), (0x17100, 0x18700), (0x20100, 0x2A600)),)
"""Code points [first, end) between many of the same kind, and those that are no characters or for private use."""
_RUNS = (" ", "\n", "\r\n", "\t", "a", "A", "1", "0", ".", "=", "é", "字", "\U0001f600", "\u0301", " a", "a ", "'s", "\n ")
_MOST_UNUSED = 4096
_NO_LETTER = "\u2400"
"""A character that stands for no byte, so that no text has a word with it."""
_LENGTHS = (*range(1, 13), 15, 16, 17, 31, 32, 33, 63, 64, 65)
_GROUPS = ("(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:")
"""Beginnings of groups that both kinds of patterns read alike, plain ones aside."""


def as_json(name: str, pattern: str, ranks: Mapping[bytes, int], special: Mapping[str, int]) -> bytes:
    """The content of a `tokenizer.json` that gives the ids of an encoding.

    Args:
        name: of the encoding, for messages.
        pattern: regular expression that cuts text before merging.
        ranks: token of every byte string.
        special: token of every special string.

    Raises:
        DataError: it cannot be converted; says what is in the way.
    """
    import tiktoken

    where = f"the tiktoken encoding {name!r} cannot be converted to a tokenizer.json"
    if missing := [byte for byte in sorted(IN_UTF8) if bytes([byte]) not in ranks]:
        raise DataError(f"{where}: it has no token for byte {missing[0]:#04x}")
    vocab = {_letters(token): rank for token, rank in ranks.items()}
    if both := [text for text in special if text in vocab]:
        raise DataError(f"{where}: {both[0]!r} is the spelling of a special token and of a token of text")
    merges = _merges(ranks)
    cut = _oniguruma(pattern, where)
    lookup = _needs_lookup(vocab, merges)
    last = max(vocab.values())
    if lookup and any(index <= last for index in special.values()):
        raise DataError(f"{where}: it has tokens that no merges make, and special tokens whose ids are below those of text")
    made = _backend(vocab, merges, cut, special, lookup, where)
    for text, index in special.items():
        if made.token_to_id(text) != index:
            raise DataError(f"{where}: its special token {text!r} would get id {made.token_to_id(text)} for {index}")
    probe, others = _probe_ranks()
    cuts = tiktoken.Encoding("probe", pat_str=pattern, mergeable_ranks=dict(probe), special_tokens={})
    _compare(cuts, _backend(*others, cut, {}, False, where), chain(_characters(), _runs()), where)
    whole = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens=dict(special))
    made.encode_special_tokens = True
    _compare(whole, made, _texts(ranks, special), where)
    made.encode_special_tokens = False
    return made.to_str().encode()


def _backend(
    vocab: Mapping[str, int],
    merges: list[tuple[str, str]],
    pattern: str,
    special: Mapping[str, int],
    lookup: bool,
    where: str,
) -> "Backend":
    """The tokenizer of the library. `lookup`: a word that is a token becomes it without merges."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ordered = sorted(special, key=special.__getitem__)
    if lookup:  # special tokens may not be words of the model, and so their ids follow those of words, of which none is left out
        taken, last = {index: text for text, index in special.items()}, max(vocab.values())
        unused = set(range(max(taken, default=last))) - {*vocab.values(), *taken}
        if len(unused) > _MOST_UNUSED:
            raise DataError(
                f"{where}: {len(unused)} ids have no token, and tokens that no merges make need {_MOST_UNUSED} at most"
            )
        ordered = [taken.get(index, f"<|unused_{index}|>") for index in range(last + 1, max(taken, default=-1) + 1)]
        vocab = {**vocab, **{f"{_NO_LETTER}{index}": index for index in unused if index < last}}
    else:
        vocab = {**vocab, **special}
    made = Tokenizer(models.BPE(dict(vocab), merges, ignore_merges=lookup))
    try:
        split = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)  # what does not match is dropped
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{where}: Oniguruma does not read its pattern {pattern!r}: {error}") from error
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, letters])  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ordered])
    return made


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """All pairs of tokens whose concatenation is a token, by its rank."""
    found = []
    for token, rank in ranks.items():
        pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
        found += [(rank, ranks[one], ranks[two], one, two) for one, two in pairs if one in ranks and two in ranks]
    return [(_letters(one), _letters(two)) for _, _, _, one, two in sorted(found)]


def _needs_lookup(vocab: Mapping[str, int], merges: list[tuple[str, str]]) -> bool:
    """Whether a token is not what merges make of its bytes."""
    from tokenizers import Tokenizer, models

    plain = Tokenizer(models.BPE(dict(vocab), merges))
    return any(plain.encode(text).ids != [index] for text, index in vocab.items())


def _compare(theirs: Any, made: "Backend", texts: Iterator[str], where: str) -> None:
    """Compares ids.

    Raises:
        DataError: those of a text differ.
    """
    while chunk := list(islice(texts, 256)):
        wanted = theirs.encode_ordinary_batch(chunk, num_threads=1)
        found = made.encode_batch_fast(chunk, add_special_tokens=False)
        for one, other in zip(wanted, found, strict=True):
            if one != other.ids:
                place = next((at for at, pair in enumerate(zip(one, other.ids, strict=False)) if pair[0] != pair[1]), 0)
                near = theirs.decode(one[max(place - 4, 0) : place + 6])
                raise DataError(f"{where}: the text near {near!r} would get other ids")


def _characters() -> Iterator[str]:
    """Each code point that may be a letter, a digit, a mark or white space, among those that patterns tell apart."""
    for start in range(0, _LARGEST, 64):
        if not any(first <= start < end for first, end in _ALIKE):
            each = map(chr, range(start, start + 64))
            yield "".join(f"a{one}A1{one} {one}.'{one}\n{one}" for one in each)


def _texts(ranks: Mapping[bytes, int], special: Mapping[str, int]) -> Iterator[str]:
    """Runs of all lengths, spellings of special tokens, and words of the encoding itself, beside each other."""
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
    """Ranks of all single bytes and, drawn, of all pairs, so that ids show where text is cut; and their words and merges."""
    pairs = [bytes([one, two]) for one in range(256) for two in range(256)]
    Random(0).shuffle(pairs)
    tokens = [*(bytes([byte]) for byte in range(256)), *pairs]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return ranks, ({_letters(token): rank for token, rank in ranks.items()}, _merges(ranks))


def _letters(token: bytes) -> str:
    return token.decode("latin-1").translate(_byte_letters())


@cache
def _byte_letters() -> dict[int, str]:
    """The letter of each byte in byte-level encodings (Radford et al., 2019): itself where it can be printed."""
    printed = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(256 + number) for number in range(256))
    return {byte: chr(byte) if byte in printed else next(others) for byte in range(256)}


def _oniguruma(pattern: str, where: str) -> str:
    """A pattern of fancy-regex as one of Oniguruma: `^` and `$` are the borders of a text there, not of its lines, and `{m,n}+`
    gives nothing back.

    Raises:
        DataError: it has a part whose meaning there is not known.
    """
    out: list[str] = []
    opened: list[int] = []
    atom = at = 0
    while at < len(pattern):
        rest = pattern[at:]
        if found := re.match(r"\\(?:[pPx]\{[^}]*\}|.)", rest, re.DOTALL):
            atom, piece = len(out), found[0]
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
        elif found := re.match(r"\{\d*(,?)\d*\}([+?]?)", rest):
            piece = found[0].removesuffix("+")
            if found[2] == "+":
                out[atom:] = ["(?>", *out[atom:], piece, ")"]
                at += len(found[0])
                continue
            if found[2] == "?" and not found[1]:
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
    """The set of characters with which a text begins."""
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
