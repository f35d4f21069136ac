"""Tokenizers of plugins that were written before `encode_pieces`, `prefix` and `suffix` became part of the protocol."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forge_core.errors import DataError
from forge_core.protocols.data import Tokenizer

if TYPE_CHECKING:
    import numpy as np

ADDED = ("encode_pieces", "prefix", "suffix", "special_tokens")
"""What tokenizers of older plugins lack."""


def adapted(tokenizer: Any) -> Tokenizer:
    """The tokenizer itself, or one that adds what it lacks. Everything that builds a tokenizer of a recipe calls this."""
    older: Any = _Older
    return tokenizer if all(hasattr(tokenizer, name) for name in ADDED) else older(tokenizer)


def identity_of(tokenizer: Tokenizer) -> str:
    """Identifies the ids that a tokenizer gives a document: its fingerprint, and the ids that it puts around a text.

    For names of what is made with it. `revision` is that of its rules, where older ones gave other ids for the same fingerprint.
    """
    around = f" {list(tokenizer.prefix)} {list(tokenizer.suffix)}" if tokenizer.prefix or tokenizer.suffix else ""
    revision = getattr(tokenizer, "revision", 1)
    return tokenizer.fingerprint + around + (f" {revision}" if revision > 1 else "")


class _Older:
    """A tokenizer that puts nothing around a text and knows no control tokens.

    A single piece of untrusted text is encoded as it is. Several pieces are refused: where the text of an id lies is not known.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.prefix = tuple(getattr(tokenizer, "prefix", ()))
        self.suffix = tuple(getattr(tokenizer, "suffix", ()))
        self.special_tokens = dict(getattr(tokenizer, "special_tokens", {}))

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]], cuts: Sequence[int] = ()) -> "tuple[np.ndarray, np.ndarray]":
        """See `forge_core.protocols.data.Tokenizer`.

        Raises:
            DataError: there are several pieces, or trusted ones.
        """
        import numpy as np

        if len(pieces) > 1 or any(trusted for _, trusted in pieces):
            raise DataError(
                f"tokenizer {self._tokenizer.name!r} cannot encode conversations or text around images: it has no encode_pieces; "
                "add the method to its class, see forge_core.protocols.Tokenizer"
            )
        ids = np.asarray(self._tokenizer.encode(pieces[0][0]) if pieces else [], dtype=np.int64)
        return ids, np.zeros((len(ids), 2), dtype=np.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
