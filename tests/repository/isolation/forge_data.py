"""forge-data alone: text to a token store by its own command, then the batches of two ranks are one rank's."""

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from forge_core import IGNORE
from forge_data import Data, TokenStore, open_stream
from forge_data.sources import open_store

assert find_spec("forge_parallel") is None
assert find_spec("forge_models") is None
TEXTS = {f"{number}.txt": f"document {number}: " + "all work and no play " * (number + 1) for number in range(6)}


def first_step(path: Path, rank: int, ranks: int) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    data = Data(sequence_length=16, sources=[TokenStore(path=str(path))])
    stream = open_stream(data, workspace=path.parent, seed=3, global_batch=8, micro_batch=2, rank=rank, ranks=ranks)
    batches, _ = next(iter(stream.from_cursor(stream.start())))
    return [row for b in batches for row in zip(b.samples, b.tokens, b.labels, strict=True)]


with tempfile.TemporaryDirectory() as directory:
    texts, store = Path(directory) / "texts", Path(directory) / "store"
    texts.mkdir()
    for name, text in TEXTS.items():
        (texts / name).write_text(text)
    command = [sys.executable, "-m", "forge_data", "prepare", "--path", str(texts), "--out", str(store), "--tokenizer", "bytes"]
    subprocess.run(command, check=True, capture_output=True)
    command = [sys.executable, "-m", "forge_data", "inspect", str(store), "--json"]
    assert json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    source = open_store(store)
    stored = bytes(min(255, token) for token in source.read(0, source.tokens).tolist()).decode("latin-1").split("\xff")
    assert sorted(stored[:-1]) == sorted(TEXTS.values())

    whole = first_step(store, 0, 1)
    shared = first_step(store, 0, 2) + first_step(store, 1, 2)
    assert sorted(sample for sample, _, _ in shared) == sorted(sample for sample, _, _ in whole)
    rows = {sample: tokens for sample, tokens, _ in whole}
    assert all(torch.equal(tokens, rows[sample]) for sample, tokens, _ in shared)
    for _, tokens, labels in whole:
        inside = (labels[:-1] != IGNORE).nonzero()
        assert torch.equal(labels[inside], tokens[inside + 1])
