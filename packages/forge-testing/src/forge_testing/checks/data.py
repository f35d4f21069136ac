"""Checks of sources and tokenizers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

LENGTH, ROWS, STEPS = 16, 4, 6
MOST = 10_000
"""Maximum number of documents per shard of an example. A shard that never ends has no epochs."""


class SourceChecks:
    """Checks of sources: all methods return the same tokens, and the order of samples depends only on (seed, step)."""

    @staticmethod
    def check_tokens(component: Any) -> None:
        """Checks that `read`, `windows`, `ends` and `borders` agree for any part of the stream, and that ids are in range."""
        import numpy as np

        with _opened(component) as source:
            if not hasattr(source, "read"):
                return
            total, length = source.tokens, 7
            whole, ends = source.read(0, total), source.ends()
            assert len(whole) == total, f"tokens is {total}, but read(0, {total}) returns {len(whole)} ids"
            _in_range(source, whole)
            assert bool((ends[1:] > ends[:-1]).all()) and len(ends), "document ends do not ascend, or there is none"
            assert int(ends[0]) > 0 and int(ends[-1]) == total, f"documents end at {int(ends[0])} to {int(ends[-1])} of {total}"
            starts = np.array(sorted({0, 1, total // 3, total // 2, total - length}), dtype=np.int64)
            windows = source.windows(starts, length)
            for row, start in enumerate(starts.tolist()):
                here = whole[start : start + length]
                assert np.array_equal(source.read(start, start + length), here), (
                    f"read({start}, {start + length}) differs from read(0, {total})"
                )
                assert np.array_equal(windows[row], here), f"the window from {start} differs from read"
                inside = ends[(ends > start) & (ends <= start + length)]
                part = source.ends(start, start + length)
                assert np.array_equal(part, inside), f"ends({start}, {start + length}) returns {part}, but ends() has {inside}"
            rows, columns = source.borders(starts.astype(np.uint64), length)
            borders = sorted(zip(rows.tolist(), columns.tolist(), strict=True))
            spans = [(row, start, source.ends(start, start + length)) for row, start in enumerate(starts.tolist())]
            wanted = [(row, int(end) - start) for row, start, inside in spans for end in inside]
            assert borders == wanted, f"borders returns {borders}, but ends has {wanted}"

    @staticmethod
    def check_items(component: Any) -> None:
        """Checks the positions of items, that their tokens are not learned, and that loading in parts returns the same items."""
        import numpy as np

        from forge_core.protocols.data import SourceWithItems

        with _opened(component) as source:
            if not isinstance(source, SourceWithItems):
                return
            total = source.tokens
            before = source.items_before(np.arange(total + 1))
            count = int(before[-1])
            assert before[0] == 0 and bool((np.diff(before) >= 0).all()), "items_before does not ascend from 0"
            assert count, "an example of a source with items has no items"
            learned, begins = source.learned(0, total), np.flatnonzero(np.diff(before))
            assert learned.dtype == bool and len(learned) == total, f"learned(0, {total}) is {learned.dtype} of {len(learned)}"
            assert bool(learned.any()) and not learned[begins].any(), "the token of an item is learned, or no token is"
            third = total // 3
            assert np.array_equal(source.learned(third, total), learned[third:]), (
                f"learned({third}, {total}) differs from learned(0, {total})"
            )
            whole = source.load(0, count)
            shape = (count, *source.item_shape)
            assert whole.shape == shape and whole.dtype == np.float32, (
                f"load returns {whole.dtype} {whole.shape}, not float32 {shape}"
            )
            assert bool(np.isfinite(whole).all()), "an item has values that are not finite"
            half = count // 2
            parts = np.concatenate([source.load(0, half), source.load(half, count)])
            assert np.array_equal(parts, whole), f"items [0, {half}) and [{half}, {count}) differ from [0, {count})"

    @staticmethod
    def check_mask(component: Any) -> None:
        """Checks that a loss mask has a value for each token, in any part of the stream, and that some tokens are trained."""
        import numpy as np

        from forge_core.protocols.data import SourceWithMask

        with _opened(component) as source:
            if not isinstance(source, SourceWithMask):
                return
            total = source.tokens
            learned, third = source.learned(0, total), total // 3
            assert learned.dtype == bool and len(learned) == total, f"learned(0, {total}) is {learned.dtype} of {len(learned)}"
            assert bool(learned.any()), "no token is trained"
            for start, stop in ((third, total), (third, 2 * third), (third, third)):
                same = np.array_equal(source.learned(start, stop), learned[start:stop])
                assert same, f"learned({start}, {stop}) differs from learned(0, {total})"

    @staticmethod
    def check_stream(component: Any) -> None:
        """Checks that a streamed source yields the same documents from any start, and that ids are in range."""
        import numpy as np

        with _opened(component) as source:
            if not hasattr(source, "stream"):
                return
            assert source.shards > 0, f"shards is {source.shards}"
            for shard in range(source.shards):
                whole = _documents(source, shard)
                for ids in whole:
                    _in_range(source, ids)
                for start in range(len(whole) + 1):
                    rest = list(source.stream(shard, start))
                    same = len(rest) == len(whole) - start and all(map(np.array_equal, rest, whole[start:]))
                    assert same, f"stream({shard}, {start}) differs from stream({shard}) after {start} documents"

    @staticmethod
    def check_even(component: Any) -> None:
        """Checks that an epoch of a stream has all documents equally often. The documents of an example must differ.

        If a shard started over to be as long as the others, or several shards had the same document, a model would see these
        documents more often.
        """
        from collections import Counter

        from forge_data.packing.readers import ShuffledDocuments

        with _opened(component) as source:
            if not hasattr(source, "stream"):
                return
            shards = [_documents(source, shard) for shard in range(source.shards)]
            once = Counter(ids.tobytes() for documents in shards for ids in documents if len(ids))
            assert once, "an example of a stream has no document with a token"
            most, least = max(once.values()), min(once.values())
            assert most == least, f"an epoch has one document {most} times, but another one {least} times"
            reader, read = ShuffledDocuments(source, 4, 1, 8, True), Counter[bytes]()
            while sum(read.values()) < 2 * sum(once.values()):
                _, window = reader.next()
                read.update(ids.tobytes() for _, ids in window)
            assert read == Counter({ids: 2 * count for ids, count in once.items()}), (
                "two epochs do not contain each document twice"
            )

    @staticmethod
    def check_again(component: Any) -> None:
        """Checks that opening again, or from a pickled copy as in a loader worker, results in the same fingerprint."""
        import pickle

        try:
            copy = pickle.loads(pickle.dumps(component))  # noqa: S301 (written by this line)
        except Exception as error:
            raise AssertionError(f"cannot be pickled, so no loader worker can open it: {error}") from error
        with _opened(component) as first, _opened(component) as second, _opened(copy) as pickled:
            same = first.fingerprint == second.fingerprint
            assert same, f"opened twice, it has the fingerprints {first.fingerprint} and {second.fingerprint}"
            assert first.fingerprint == pickled.fingerprint, "a pickled copy has another fingerprint"

    @staticmethod
    def check_order(component: Any) -> None:
        """Checks that the samples of a step are the same at every start and on any number of ranks, but not for another seed."""
        with _workspace() as here, _workspace() as elsewhere:
            single = _samples(component, here, seed=1)
            assert _samples(component, elsewhere, seed=1) == single, "a second start with the same seed reads other samples"
            both = [_samples(component, here, seed=1, rank=rank, ranks=2) for rank in range(2)]
            together = [sorted(a + b) for a, b in zip(*both, strict=True)]
            assert together == [sorted(rows) for rows in single], "in a step, two ranks read other samples than one rank"
            assert _samples(component, here, seed=2) != single, "another seed results in the same order"

    @staticmethod
    def check_resume(component: Any) -> None:
        """Checks that a cursor is JSON, and that a new start from the cursor of any step continues with the same samples."""
        with _workspace() as here:
            whole = _samples(component, here, seed=1)
            for step in range(1, STEPS):
                rest = _samples(component, here, seed=1, begin=step)
                assert rest == whole[step:], f"a run that resumes after step {step} reads other samples than the run did"


def _documents(source: Any, shard: int) -> list[Any]:
    """Returns the documents of a shard, and checks that it ends."""
    from itertools import islice

    documents = list(islice(source.stream(shard), MOST + 1))
    ended = len(documents) <= MOST
    assert ended, f"stream({shard}) yields more than {MOST:,} documents: it does not end, or the example is too long"
    return documents


def _in_range(source: Any, ids: Any) -> None:
    if not len(ids):
        return
    assert ids.dtype.kind in "iu" and int(ids.min()) >= 0, f"ids of dtype {ids.dtype} from {ids.min()} on"
    largest, most, size = int(ids.max()), source.max_id, source.vocab_size
    assert most is None or largest <= most, f"has the id {largest}, but max_id is {most}"
    assert size is None or largest < size, f"has the id {largest}, but vocab_size is {size}"


@contextmanager
def _opened(component: Any) -> Iterator[Any]:
    from forge_core.protocols.data import SourceContext
    from forge_data.tokenizers.bytes import ByteTokenizer

    with _workspace() as folder:
        yield component.build(SourceContext(folder, ByteTokenizer(), LENGTH, lambda _: None))


@contextmanager
def _workspace() -> Iterator[Path]:
    """Yields an empty folder, in which the first start prepares what later starts open, as those of a run."""
    with TemporaryDirectory(prefix="forge-source-") as folder:
        yield Path(folder)


def _samples(
    component: Any, workspace: Path, seed: int, rank: int = 0, ranks: int = 1, begin: int = 0
) -> list[list[tuple[int, ...]]]:
    """Returns the rows of each step from `begin` on, read by a new start from the cursor of this step."""
    from itertools import islice

    from forge_data.components import Bytes
    from forge_data.loading.stream import open_stream
    from forge_data.section import Data

    labels = tuple(getattr(component, "labels", ()))
    packing: Any = "pad" if labels else "best_fit" if getattr(component, "keeps_documents", False) else "concatenate"
    model = SimpleNamespace(labels=labels)
    data = Data(
        sequence_length=LENGTH,
        sources=[component],
        tokenizer=Bytes(),
        verify=False,
        readers=4,
        shuffle_buffer=8,
        packing=packing,
    )

    def start() -> Any:
        return open_stream(
            data,
            workspace=workspace,
            seed=seed,
            global_batch=ROWS,
            micro_batch=ROWS // ranks,
            rank=rank,
            ranks=ranks,
            model=model,
        )

    stream = start()
    cursor = stream.start()
    if begin:
        reached = [after for _, after in islice(stream.from_cursor(cursor), begin)][-1]
        stream, cursor = start(), json.loads(json.dumps(reached))
    steps = islice(stream.from_cursor(cursor), STEPS - begin)
    return [[tuple(row) for batch in batches for row in batch.tokens.tolist()] for batches, _ in steps]


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


class TokenizerChecks:
    """Checks of tokenizers: ids are in the vocabulary, decoding restores the text, and fingerprints tell tokenizers apart."""

    @staticmethod
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

    @staticmethod
    def check_round_trip(component: Any) -> None:
        """Checks that `decode(encode(text))` is the text; for components with `lossless = False`, only for plain words."""
        tokenizer = _built(component)
        for text in TEXTS if getattr(component, "lossless", True) else (PLAIN,):
            back = tokenizer.decode(tokenizer.encode(text).tolist())
            assert back == text, f"{text[:40]!r} is decoded as {back[:40]!r}; if intended, set lossless: ClassVar[bool] = False"

    @staticmethod
    def check_special(component: Any) -> None:
        """Checks that the end of document is an id of the vocabulary, and that no text is encoded to it, not even its name."""
        tokenizer = _built(component)
        if tokenizer.eos is None:
            return
        assert 0 <= tokenizer.eos < tokenizer.vocab_size, f"eos is {tokenizer.eos}, but vocab_size is {tokenizer.vocab_size}"
        spelled = tokenizer.decode([tokenizer.eos])
        for text in (*TEXTS, spelled, getattr(component, "eos", None) or ""):
            assert tokenizer.eos not in tokenizer.encode(text), f"{text[:40]!r} is encoded to the id of the end of document"

    @staticmethod
    def check_pieces(component: Any) -> None:
        """Checks that `encode_pieces` returns the ids of the text with their pieces, and that `prefix` and `suffix` are ids."""
        from forge_data.tokenizers.control import ADDED  # imports numpy

        tokenizer = _built(component)
        missing = [name for name in ADDED if not hasattr(tokenizer, name)]
        assert not missing, f"has no {missing[0]}, so conversations and text around images are refused"
        for index in (*tokenizer.prefix, *tokenizer.suffix):
            assert 0 <= index < tokenizer.vocab_size, f"prefix or suffix has the id {index}; vocab_size is {tokenizer.vocab_size}"
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

    @staticmethod
    def check_dump(component: Any) -> None:
        """Checks that `dump()` is JSON, that `fingerprint` is its sha256, and that a second build has the same."""
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

    @staticmethod
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
