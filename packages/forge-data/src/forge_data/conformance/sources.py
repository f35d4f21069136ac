"""What every source has to do: the same tokens however they are asked for, and an order that (seed, step) alone fixes."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LENGTH, ROWS, STEPS = 16, 4, 6
MOST = 10_000
"""Documents of a shard of an example at most. One that never ends has no epochs."""


def check_tokens(component: Any) -> None:
    """Any part of the stream is what the whole says: `read`, `windows`, `ends` and `borders` agree, and ids are in range."""
    import numpy as np

    with _opened(component) as source:
        if not hasattr(source, "read"):
            return
        total, length = source.tokens, 7
        whole, ends = source.read(0, total), source.ends()
        assert len(whole) == total, f"tokens is {total}, but read(0, {total}) gives {len(whole)}"
        _in_range(source, whole)
        assert bool((ends[1:] > ends[:-1]).all()) and len(ends), "document ends do not ascend, or there is none"
        assert int(ends[0]) > 0 and int(ends[-1]) == total, f"documents end at {int(ends[0])} to {int(ends[-1])} of {total}"
        starts = np.array(sorted({0, 1, total // 3, total // 2, total - length}), dtype=np.int64)
        windows = source.windows(starts, length)
        for row, start in enumerate(starts.tolist()):
            here = whole[start : start + length]
            assert np.array_equal(source.read(start, start + length), here), f"read({start}, {start + length}) is not of all"
            assert np.array_equal(windows[row], here), f"windows from {start} are not what read gives"
            inside = ends[(ends > start) & (ends <= start + length)]
            found = source.ends(start, start + length)
            assert np.array_equal(found, inside), f"ends({start}, {start + length}) are {found}, of all ends {inside}"
        rows, columns = source.borders(starts.astype(np.uint64), length)
        found = sorted(zip(rows.tolist(), columns.tolist(), strict=True))
        spans = [(row, start, source.ends(start, start + length)) for row, start in enumerate(starts.tolist())]
        wanted = [(row, int(end) - start) for row, start, inside in spans for end in inside]
        assert found == wanted, f"borders are {found}, by ends they are {wanted}"


def check_items(component: Any) -> None:
    """Items lie at the places that are told, are not learned there, and are the same in parts and as a whole."""
    import numpy as np

    from forge_core.protocols.data import SourceWithItems

    with _opened(component) as source:
        if not isinstance(source, SourceWithItems):
            return
        total = source.tokens
        before = source.items_before(np.arange(total + 1))
        count = int(before[-1])
        assert before[0] == 0 and bool((np.diff(before) >= 0).all()), "items_before does not ascend from 0"
        assert count, "an example of a source with items has none"
        learned, begins = source.learned(0, total), np.flatnonzero(np.diff(before))
        assert learned.dtype == bool and len(learned) == total, f"learned(0, {total}) is {learned.dtype} of {len(learned)}"
        assert bool(learned.any()) and not learned[begins].any(), "a place of an item is learned, or nothing is"
        third = total // 3
        assert np.array_equal(source.learned(third, total), learned[third:]), f"learned({third}, {total}) is not of all"
        whole = source.load(0, count)
        shape = (count, *source.item_shape)
        assert whole.shape == shape and whole.dtype == np.float32, f"load gives {whole.dtype} {whole.shape}, not float32 {shape}"
        assert bool(np.isfinite(whole).all()), "an item has values that are not finite"
        half = count // 2
        parts = np.concatenate([source.load(0, half), source.load(half, count)])
        assert np.array_equal(parts, whole), f"items [0, {half}) and [{half}, {count}) are not those of [0, {count})"


def check_stream(component: Any) -> None:
    """A source that is read in order gives the same documents from any of them on, and ids in range."""
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
                assert same, f"stream({shard}, {start}) does not go on as stream({shard}) does after {start} documents"


def check_even(component: Any) -> None:
    """An epoch of a stream has each of its documents as often as every other. Those of an example differ from each other.

    A shard that begins again to be as long as the others, or a document in some of several shards, would be learned more often.
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
        assert most == least, f"an epoch has one document {most} times, and another one {least} times"
        reader, read = ShuffledDocuments(source, 4, 1, 8, True), Counter[bytes]()
        while sum(read.values()) < 2 * sum(once.values()):
            _, window = reader.next()
            read.update(ids.tobytes() for _, ids in window)
        assert read == Counter({ids: 2 * count for ids, count in once.items()}), "two epochs are not each document twice"


