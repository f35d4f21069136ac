"""forge-interp alone: it stands on core and models, and on nothing else of Forge. A head is read, removed, and stored."""

import tempfile
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import torch

from forge_interp import ActivationStore, Moments, capture, edit, record, unbiased_cka, zero
from forge_interp.methods import logit_lens
from forge_interp.neuro import encode
from forge_models import DecoderConfig, initialize

siblings = {found.name for found in distributions() if found.name.startswith("forge-")}
assert siblings == {"forge-interp", "forge-core", "forge-models"}, siblings
assert find_spec("h5py") is None

model = DecoderConfig(dim=32, layers=2, heads=4, vocab_size=17, max_length=16).build()
initialize(model, seed=0)
tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])
with torch.no_grad(), capture(model, "blocks.*.attention.heads") as values:
    logits = model(tokens)
assert values["blocks.1.attention.heads"].shape == (1, 12, 4, 8)
with torch.no_grad(), edit(model, "attention.heads", zero(), layers=[1], heads=[2]):
    assert not torch.equal(model(tokens), logits)
assert torch.allclose(logit_lens(model, tokens)[-1, :, 0], logits[:, -1], atol=1e-5)
with tempfile.TemporaryDirectory() as folder:
    record(model, [tokens[0]], Path(folder), "blocks.*.residual_after")
    store = ActivationStore(folder)
    first, last = (store.read(f"blocks.{layer}.residual_after", 0, store.rows) for layer in (0, 1))
assert 0 < float(unbiased_cka(Moments.of(first, last))) <= 1
rows = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
assert float(encode(rows, rows @ torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)).min()) > 0.99
