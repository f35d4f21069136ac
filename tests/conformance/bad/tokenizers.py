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
        (made(encode=lambda text: ByteTokenizer().encode(text) - 40), "gives the id -"),
        (made(encode=lambda text: ByteTokenizer().encode(text) / 1), "not whole numbers"),
        (made(encode=lambda text: ByteTokenizer().encode(text)[None]), "not one dimension"),
    ],
    "check_round_trip": [
        (made(encode=lower), "comes back as"),
        (Part(make=lambda context: Made({"encode": upper}), says=(("lossless", False),)), "THE GRADIENT"),
    ],
    "check_special": [
        (made(eos=300), "eos is 300, but vocab_size is 257"),
        (made(encode=special), "gives the id of the end of a document"),
    ],
    "check_dump": [
        (made(fingerprint="same"), "not the sha256"),
        (made(dump=lambda: b"{", fingerprint=sha256(b"{").hexdigest()), "not JSON"),
        (Part(make=Counted), "two fingerprints"),
        (Part(make=Drawn), "in two ways"),
    ],
    "check_pickle": [(made(), "cannot be pickled")],
}
