"""Trains a bigram model on the text files of a folder, in a plain loop, and resumes in the middle of the data.

python train.py --texts FOLDER --steps 100
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from forge_data import Bytes, Data, StatefulLoader, TextFiles, open_stream

STATE = "state.pt"


def loader_of(texts: Path, place: Path, rows: int) -> StatefulLoader:
    """Returns a loader of batches of `rows` rows; the tokens are stored once, in `place`."""
    data = Data(sequence_length=64, sources=[TextFiles(path=str(texts))], tokenizer=Bytes())
    return StatefulLoader(open_stream(data, workspace=place, seed=3, global_batch=rows, micro_batch=rows))


def train(texts: Path, place: Path, steps: int, rows: int = 4) -> nn.Module:
    """Trains until `steps` steps are done, from the state in `place`, if any, and saves the new one there."""
    torch.manual_seed(0)
    model = nn.Embedding(257, 257)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader, done = loader_of(texts, place, rows), 0
    if (place / STATE).exists():
        state = torch.load(place / STATE, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["data"])  # a few integers
        done = state["steps"]
    batches = iter(loader)
    for step in range(done, steps):
        batch = next(batches)
        loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": loader.state_dict(), "steps": steps}
    torch.save(state, place / STATE)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, required=True, help="folder of .txt and .md files")
    parser.add_argument("--steps", type=int, default=100, help="steps in all, those of earlier starts included")
    parser.add_argument("--place", type=Path, default=Path("trained"), help="folder of tokens and state")
    given = parser.parse_args()
    given.place.mkdir(exist_ok=True)
    train(given.texts, given.place, given.steps)
