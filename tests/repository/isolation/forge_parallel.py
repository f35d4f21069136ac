"""forge-parallel alone: somebody's own module, two replicas' worth of tokens on one process, one optimizer step."""

from importlib.util import find_spec

import torch
from torch import nn
from torch.nn import functional as F

from forge_core import Batch, Init, Layout, Specs, TensorSpec
from forge_core.protocols import LossTerms
from forge_parallel import Blueprint, Plan, Step, Topology, realize
from forge_parallel.optim import AdamWConfig

assert find_spec("forge_models") is None
assert find_spec("forge_data") is None
VOCAB = 11


class Bigram(nn.Module):
    """Logits are a row of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(VOCAB, VOCAB))

    def forward(self, x, *, positions=None, documents=None, labels=None, objective=None):
        logits = self.table[x]
        return logits if objective is None else objective(None, logits, labels)

    def specs(self) -> Specs:
        return Specs({"table": TensorSpec(("vocab", None), Init("normal", 0.1), "embedding")}, {}, (), {})


def objective(head, logits, labels) -> LossTerms:
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    return LossTerms(total, (labels != -100).sum(), {})


layout = Layout()
topology = Topology.of(layout, torch.device("cpu"))
model = realize(Blueprint.of(Bigram), Plan.of([], layout), topology, 7)
optimizer = AdamWConfig(lr=0.1, weight_decay=0.0).build(model)
step = Step(model, objective)
tokens = torch.arange(10)[None] % VOCAB
batch = Batch(tokens=tokens, labels=(tokens + 1) % VOCAB)
first = step([batch, batch])
expected = F.cross_entropy(model.part.table[tokens].flatten(0, 1), batch.labels.flatten())
torch.testing.assert_close(first.loss.float(), expected.detach())
for _ in range(30):
    result = step([batch])
    optimizer.step(result.skip)
    optimizer.zero_grad()
assert step.evaluate([batch]).loss < 0.2 < float(first.loss)
