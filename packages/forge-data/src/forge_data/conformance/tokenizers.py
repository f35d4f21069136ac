"""What every tokenizer has to do: ids of its vocabulary only, text back from them, and one fingerprint for one meaning."""

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
    """`encode` gives a row of whole numbers from 0 to `vocab_size` - 1."""
    tokenizer = _built(component)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids.ndim == 1, f"encode({text[:20]!r}) has shape {ids.shape}, not one dimension"
        assert ids.dtype.kind in "iu", f"encode({text[:20]!r}) gives {ids.dtype}, not whole numbers"
        if len(ids):
            assert int(ids.min()) >= 0, f"encode({text[:20]!r}) gives the id {ids.min()}"
            assert int(ids.max()) < tokenizer.vocab_size, (
                f"encode({text[:20]!r}) gives the id {ids.max()}, but vocab_size is {tokenizer.vocab_size}"
            )


def check_round_trip(component: Any) -> None:
    """`decode(encode(text))` is the text: any text, or where the component says `lossless = False` plain words."""
    tokenizer = _built(component)
    for text in TEXTS if getattr(component, "lossless", True) else (PLAIN,):
        back = tokenizer.decode(tokenizer.encode(text).tolist())
        assert back == text, f"{text[:40]!r} comes back as {back[:40]!r}; if that is meant, say lossless: ClassVar[bool] = False"


def check_special(component: Any) -> None:
    """The end of a document is an id of the vocabulary, and no text makes it: text that spells it is ordinary."""
    tokenizer = _built(component)
    if tokenizer.eos is None:
        return
    assert 0 <= tokenizer.eos < tokenizer.vocab_size, f"eos is {tokenizer.eos}, but vocab_size is {tokenizer.vocab_size}"
    spelled = tokenizer.decode([tokenizer.eos])
    for text in (*TEXTS, spelled, getattr(component, "eos", None) or ""):
        assert tokenizer.eos not in tokenizer.encode(text), f"the text {text[:40]!r} gives the id of the end of a document"


def check_pieces(component: Any) -> None:
    """`encode_pieces` gives the ids of the whole text, each with the pieces that it lies in; `prefix` and `suffix` are ids."""
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
    """`dump()` is JSON, `fingerprint` its sha256, and building it again gives the same of both, and the same ids."""
    one, other = _built(component), _built(component)
    dump = one.dump()
    try:
        json.loads(dump)
    except ValueError as error:
        raise AssertionError(f"dump() is not JSON: {error}") from error
    assert one.fingerprint == sha256(dump).hexdigest(), "fingerprint is not the sha256 of dump()"
    assert other.fingerprint == one.fingerprint, "built twice, it has two fingerprints"
    differ = [text for text in TEXTS if one.encode(text).tolist() != other.encode(text).tolist()]
    assert not differ, f"built twice, it encodes {differ[0][:40]!r} in two ways"


def check_pickle(component: Any) -> None:
    """A loader worker gets the component by pickle, and builds the same."""
    import pickle

    try:
        copy = pickle.loads(pickle.dumps(component))  # noqa: S301 (what this line has written)
    except Exception as error:
        raise AssertionError(f"cannot be pickled: {error}") from error
    assert _built(copy).fingerprint == _built(component).fingerprint, "a pickled copy builds another tokenizer"


def _built(component: Any) -> Any:
    from forge_core.protocols.data import SourceContext
    from forge_data.example_corpus import Corpus

    with TemporaryDirectory(prefix="forge-tokenizer-") as folder:
        return component.build(SourceContext(Path(folder), None, 16, lambda _: None, texts=(Corpus(),)))