def _documents(source: Any, shard: int) -> list[Any]:
    """The documents of a shard, which have to end."""
    from itertools import islice

    found = list(islice(source.stream(shard), MOST + 1))
    assert len(found) <= MOST, f"stream({shard}) gives more than {MOST:,} documents: it does not end, or an example is too long"
    return found


def check_again(component: Any) -> None:
    """Opened again, or from a pickled copy as in a loader worker, it has the same fingerprint."""
    import pickle

    try:
        copy = pickle.loads(pickle.dumps(component))  # noqa: S301 (what this line has written)
    except Exception as error:
        raise AssertionError(f"cannot be pickled, so no loader worker can open it: {error}") from error
    with _opened(component) as one, _opened(component) as two, _opened(copy) as three:
        assert one.fingerprint == two.fingerprint, f"opened twice, it is {one.fingerprint} and {two.fingerprint}"
        assert one.fingerprint == three.fingerprint, "a pickled copy has another fingerprint"


def check_order(component: Any) -> None:
    """The samples of a step are the same at every start and on any number of ranks; another seed gives another order."""
    one = _samples(component, seed=1)
    assert _samples(component, seed=1) == one, "the same seed gives other samples at a second start"
    both = [_samples(component, seed=1, rank=rank, ranks=2) for rank in range(2)]
    together = [sorted(a + b) for a, b in zip(*both, strict=True)]
    assert together == [sorted(rows) for rows in one], "two ranks read other samples in a step than one"
    assert _samples(component, seed=2) != one, "another seed gives the same order"


def check_resume(component: Any) -> None:
    """A cursor is JSON; from that of any step on, a new start reads the samples that would have come."""
    whole = _samples(component, seed=1)
    for step in range(1, STEPS):
        rest = _samples(component, seed=1, begin=step)
        assert rest == whole[step:], f"a run that resumes after step {step} reads other samples than the run did"


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

    with TemporaryDirectory(prefix="forge-source-") as folder:
        yield component.build(SourceContext(Path(folder), ByteTokenizer(), LENGTH, lambda _: None))


def _samples(component: Any, seed: int, rank: int = 0, ranks: int = 1, begin: int = 0) -> list[list[tuple[int, ...]]]:
    """The rows of each step from `begin` on, by content: those of a new start, which is given the cursor of that step."""
    from itertools import islice

    from forge_data.components import Bytes
    from forge_data.loading.stream import open_stream
    from forge_data.section import Data

    packing: Any = "best_fit" if getattr(component, "keeps_documents", False) else "concatenate"
    data = Data(
        sequence_length=LENGTH,
        sources=[component],
        tokenizer=Bytes(),
        verify=False,
        readers=4,
        shuffle_buffer=8,
        packing=packing,
    )

    def start(workspace: Path) -> Any:
        return open_stream(
            data, workspace=workspace, seed=seed, global_batch=ROWS, micro_batch=ROWS // ranks, rank=rank, ranks=ranks
        )

    with TemporaryDirectory(prefix="forge-source-") as folder:
        stream = start(Path(folder))
        cursor = stream.start()
        if begin:
            reached = [after for _, after in islice(stream.from_cursor(cursor), begin)][-1]
            stream, cursor = start(Path(folder)), json.loads(json.dumps(reached))
        steps = islice(stream.from_cursor(cursor), STEPS - begin)
        return [[tuple(row) for batch in batches for row in batch.tokens.tolist()] for batches, _ in steps]
