"""What `data diff` does: the first difference between two corpora."""

from typing import Any

import numpy as np

from forge_core.protocols.data import Source
from forge_data.packing.portions import place_of

_BLOCK = 1 << 22


def diff_corpora(one: Source, other: Source) -> dict[str, Any]:
    """The first token and the first document border at which two corpora differ; JSON as it stands.

    Tokens are compared by value, so a corpus as uint16 equals itself as int32.
    """
    found: dict[str, Any] = {
        "tokens": [one.tokens, other.tokens],
        "dtype": [one.read(0, 0).dtype.name, other.read(0, 0).dtype.name],
        "tokenizer": [one.tokenizer, other.tokenizer],
        "fingerprint": [one.fingerprint, other.fingerprint],
        "first_token": None,
        "first_border": None,
    }
    shared = min(one.tokens, other.tokens)
    for start in range(0, shared, _BLOCK):
        stop = min(start + _BLOCK, shared)
        different = np.flatnonzero(one.read(start, stop) != other.read(start, stop))
        if len(different):
            token = start + int(different[0])
            found["first_token"] = _different_token(one, other, token)
            break
    for start in range(0, shared, _BLOCK):
        stop = min(start + _BLOCK, shared)
        borders = np.setxor1d(one.ends(start, stop), other.ends(start, stop))
        if len(borders) and not (int(borders[0]) == shared and one.tokens != other.tokens):
            end = int(borders[0])
            here = len(one.ends(end - 1, end)) > 0
            found["first_border"] = {"token": end, "only_in": [one.name, other.name][0 if here else 1]}
            break
    found["equal"] = one.tokens == other.tokens and found["first_token"] is None and found["first_border"] is None
    return found


def _different_token(one: Source, other: Source, token: int) -> dict[str, Any]:
    document = sum(len(one.ends(start, min(start + _BLOCK, token))) for start in range(0, token, _BLOCK))
    return {
        "token": token,
        "document": document,
        "ids": [int(source.read(token, token + 1)[0]) for source in (one, other)],
        "places": [place_of(source, token) for source in (one, other)],
    }


def corpora_text(found: dict[str, Any], names: tuple[str, str]) -> str:
    """The same for a terminal."""
    if found["equal"]:
        return f"equal: {found['tokens'][0]:,} tokens, every document border"
    lines = [
        f"{key}: {found[key][0]} in {names[0]}, {found[key][1]} in {names[1]}"
        for key in ("tokens", "tokenizer")
        if found[key][0] != found[key][1]
    ]
    if first := found["first_token"]:
        lines.append(f"first different token: {first['token']}, in document {first['document']}")
        lines += [f"  {place}: id {id_}" for place, id_ in zip(first["places"], first["ids"], strict=True)]
    elif found["tokens"][0] != found["tokens"][1]:
        lines.append("the shorter one is the beginning of the longer one")
    if border := found["first_border"]:
        lines.append(f"first different border: a document ends at token {border['token']} in {border['only_in']} only")
    return "\n".join(lines)
