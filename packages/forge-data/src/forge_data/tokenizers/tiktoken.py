"""Byte-pair encodings of the `tiktoken` library: a named encoding, or a rank file with its pattern."""

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from forge_core.errors import DataError
from forge_data.tokenizers.control import Encoded, TextPieces, characters_of

KIND = "forge-tiktoken"


class TiktokenTokenizer:
    """An encoding of tiktoken, without prefix and suffix. `encode` treats the spelling of a special token as ordinary text."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    def __init__(self, name: str, pattern: str, ranks: Mapping[bytes, int], special: Mapping[str, int], eos: str) -> None:
        """
        Args:
            name: name of the encoding.
            pattern: regular expression that splits text before merging.
            ranks: token id of every byte string.
            special: token id of every special string.
            eos: the special string that ends a document.

        Raises:
            DataError: tiktoken is not installed, or the encoding lacks the token `eos`.
        """
        try:
            import tiktoken
        except ImportError as error:
            raise DataError("tokenizer 'tiktoken' needs the tiktoken library; pip install 'forge-data[tiktoken]'") from error
        if eos not in special:
            raise DataError(f"encoding {name} has no special token {eos!r}; it has {', '.join(special) or 'none'}")
        self.name = name
        self._parts = (pattern, dict(ranks), dict(special), eos)
        self._encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens=dict(special))
        self.eos: int | None = special[eos]
        self.special_tokens: Mapping[str, str] = {"eos_token": eos}
        self.vocab_size: int = self._encoding.max_token_value + 1
        self.fingerprint = sha256(self.dump()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Returns (tokens,) int64 ids, without special tokens."""
        return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.int64)

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]], cuts: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """See `forge_core.protocols.data.Tokenizer`."""
        return TextPieces(pieces, cuts).encode(self._parts[2], self._encode_text)

    def _encode_text(self, text: str) -> Encoded:
        ids = self.encode(text)
        sizes = [len(token) for token in self._encoding.decode_tokens_bytes(ids.tolist())]
        return ids, *characters_of(text, np.array(sizes, dtype=np.int64))

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`, without special tokens."""
        left_out = set(self._parts[2].values())
        return self._encoding.decode([index for index in ids if index not in left_out])

    def as_json(self) -> bytes:
        """Returns the content of a `tokenizer.json` that produces the same ids.

        Raises:
            DataError: the encoding cannot be converted; see `forge_data.tokenizers.tiktoken_json.as_json`.
        """
        from forge_data.tokenizers.tiktoken_json import as_json

        pattern, ranks, special, _ = self._parts
        return as_json(self.name, pattern, ranks, special)

    def dump(self) -> bytes:
        """Everything as JSON: pattern, ranks in their order, special tokens."""
        pattern, ranks, special, eos = self._parts
        listed = [[b64encode(token).decode(), rank] for token, rank in sorted(ranks.items(), key=lambda item: item[1])]
        content = {"type": KIND, "version": 1, "name": self.name, "eos": eos, "pattern": pattern, "special": special}
        return (json.dumps(content | {"ranks": listed}, sort_keys=True) + "\n").encode()


def load_ranks(path: str, *, pattern: str | None, special_tokens: Mapping[str, int], eos: str) -> TiktokenTokenizer:
    """Loads an encoding from a rank file.

    Args:
        path: the file: a base64 token and its rank on each line.
        pattern: regular expression that splits text before merging.
        special_tokens: id of every special string; by default only `eos`, with the id after the last rank.
        eos: the special string that ends a document.

    Raises:
        DataError: the pattern is missing, or the file cannot be read or is damaged.
    """
    if pattern is None:
        raise DataError(f"{path} holds only ranks; set `pattern` to the regular expression of the encoding")
    ranks = _ranks(Path(path))
    special = dict(special_tokens) or {eos: max(ranks.values()) + 1}
    return TiktokenTokenizer(Path(path).stem, pattern, ranks, special, eos)


def restore(content: Mapping[str, Any]) -> TiktokenTokenizer:
    """Restores the tokenizer of a parsed `dump`."""
    ranks = {b64decode(token): rank for token, rank in content["ranks"]}
    return TiktokenTokenizer(content["name"], content["pattern"], ranks, content["special"], content["eos"])


def load_encoding(name: str, eos: str) -> TiktokenTokenizer:
    """Loads a named encoding; the library downloads it once and caches it.

    Raises:
        DataError: tiktoken is not installed, has no such encoding, or cannot download it.
    """
    try:
        import tiktoken
    except ImportError as error:
        raise DataError("tokenizer 'tiktoken' needs the tiktoken library; pip install 'forge-data[tiktoken]'") from error
    if name not in tiktoken.list_encoding_names():
        raise DataError(f"tiktoken has no encoding {name!r}; it has {', '.join(tiktoken.list_encoding_names())}")
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # its downloader may raise anything
        raise DataError(
            f"encoding {name!r} cannot be fetched: {error}; set TIKTOKEN_CACHE_DIR to a directory that has it, or set `path`"
        ) from error
    return TiktokenTokenizer(name, encoding._pat_str, encoding._mergeable_ranks, encoding._special_tokens, eos)


def _ranks(path: Path) -> dict[bytes, int]:
    """Reads a file with a base64 token and its rank on each line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    ranks = {}
    for number, line in enumerate(lines, 1):
        try:
            if line:
                token, rank = line.split()
                ranks[b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise DataError(f"{path}, line {number} is not a base64 token with a rank: {error}") from error
    if not ranks:
        raise DataError(f"{path} is empty; restore the file")
    return ranks
