"""Models of the `sentencepiece` library."""

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from forge_core.errors import DataError
from forge_data.tokenizers.control import Encoded, TextPieces

KIND = "forge-sentencepiece"


class SentencePieceTokenizer:
    """A sentencepiece model. Most models normalize text, so decoded text may differ from the encoded text in white space."""

    name = "sentencepiece"

    def __init__(self, model: bytes, eos: str | int | None, where: str, begins: bool = False, ends: bool = False) -> None:
        """Parses the content of a `.model` file.

        Args:
            model: content of the file.
            eos: piece or id that ends a document; None for the model's end of sentence.
            where: name of the model for messages.
            begins, ends: whether the model's BOS and EOS are added around a text, which the model does not state.

        Raises:
            DataError: sentencepiece is not installed, the content is not a model, or the model lacks the piece.
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
        if not model:  # the library accepts an empty model
            raise DataError(f"{where} is not a sentencepiece model: it is empty")
        self.vocab_size: int = self._processor.get_piece_size()
        self.eos: int | None = self._end(eos, where)
        self._around = (begins, ends)
        self.folder: Path | None = None
        bos, end = self._processor.bos_id(), self._processor.eos_id()
        self.prefix: tuple[int, ...] = (bos,) if begins and bos >= 0 else ()
        self.suffix: tuple[int, ...] = (end,) if ends and end >= 0 and end != self.eos else ()
        named = {
            "bos_token": bos,
            "eos_token": self.eos,
            "unk_token": self._processor.unk_id(),
            "pad_token": self._processor.pad_id(),
        }
        self.special_tokens: Mapping[str, str] = {
            name: self._processor.id_to_piece(index) for name, index in named.items() if 0 <= index < self.vocab_size
        }
        special = (index for index in range(self.vocab_size) if self._special(index))
        self._controls: dict[str, int] = {self._processor.id_to_piece(index): index for index in special}
        self.fingerprint = sha256(self.dump()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Returns (tokens,) int64 ids, without BOS and EOS."""
        return np.array(self._processor.encode(text, add_bos=False, add_eos=False), dtype=np.int64)

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]], cuts: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """See `forge_core.protocols.data.Tokenizer`. Text after a control piece is encoded like the beginning of a text."""
        return TextPieces(pieces, cuts).encode(self._controls, self._encode_text)

    def _encode_text(self, text: str) -> Encoded:
        ids = self.encode(text)
        try:
            offsets = self._processor.encode(text, add_bos=False, add_eos=False, return_type="offset_mapping")["offsets"]
        except TypeError:  # the library before 0.2.2
            older: Any = self._processor
            proto = older.encode(text, out_type="immutable_proto", add_bos=False, add_eos=False)
            offsets = [(piece.begin, piece.end) for piece in proto.pieces]
        places = np.array(offsets, dtype=np.int64).reshape(-1, 2)
        return ids, places[:, 0], places[:, 1]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; control pieces are left out."""
        return self._processor.decode([int(index) for index in ids])

    def dump(self) -> bytes:
        """The model, its end of document and what stands around a text as JSON."""
        content: dict[str, Any] = {"type": KIND, "version": 1, "eos": self.eos, "model": b64encode(self._model).decode()}
        content |= {"begins": self._around[0], "ends": self._around[1]} if any(self._around) else {}
        return (json.dumps(content, sort_keys=True) + "\n").encode()

    def _special(self, index: int) -> bool:
        return self._processor.is_control(index) or self._processor.is_unknown(index)

    def _end(self, eos: str | int | None, where: str) -> int:
        if isinstance(eos, int):
            return eos
        if eos is None:
            own_eos = self._processor.eos_id()
            if own_eos < 0:
                raise DataError(f"{where} has no end of sentence; set data.tokenizer.eos to the piece that ends a document")
            return own_eos
        index = self._processor.piece_to_id(eos)
        if self._processor.id_to_piece(index) != eos:
            raise DataError(f"{where} has no piece {eos!r}; set data.tokenizer.eos to the piece that ends a document")
        return index


def load(path: str, eos: str | None, add_special_tokens: bool = True) -> SentencePieceTokenizer:
    """Loads a model from a file.

    `add_bos_token` and `add_eos_token` in the `tokenizer_config.json` next to it determine the prefix and suffix of texts.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"tokenizer {path} cannot be read: {error.strerror}") from error
    settings = _settings(Path(path).with_name("tokenizer_config.json")) if add_special_tokens else {}
    around = (settings.get("add_bos_token") is True, settings.get("add_eos_token") is True)
    tokenizer = SentencePieceTokenizer(content, eos, path, *around)
    tokenizer.folder = Path(path).parent
    return tokenizer


def restore(content: Mapping[str, Any], where: str) -> SentencePieceTokenizer:
    """Restores the tokenizer of a parsed `dump`."""
    model = b64decode(content["model"], validate=True)
    return SentencePieceTokenizer(model, content["eos"], where, content.get("begins", False), content.get("ends", False))


def _settings(path: Path) -> Mapping[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}; restore or remove it") from error
    return settings if isinstance(settings, Mapping) else {}
