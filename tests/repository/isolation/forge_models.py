"""forge-models alone: a decoder learns a sequence and gives it back."""

from importlib.util import find_spec

import torch

from forge_models import CrossEntropy, DecoderConfig, generate, initialize

assert find_spec("forge_parallel") is None
assert find_spec("forge_data") is None

model = DecoderConfig(dim=32, layers=2, heads=4, kv_heads=2, vocab_size=17, max_length=16).build()
initialize(model, seed=0)
text = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(60):
    terms = model(text[:, :-1], labels=text[:, 1:], objective=CrossEntropy())
    optimizer.zero_grad()
    (terms.sum / terms.tokens).backward()
    optimizer.step()
assert generate(model, [[3, 1]], max_tokens=3) == [[4, 1, 5]]
