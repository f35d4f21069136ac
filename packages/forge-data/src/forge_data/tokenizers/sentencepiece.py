"""Models of the `sentencepiece` library."""

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from forge_core.errors import DataError

KIND = "forge-sentencepiece"


class SentencePieceTokenizer:
    """A model. Most models normalize text, so that what is decoded may differ from what was encoded in white space."""

    name = "sentencepiece"

    def __init__(self, model: bytes, eos: str | int | None, where: str) -> None:
        """Reads the content of a `.model` file.

        Args:
            model: its bytes.
            eos: piece or id that ends a document; None is the model's own.
            where: names it in messages.

        Raises:
            DataError: sentencepiece is not installed, this is not a model, or it lacks the piece.
        """
        try:
            import sentencepiece
        except ImportError as error:
            raise DataError("tokenizer 'sentencepiece' needs its library; pip install 'forge-data[sentencepiece]'") from error
        self._model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except Exception as error:  # its bindings raise bare RuntimeError and others
            raise DataError(f"{where} is not a sentencepiece model: {error}") from error
        if not model:  # which the library would take
            raise DataError(f"{where} is not a sentencepiece model: it is empty")
        self.vocab_size: int = self._processor.get_piece_size()
        self.eos: int | None = self._end(eos, where)
        self.fingerprint = sha256(self.dump()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """(tokens,) int64, without begin and end."""
        return np.array(self._processor.encode(text, add_bos=False, add_eos=False), dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; control pieces are left out."""
        return self._processor.decode([int(index) for index in ids])

    def dump(self) -> bytes:
        """The model and its end of document as JSON."""
        content = {"type": KIND, "version": 1, "eos": self.eos, "model": b64encode(self._model).decode()}
        return (json.dumps(content, sort_keys=True) + "\n").encode()

    def _end(self, eos: str | int | None, where: str) -> int:
        if isinstance(eos, int):
            return eos
        if eos is None:
            found = self._processor.eos_id()
            if found < 0:
                raise DataError(f"{where} has no end of sentence; name the piece that ends a document by data.tokenizer.eos")
            return found
        found = self._processor.piece_to_id(eos)
        if self._processor.id_to_piece(found) != eos:
            raise DataError(f"{where} has no piece {eos!r}; set data.tokenizer.eos to the one that ends a document")
        return found


def load(path: str, eos: str | None) -> SentencePieceTokenizer:
    """The model in a file.

    Raises:
        DataError: it cannot be read.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"tokenizer {path} cannot be read: {error.strerror}") from error
    return SentencePieceTokenizer(content, eos, path)


def restore(content: Mapping[str, Any], where: str) -> SentencePieceTokenizer:
    """The tokenizer of a parsed `dump`."""
    return SentencePieceTokenizer(b64decode(content["model"], validate=True), content["eos"], where)
