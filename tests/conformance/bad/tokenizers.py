"""Tokenizers that lose text, or say two things."""

import json
from hashlib import sha256

import numpy as np

from conformance.part import Part
from forge_data.tokenizers.bytes import ByteTokenizer


class Made(ByteTokenizer):
    """Bytes, and what `says` sets."""

    def __init__(self, says):
        super().__init__()
        vars(self).update(says)


def made(**says) -> Part:
    return Part(make=lambda context: Made(says))


def lower(text):
    return ByteTokenizer().encode(text.lower())


def upper(text):
    return ByteTokenizer().encode(text.upper())


def special(text):
    """Reads a special token in text."""
    return np.concatenate([[256], ByteTokenizer().encode(text)]) if "<|endoftext|>" in text else ByteTokenizer().encode(text)


def whole(pieces):
    return ByteTokenizer().encode_pieces(pieces)


def apart(pieces):
    """Puts a token before each piece, as when pieces are encoded one by one."""
    ids, places = whole(pieces)
    return np.concatenate([[0], ids]), np.concatenate([[[0, 0]], places])


class Older:
    """What a tokenizer was before it had pieces."""

    vocab_size = 257


builds = []


class Counted(ByteTokenizer):
    """Another one each time that it is built."""

    def __init__(self, context):
        builds.append(self)
        super().__init__()

    def dump(self):
        return json.dumps({"number": builds.index(self)}).encode()


class Drawn(ByteTokenizer):
    """Encodes in another way each time that it is built."""

    def __init__(self, context):
        super().__init__()
        builds.append(self)
        self.shift = len(builds) % 2

    def encode(self, text):
        return (super().encode(text) + self.shift) % 256


BAD = {
    "check_ids": [
        (made(vocab_size=100), "but vocab_size is 100"),
        (made(encode=lambda text: ByteTokenizer().encode(text) - 40), "returns the id -"),
        (made(encode=lambda text: ByteTokenizer().encode(text) / 1), "not integers"),
        (made(encode=lambda text: ByteTokenizer().encode(text)[None]), "not one dimension"),
    ],
    "check_round_trip": [
        (made(encode=lower), "is decoded as"),
        (Part(make=lambda context: Made({"encode": upper}), says=(("lossless", False),)), "THE GRADIENT"),
    ],
    "check_special": [
        (made(eos=300), "eos is 300, but vocab_size is 257"),
        (made(encode=special), "is encoded to the id of the end of document"),
    ],
    "check_pieces": [
        (made(encode_pieces=apart), "are not encoded as one text"),
        (made(encode_pieces=lambda pieces: (whole(pieces)[0], whole(pieces)[1][:, 0])), r"not \(0, 2\)"),
        (made(encode_pieces=lambda pieces: (whole(pieces)[0], whole(pieces)[1] + 1)), "are not numbers of pieces"),
        (made(encode_pieces=lambda pieces: (whole(pieces)[0], whole(pieces)[1][::-1])), "are not in order"),
        (made(prefix=(300,)), "has the id 300"),
        (made(suffix=(256,)), "suffix ends with eos"),
        (Part(make=lambda context: Older()), "has no encode_pieces"),
    ],
    "check_dump": [
        (made(fingerprint="same"), "not the sha256"),
        (made(dump=lambda: b"{", fingerprint=sha256(b"{").hexdigest()), "not JSON"),
        (Part(make=Counted), "two fingerprints"),
        (Part(make=Drawn), "in two ways"),
    ],
    "check_pickle": [(made(), "cannot be pickled")],
}
