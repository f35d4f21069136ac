"""Sources that answer one question in two ways, or whose order depends on more than seed and step."""

from dataclasses import dataclass
from itertools import count

import numpy as np

from conformance.part import Part
from forge_core.protocols.data import SourceComponent
from forge_data.sources.random import RandomSource

SIZES = {"vocab_size": 257, "tokens": 4000, "document": 23}


class Made(RandomSource):
    """Random tokens, and what `says` sets."""

    def __init__(self, **says):
        super().__init__(**SIZES)
        self.right = RandomSource(**SIZES)
        vars(self).update(says)


RIGHT = RandomSource(**SIZES)


def made(**says) -> Part:
    return Part(make=lambda context: Made(**says))


def late(starts, length):
    return RIGHT.windows(np.asarray(starts) // 2, length)


def unbounded(start=0, stop=None):
    return RIGHT.ends(start)


def no_borders(starts, length):
    return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)


PLACES = np.arange(0, 4000, 40)


def learned(start, stop):
    return ~np.isin(np.arange(start, stop), PLACES)


def loaded(first, stop):
    return np.arange(first, stop, dtype=np.float32).reshape(-1, 1)


def with_items(**says) -> Part:
    """Random tokens with an item every 40."""
    right = {
        "extras": ("things", "rows"),
        "item_shape": (1,),
        "items_before": lambda tokens: np.searchsorted(PLACES, tokens),
        "learned": learned,
        "load": loaded,
    }
    return made(**(right | says))


class Documents:
    """A stream of two shards, and what `says` sets."""

    name, vocab_size, max_id, tokenizer, shards = "stream", 257, 256, None, 2
    fingerprint = "stream"

    def __init__(self, **says):
        vars(self).update(says)

    def stream(self, shard, start=0):
        return (np.full(number % 5 + 2, number + 40 * shard) for number in range(start, 40))


def distinct(shard):
    return [np.array([number, shard, 3]) for number in range(3 if shard else 40)]


def again(shard, start=0):
    """A short shard that begins again until it is as long as the other: its documents are read thirteen times."""
    return iter([distinct(shard)[number % len(distinct(shard))] for number in range(start, 39)])


def in_both(shard, start=0):
    """Shard 1 begins with a document of shard 0."""
    return iter(([distinct(0)[7]] * shard + distinct(shard))[start:])


def dealt():
    """Every second call of a shard leaves out its last documents."""
    calls = []

    def stream(shard, start=0):
        calls.append(shard)
        own = distinct(shard)
        return iter(own[start : len(own) if calls.count(shard) % 2 else 2])

    return stream


def endless(shard, start=0):
    return (np.array([number % 200, shard]) for number in count(start))


def consumed():
    """An iterator that can be read once."""
    left = iter(list(Documents().stream(0)))
    return lambda shard, start=0: left


builds = []


@dataclass(frozen=True, kw_only=True)
class Restless(SourceComponent):
    """Every time that it is built, something is different."""

    what: str

    def build(self, context):
        builds.append(self)
        number = len(builds)
        if self.what == "fingerprint":
            return Made(fingerprint=f"random {number}")
        source = RandomSource(**{**SIZES, "seed": number})  # other tokens
        source.fingerprint = "always the same"
        return source


@dataclass(frozen=True, kw_only=True)
class Constant(SourceComponent):
    """One token: no seed changes its order."""

    def build(self, context):
        def windows(starts, length):
            return np.ones((len(starts), length), dtype=np.uint16)

        return Made(windows=windows, read=lambda start, stop: np.ones(stop - start, dtype=np.uint16))


def copied():
    """What `Unlike` becomes by pickle."""
    return Unlike(what="copied")


@dataclass(frozen=True, kw_only=True)
class Unlike(Restless):
    """A copy by pickle is another one."""

    def __reduce__(self):
        return copied, ()

    def build(self, context):
        return Made(fingerprint=self.what)


BAD = {
    "check_tokens": [
        (made(ends=lambda start=0, stop=None: RIGHT.ends(start, stop)[:-1]), "documents end at 23 to"),
        (made(read=lambda start, stop: RIGHT.read(0, stop - start)), r"read\(1, 8\) differs from read"),
        (made(max_id=7), "but max_id is 7"),
        (made(vocab_size=100, read=RIGHT.read), "but vocab_size is 100"),
        (made(windows=late), "differs from read"),
        (made(ends=unbounded), r"ends\(0, 7\) returns"),
        (made(borders=no_borders), r"borders returns \[\]"),
    ],
    "check_stream": [
        (Part(make=lambda context: Documents(shards=0)), "shards is 0"),
        (Part(make=lambda context: Documents(max_id=7)), "but max_id is 7"),
        (Part(make=lambda context: Documents(stream=consumed())), "differs from stream"),
        (Part(make=lambda context: Documents(stream=lambda shard, start=0: Documents().stream(shard))), "differs from stream"),
        (Part(make=lambda context: Documents(stream=endless)), "more than 10,000 documents: it does not end"),
    ],
    "check_even": [
        (Part(make=lambda context: Documents(stream=again)), "one document 13 times, but another one 1 times"),
        (Part(make=lambda context: Documents(stream=in_both)), "one document 2 times, but another one 1 times"),
        (Part(make=lambda context: Documents(stream=endless)), "it does not end"),
        (Part(make=lambda context: Documents(stream=lambda shard, start=0: iter(()))), "no document with a token"),
        (Part(make=lambda context: Documents(stream=dealt())), "two epochs do not contain each document twice"),
    ],
    "check_items": [
        (with_items(items_before=lambda tokens: np.searchsorted(PLACES, tokens) + 1), "does not ascend from 0"),
        (with_items(items_before=lambda tokens: np.zeros(len(tokens), dtype=np.int64)), "has no items"),
        (with_items(learned=lambda start, stop: np.ones(stop - start, dtype=bool)), "the token of an item is learned"),
        (with_items(learned=lambda start, stop: np.ones(stop - start, dtype=np.int64)), "is int64 of 4000"),
        (with_items(learned=lambda start, stop: learned(0, stop - start)), "differs from learned"),
        (with_items(load=lambda first, stop: loaded(first, stop)[:, 0]), "not float32"),
        (with_items(load=lambda first, stop: loaded(first, stop) * np.nan), "not finite"),
        (with_items(load=lambda first, stop: loaded(0, stop - first)), r"differ from \[0, 100\)"),
    ],
    "check_mask": [
        (made(learned=lambda start, stop: np.ones(stop - start, dtype=np.int64)), "is int64 of 4000"),
        (made(learned=lambda start, stop: np.zeros(stop - start, dtype=bool)), "no token is trained"),
        (made(learned=lambda start, stop: learned(0, stop - start)), "differs from learned"),
    ],
    "check_again": [
        (Restless(what="fingerprint"), "opened twice"),
        (made(), "cannot be pickled"),
        (Unlike(what="first"), "a pickled copy has another fingerprint"),
    ],
    "check_order": [
        (Restless(what="tokens"), "a second start with the same seed"),
        (Constant(), "another seed results in the same order"),
    ],
    "check_resume": [(Restless(what="tokens"), "reads other samples than the run did")],
}
