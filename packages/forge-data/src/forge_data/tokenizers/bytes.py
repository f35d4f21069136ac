"""UTF-8 bytes as tokens."""

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType

import numpy as np

from forge_data.tokenizers.control import TextPieces, characters_of


class ByteTokenizer:
    """Token i is byte i; token 256 ends a document."""

    kind = "forge-bytes"
    name = "bytes"
    vocab_size = 257
    eos: int | None = 256
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = MappingProxyType({})
    parting = re.compile("")
    """A text can be cut anywhere."""

    def __init__(self) -> None:
        self.fingerprint = sha256(self.dump()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Returns (bytes,) int64 ids."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]], cuts: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """See `forge_core.protocols.data.Tokenizer`. This tokenizer has no control tokens that text could spell."""
        whole = TextPieces(pieces, cuts)
        ids = self.encode(whole.text)
        return ids, whole.places(*characters_of(whole.text, np.ones(len(ids), dtype=np.int64)))

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`, without the end of document; invalid UTF-8 becomes U+FFFD."""
        return bytes(index for index in ids if 0 <= index < 256).decode("utf-8", errors="replace")

    def dump(self) -> bytes:
        return (json.dumps({"type": self.kind, "version": 1}) + "\n").encode()
