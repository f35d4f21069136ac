"""Ids: bytes are 0 to 255, pieces of k letters 256 to 255 + 4^k, in alphabetical order; the last id ends a document."""

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import pairwise, product
from types import MappingProxyType

import numpy as np

BYTES = 256


class KmerTokenizer:
    """Implements `forge_core.protocols.Tokenizer`. It has no control tokens that a text could spell."""

    name = "kmer"
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = MappingProxyType({})

    def __init__(self, k: int) -> None:
        self._k = k
        self._pieces = ["".join(letters) for letters in product("ACGT", repeat=k)]
        self._ids = {piece: BYTES + index for index, piece in enumerate(self._pieces)}
        self._tokens = re.compile(f"[ACGT]{{{k}}}|.", re.DOTALL)
        self.vocab_size = BYTES + len(self._pieces) + 1
        self.eos: int | None = self.vocab_size - 1
        self.fingerprint = sha256(self.dump()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return self.encode_pieces([(text, False)])[0]

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]], cuts: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        text = "".join(piece for piece, _ in pieces)
        ends = np.cumsum([len(piece) for piece, _ in pieces], dtype=np.int64)
        borders = sorted({0, len(text), *(int(ends[cut - 1]) for cut in cuts if cut)})
        ids, starts, stops = list[int](), list[int](), list[int]()
        for begin, end in pairwise(borders):  # no token spans a cut
            for match in self._tokens.finditer(text, begin, end):
                token = [self._ids[match[0]]] if match[0] in self._ids else list(match[0].encode("utf-8"))
                ids += token
                starts += [match.start()] * len(token)
                stops += [match.end() - 1] * len(token)
        places = np.searchsorted(ends, np.array([starts, stops], dtype=np.int64), side="right").T
        return np.array(ids, dtype=np.int64), places

    def decode(self, ids: Sequence[int]) -> str:
        spelled = (
            bytes([index]) if index < BYTES else self._pieces[index - BYTES].encode() for index in ids if index != self.eos
        )
        return b"".join(spelled).decode("utf-8", errors="replace")

    def dump(self) -> bytes:
        return (json.dumps({"type": "forge-fasta-kmer", "k": self._k}) + "\n").encode()
