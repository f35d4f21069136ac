"""Opening ten thousand shards of every format, and tokenizing against `datasets.map` with the same tokenizer.

    python benchmarks/data/preparing.py [--documents 60000] [--shards 10000] [--workers 2] [--repeats 5] [--json]

- "open": seconds until a source of so many files is open, page cache warm, beside a plain loop that stats and opens each.
- "tokenize": JSON lines to token ids on disk, by `data prepare` and by `datasets.load_dataset("json").map(batched=True,
  num_proc=N)`, which writes its own Arrow cache. Both use one trained byte-level BPE tokenizer, N processes and an empty
  cache, and take turns; printed are medians of text bytes per second with their middle half, and of the ratio of
  neighbors. First it is checked that both give the same ids.
"""

import argparse
import json
import os
import shutil
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from forge_core.protocols.data import SourceContext
from forge_data.components import Bpe, Datatrove, JsonLines, Llmc, Megatron, Stdlib, Tokens
from forge_data.preparation.tokenization import tokenize
from forge_data.sources.store import StoreSource

TOKENS = 2048


def silent(_: str) -> None:
    """Says nothing."""


def shards(folder: Path, count: int) -> dict[str, Any]:
    """Links to one shard of each format, and the component that reads them."""
    ids = np.arange(TOKENS, dtype="<u2")
    made: dict[str, tuple[Any, dict[str, bytes]]] = {
        "npy": (Tokens(path=str(folder / "npy")), {".npy": npy(ids)}),
        "raw": (Tokens(path=str(folder / "raw"), dtype="uint16"), {".bin": ids.tobytes()}),
        "llmc": (
            Llmc(path=str(folder / "llmc")),
            {".bin": struct.pack("<256i", 20240520, 1, TOKENS, *[0] * 253) + ids.tobytes()},
        ),
        "datatrove": (Datatrove(path=str(folder / "datatrove")), {".ds": ids.tobytes(), ".ds.index": struct.pack("<Q", TOKENS)}),
        "megatron": (
            Megatron(path=str(folder / "megatron")),
            {".bin": ids.tobytes(), ".idx": b"MMIDIDX\0\0" + struct.pack("<QBQQiqqq", 1, 8, 1, 2, TOKENS, 0, 0, 1)},
        ),
    }
    for name, (_, files) in made.items():
        (folder / name).mkdir()
        for suffix, content in files.items():
            first = folder / name / f"00000{suffix}"
            first.write_bytes(content)
            for number in range(1, count):
                os.link(first, folder / name / f"{number:05d}{suffix}")
    return {name: component for name, (component, _) in made.items()}


def npy(ids: np.ndarray) -> bytes:
    """The content of a `.npy` file."""
    with tempfile.TemporaryFile() as file:
        np.save(file, ids)
        file.seek(0)
        return file.read()


def opening(folder: Path, count: int, repeats: int) -> dict[str, float]:
    """Median seconds to open the shards of each format."""
    found: dict[str, float] = {}
    for name, component in shards(folder, count).items():
        taken = []
        for _ in range(repeats):
            began = time.perf_counter()
            source = component.build(SourceContext(folder, None, 1, silent))
            taken.append(time.perf_counter() - began)
            assert source.tokens == count * TOKENS
        found[name] = statistics.median(taken)
    began = time.perf_counter()
    for entry in os.scandir(folder / "raw"):
        with open(entry.path, "rb", buffering=0) as file:  # noqa: PTH123
            os.fstat(file.fileno())
            file.read(12)
    return found | {"plain_loop": time.perf_counter() - began}


def tokenizing(folder: Path, documents: int, workers: int, repeats: int) -> dict[str, Any]:
    """Bytes of text per second on both sides."""
    import datasets

    datasets.disable_progress_bars()
    texts = [text for _, text in Stdlib(split="all").texts()]
    pieces = [text[start : start + 2000] for text in texts for start in range(0, len(text), 2000)]
    chosen = [pieces[number % len(pieces)] for number in range(documents)]
    path = folder / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in chosen))
    size = sum(len(text.encode()) for text in chosen)
    context = SourceContext(folder, None, 1, silent, (Stdlib(split="all").texts(),))
    tokenizer = Bpe(vocab_size=8192, train_bytes=4_000_000).build(context)

    def ours() -> StoreSource:
        shutil.rmtree(folder / "store", ignore_errors=True)
        return tokenize(
            JsonLines(path=str(path)).records(),
            tokenizer,
            folder / "store",
            source="s",
            workers=workers,
            processes=True,
            report=silent,
        )

    def theirs() -> "datasets.Dataset":
        shutil.rmtree(folder / "cache", ignore_errors=True)
        loaded = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(folder / "cache"))
        return loaded.map(Encode(tokenizer.dump(), tokenizer.eos), batched=True, num_proc=workers, remove_columns=["text"])

    store, dataset = ours(), theirs()
    flat = np.concatenate([np.array(row, dtype=np.int64) for row in dataset["ids"]])
    assert np.array_equal(store.read(0, store.tokens), flat), "the sides differ"
    times: dict[str, list[float]] = {"forge": [], "datasets": []}
    sides = {"forge": ours, "datasets": theirs}
    for repeat in range(repeats):
        for name in list(sides) if repeat % 2 else list(reversed(sides)):
            began = time.perf_counter()
            sides[name]()
            times[name].append(time.perf_counter() - began)
    ratios = [other / own for own, other in zip(times["forge"], times["datasets"], strict=True)]
    rates = {f"{name}_mb_per_second": quartiles([size / second / 1e6 for second in taken]) for name, taken in times.items()}
    return {"text_mb": size / 1e6, "workers": workers, **rates, "ratio": quartiles(ratios)}


class Encode:
    """A batch of texts to ids, as a user of `datasets` would write it; makes its own tokenizer in each process."""

    def __init__(self, content: bytes, eos: int | None) -> None:
        self.content, self.eos = content, eos

    def __call__(self, batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        from tokenizers import Tokenizer

        backend = self.__dict__.get("backend")
        if backend is None:
            backend = self.__dict__["backend"] = Tokenizer.from_str(self.content.decode())
            backend.encode_special_tokens = True
        found = backend.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"ids": [[*encoding.ids, self.eos] for encoding in found]}

    def __getstate__(self) -> dict[str, Any]:
        return {"content": self.content, "eos": self.eos}


def quartiles(values: list[float]) -> list[float]:
    """[lower quartile, median, upper quartile]."""
    return [round(value, 3) for value in np.quantile(values, [0.25, 0.5, 0.75]).tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=60_000)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = {
            "open_seconds": opening(folder, arguments.shards, arguments.repeats),
            "tokenize": tokenizing(folder, arguments.documents, arguments.workers, arguments.repeats),
        }
    if arguments.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    for title, values in found.items():
        sys.stdout.write(f"{title}\n" + "".join(f"  {key}: {value}\n" for key, value in values.items()))


if __name__ == "__main__":
    main()
