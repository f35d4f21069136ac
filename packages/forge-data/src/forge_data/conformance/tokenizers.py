"""Checks of tokenizers: ids are in the vocabulary, decoding restores the text, and equal tokenizers have equal fingerprints."""

import json
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PLAIN = "the gradient of the layer"
TEXTS = (
    "",
    " ",
    PLAIN,
    "  two spaces,\ttabs\nand lines \r\n\n",
    "naïve Größe, 日本語, עברית, e\u0301",
    "👩\u200d👩\u200d👧 and 🏳️\u200d🌈",
    "zero\x00byte \x7f and \ufffd \ufeff",
    "<|endoftext|> </s> <s> <unk> [INST]",
    "x" * 300,
)


def check_ids(component: Any) -> None:
    """Checks that `encode` returns a one-dimensional array of integers from 0 to `vocab_size` - 1."""
    tokenizer = _built(component)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids.ndim == 1, f"encode({text[:20]!r}) has shape {ids.shape}, not one dimension"
        assert ids.dtype.kind in "iu", f"encode({text[:20]!r}) returns {ids.dtype}, not integers"
        if len(ids):
            assert int(ids.min()) >= 0, f"encode({text[:20]!r}) returns the id {ids.min()}"
            assert int(ids.max()) < tokenizer.vocab_size, (
                f"encode({text[:20]!r}) returns the id {ids.max()}, but vocab_size is {tokenizer.vocab_size}"
            )


def check_round_trip(component: Any) -> None:
    """Checks that `decode(encode(text))` is the text; for components with `lossless = False`, only for plain words."""
    tokenizer = _built(component)
    for text in TEXTS if getattr(component, "lossless", True) else (PLAIN,):
        back = tokenizer.decode(tokenizer.encode(text).tolist())
        assert back == text, f"{text[:40]!r} is decoded as {back[:40]!r}; if intended, set lossless: ClassVar[bool] = False"


def check_special(component: Any) -> None:
    """Checks that the end of document is an id of the vocabulary, and that no text is encoded to it, even its own spelling."""
    tokenizer = _built(component)
    if tokenizer.eos is None:
        return
    assert 0 <= tokenizer.eos < tokenizer.vocab_size, f"eos is {tokenizer.eos}, but vocab_size is {tokenizer.vocab_size}"
    spelled = tokenizer.decode([tokenizer.eos])
    for text in (*TEXTS, spelled, getattr(component, "eos", None) or ""):
        assert tokenizer.eos not in tokenizer.encode(text), f"the text {text[:40]!r} is encoded to the id of the end of document"


def check_pieces(component: Any) -> None:
    """Checks that `encode_pieces` returns the ids of the whole text with their pieces, and that `prefix` and `suffix` are ids."""
    from forge_data.tokenizers.control import ADDED  # imports numpy

    tokenizer = _built(component)
    missing = [name for name in ADDED if not hasattr(tokenizer, name)]
    assert not missing, f"has no {missing[0]}, so conversations and text around images are refused"
    for index in (*tokenizer.prefix, *tokenizer.suffix):
        assert 0 <= index < tokenizer.vocab_size, f"prefix or suffix has the id {index}, but vocab_size is {tokenizer.vocab_size}"
    assert not tokenizer.suffix or tokenizer.suffix[-1] != tokenizer.eos, "suffix ends with eos, which documents get anyway"
    for text in TEXTS:
        pieces = [(text[: len(text) // 2], False), (text[len(text) // 2 :], False)]
        ids, places = tokenizer.encode_pieces(pieces)
        wanted = tokenizer.encode(text)
        assert ids.tolist() == wanted.tolist(), f"two pieces of {text[:40]!r} are not encoded as one text"
        assert places.shape == (len(ids), 2), f"places of {text[:20]!r} have shape {places.shape}, not ({len(ids)}, 2)"
        flat = places.flatten()
        assert (places[1:, 0] >= places[:-1, 0]).all(), f"places of {text[:20]!r} are not in order: {flat.tolist()}"
        assert ((flat >= 0) & (flat < 2)).all(), f"places of {text[:20]!r} are not numbers of pieces: {flat.tolist()}"


def check_dump(component: Any) -> None:
    """Checks that `dump()` is JSON, that `fingerprint` is its sha256, and that building again results in an equal tokenizer."""
    first, second = _built(component), _built(component)
    dump = first.dump()
    try:
        json.loads(dump)
    except ValueError as error:
        raise AssertionError(f"dump() is not JSON: {error}") from error
    assert first.fingerprint == sha256(dump).hexdigest(), "fingerprint is not the sha256 of dump()"
    assert second.fingerprint == first.fingerprint, "built twice, it has two fingerprints"
    differ = [text for text in TEXTS if first.encode(text).tolist() != second.encode(text).tolist()]
    assert not differ, f"built twice, it encodes {differ[0][:40]!r} in two ways"


def check_pickle(component: Any) -> None:
    """Checks that a pickled copy of the component, as in a loader worker, builds the same tokenizer."""
    import pickle

    try:
        copy = pickle.loads(pickle.dumps(component))  # noqa: S301 (written by this line)
    except Exception as error:
        raise AssertionError(f"cannot be pickled: {error}") from error
    assert _built(copy).fingerprint == _built(component).fingerprint, "a pickled copy builds another tokenizer"


def _built(component: Any) -> Any:
    from forge_core.protocols.data import SourceContext
    from forge_data.example_corpus import Corpus

    with TemporaryDirectory(prefix="forge-tokenizer-") as folder:
        return component.build(SourceContext(Path(folder), None, 16, lambda _: None, texts=(Corpus(),)))
