"""Trains a model to repeat the first token at the end, and finds out where the fact is read: `python study.py`."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_interp import capture, edit, heat_map, zero
from forge_interp.methods import activation_patching, linear_probe
from forge_models import DecoderConfig, initialize

FACTS, FILLER, LENGTH, LAYERS = 8, 8, 6, 3
ASK = FACTS + FILLER
"""The last token of a row: the question for its first token."""
STREAM = [f"blocks.{layer}.residual" for layer in range(LAYERS)]
"""The stream before each block."""


def rows_of(count: int, seed: int) -> Tensor:
    """Returns (count, LENGTH) rows: a fact, filler that is independent of it, the question."""
    draw = torch.Generator().manual_seed(seed)
    facts = torch.randint(FACTS, (count, 1), generator=draw)
    filler = FACTS + torch.randint(FILLER, (count, LENGTH - 2), generator=draw)
    return torch.cat((facts, filler, torch.full((count, 1), ASK)), 1)


def trained(steps: int = 250) -> nn.Module:
    """Returns a decoder that answers the question."""
    model = DecoderConfig(dim=32, layers=LAYERS, heads=2, ffn_dim=64, vocab_size=ASK + 1, max_length=LENGTH).build()
    initialize(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        rows = rows_of(64, seed=step)
        F.cross_entropy(model(rows)[:, -1], rows[:, 0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@dataclass(frozen=True)
class Findings:
    """Results of the study.

    Attributes:
        accuracy: share of right answers on new rows.
        without_attention: the same, with all attention removed.
        probes: accuracy of a linear probe for the fact in the last position, before each block.
        patched: (LAYERS, LENGTH) probability of the clean fact in a run with another fact that gets the stream of the clean run
            before one block at one position.
        readable: the first block before which a probe finds the fact in the last position; LAYERS if there is none.
        used: the first block before which the answer follows the fact that is put into the last position; LAYERS likewise.
    """

    accuracy: float
    without_attention: float
    probes: list[float]
    patched: Tensor
    readable: int
    used: int


@torch.no_grad()
def study(model: nn.Module) -> Findings:
    """Measures where the fact is."""
    rows = rows_of(600, seed=10_000)
    accuracy = right(model, rows)
    with edit(model, "blocks.*.attention.output", zero()):
        without = right(model, rows)
    with capture(model, STREAM) as stream:
        model(rows)
    with torch.enable_grad():
        probes = [linear_probe(stream[name][:, -1], rows[:, 0]).accuracy for name in STREAM]
    clean = rows[:1]
    corrupted = clean.clone()
    corrupted[0, 0] = (clean[0, 0] + 1) % FACTS
    answer = int(clean[0, 0])
    found = activation_patching(model, clean, corrupted, lambda logits: logits[0, -1].softmax(-1)[answer], STREAM)
    patched = torch.stack([found[name] for name in STREAM])
    readable = first([accuracy > 0.9 for accuracy in probes])
    return Findings(accuracy, without, probes, patched, readable, first((patched[:, -1] > 0.5).tolist()))


def first(holds: list[bool]) -> int:
    """Returns the index of the first True, or the length."""
    return holds.index(True) if True in holds else len(holds)


def right(model: nn.Module, rows: Tensor) -> float:
    """Returns the share of rows whose question is answered."""
    return float((model(rows)[:, -1].argmax(-1) == rows[:, 0]).float().mean())


def figure(findings: Findings) -> str:
    """Returns the heat map of patching as SVG."""
    columns = ["fact", *["filler"] * (LENGTH - 2), "question"]
    title = "Probability of the clean fact after patching"
    return heat_map(title, findings.patched.tolist(), [f"before block {layer}" for layer in range(LAYERS)], columns)


def conclusion(findings: Findings) -> str:
    """Returns what the study found, in two sentences."""
    return (
        f"The model answers {findings.accuracy:.0%} of the questions, and {findings.without_attention:.0%} without attention. "
        f"A probe reads the fact at the question before block {findings.readable}, but the answer comes from there only before "
        f"block {findings.used}: what can be read is not yet used."
        if findings.readable < findings.used
        else f"Before block {findings.used} the fact is at the question, and the answer comes from there."
    )


if __name__ == "__main__":
    found = study(trained())
    Path("study.svg").write_text(figure(found))
    print(conclusion(found))
