"""Writes forty example documents in every format, for the examples of sources and tokenizers.

Each function writes into a folder and returns the path of its corpus.
"""

import base64
import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

EOS = 256
LABELS = ("even", "odd")
WORDS = ("gradient", "layer", "naïve", "Größe", "token", "日本", "of", "the", "a")


def texts() -> list[str]:
    """Returns documents of different lengths, not only ASCII; a number makes each unique."""
    words = [" ".join(WORDS[(number * 7 + at * at) % len(WORDS)] for at in range(number % 9 + 1)) for number in range(40)]
    return [f"{text} {number}" for number, text in enumerate(words)]


def documents() -> list[np.ndarray]:
    """Returns the UTF-8 bytes of the documents as ids, each followed by `EOS`."""
    return [np.array([*text.encode(), EOS]) for text in texts()]


def text_files(folder: Path) -> str:
    for number, text in enumerate(texts()):
        (folder / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    return str(folder)


def jsonl(folder: Path) -> str:
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()), encoding="utf-8")
    return str(path)


def completions(folder: Path) -> str:
    path = folder / "completions.jsonl"
    halves = [(f"{number}: ", text[:9]) for number, text in enumerate(texts())]
    path.write_text("".join(json.dumps({"prompt": a, "completion": b}) + "\n" for a, b in halves), encoding="utf-8")
    return str(path)


def labeled(folder: Path) -> str:
    path = folder / "labeled.jsonl"
    records = ({"text": text, "label": LABELS[len(text) % 2]} for text in texts())
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def parquet(folder: Path) -> str:
    import pyarrow
    from pyarrow import parquet as files

    files.write_table(pyarrow.table({"text": texts()}), folder / "corpus.parquet")
    return str(folder / "corpus.parquet")


def arrow(folder: Path) -> str:
    import pyarrow

    table = pyarrow.table({"text": texts()})
    with pyarrow.OSFile(str(folder / "corpus.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return str(folder / "corpus.arrow")


def store(folder: Path) -> str:
    from forge_data.sources.store_writer import StoreWriter

    with StoreWriter(folder / "store", dtype="uint16", shard_tokens=200) as writer:
        for ids in documents():
            writer.add(ids, np.array([len(ids)]))
        writer.commit()
    return str(folder / "store")


def npy(folder: Path) -> str:
    np.save(folder / "ids.npy", np.concatenate(documents()).astype("<u2"))
    return str(folder / "ids.npy")


def megatron(folder: Path) -> str:
    from forge_data.sources.megatron import MegatronWriter

    with MegatronWriter(folder / "corpus", "uint16") as writer:
        for ids in documents():
            writer.add(ids, np.array([len(ids)]))
        writer.commit()
    return str(folder / "corpus")


def llmc(folder: Path) -> str:
    """In this format a document begins with its separator, so `EOS` precedes it."""
    ids = np.concatenate([np.roll(document, 1) for document in documents()])
    head = np.zeros(256, dtype="<i4")
    head[:3] = 20240520, 1, len(ids)
    (folder / "ids.bin").write_bytes(head.tobytes() + ids.astype("<u2").tobytes())
    return str(folder / "ids.bin")


def datatrove(folder: Path) -> str:
    ends = np.cumsum([len(ids) for ids in documents()])
    (folder / "ids.ds").write_bytes(np.concatenate(documents()).astype("<u2").tobytes())
    (folder / "ids.ds.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends.tolist()))
    return str(folder / "ids.ds")


def ranks(folder: Path) -> str:
    """Writes a rank file with all bytes and a few merges."""
    merges = [b"th", b"the", b"ke", b"en", b"to"]
    every = [*(bytes([index]) for index in range(256)), *merges]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(every)]
    (folder / "small.tiktoken").write_text("".join(lines))
    return str(folder / "small.tiktoken")


def pieces(folder: Path) -> str:
    """Trains a sentencepiece model, in another process because the library writes to the terminal."""
    path = folder / "small.model"
    script = (
        "import sys, sentencepiece as s\n"
        "s.SentencePieceTrainer.train(sentence_iterator=iter(sys.argv[2:]), model_writer=open(sys.argv[1], 'wb'),\n"
        "  vocab_size=60, hard_vocab_limit=False, minloglevel=2)"
    )
    subprocess.run([sys.executable, "-c", script, str(path), *texts()], check=True, capture_output=True)
    return str(path)


class Corpus:
    """The documents as `Texts`."""

    fingerprint = "forge-conformance"

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return ((str(number), text) for number, text in enumerate(texts()))
