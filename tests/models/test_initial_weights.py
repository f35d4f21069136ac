"""Weights of a model without forge-parallel: those that a run starts from."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from forge_core.layout import Layout
from forge_core.specs import key_of, philox, row_name
from forge_models import initialize
from forge_models.components.experts import SigmoidTopKConfig
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.placement.topology import Topology
from parallel.compositions.rows import DECODER, EXPERTS, LORA

ALONE = Topology(Layout(), torch.device("cpu"))
BUILDS = {"dense": DECODER, "experts": replace(DECODER, moe=EXPERTS), "large": replace(DECODER, dim=64, vocab_size=3000)}
BUILDS["tables"] = replace(DECODER, vocab_size=5001, moe=replace(EXPERTS, top_k=5, router=SigmoidTopKConfig(hash_layers=(1, 3))))
"""Rows of the tables are in two blocks of the stream."""
BUILDS["adapter"] = replace(DECODER, moe=EXPERTS, lora=LORA)


@pytest.mark.parametrize("state", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("name", BUILDS)
def test_trials_d12_a_model_alone_has_the_weights_of_a_run(name: str, state: str) -> None:
    build: Any = BUILDS[name].build
    run = realize(Blueprint.of(build), Plan.of([], Layout()), ALONE, 5, compute=state, state=state)
    model = build().to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[state])
    initialize(model, seed=5)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for key, tensor in (*run.part.named_parameters(), *run.part.named_buffers()):
        assert torch.equal(tensors[key].to(tensor.dtype), tensor), key
    initialize(model, seed=6)
    drawn = {key for key, spec in model.specs().tensors.items() if spec.init.kind in ("normal", "uniform", "choices")}
    every = (*run.part.named_parameters(), *run.part.named_buffers())
    assert drawn == {key for key, tensor in every if not torch.equal(tensors[key].to(tensor.dtype), tensor)}


def test_trials_d12_what_cannot_be_filled_is_refused() -> None:
    with torch.device("meta"):
        hollow = DECODER.build()
    with pytest.raises(ValueError, match=r"has no memory; write model\.to_empty\(device='cpu'\) first"):
        initialize(hollow)
    initialize(hollow.to_empty(device="cpu"))
    assert all(tensor.isfinite().all() for tensor in hollow.parameters())
    with pytest.raises(TypeError, match="Linear does not describe itself"):
        initialize(nn.Linear(2, 2))

    hollow.extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"extra has no TensorSpec in Decoder\.specs\(\)"):
        initialize(hollow)


def test_the_first_factor_of_an_adapter_is_uniform_in_the_bounds_of_its_inputs() -> None:
    """Between -1 and 1 over the square root of the inputs, by numpy's stream of the tensor's name; each expert has its own."""
    model = replace(DECODER, moe=EXPERTS, lora=LORA).build()
    initialize(model, seed=5)
    named = dict(model.named_parameters())
    for name, row, inputs in (("blocks.0.mlp.down_proj.lora_a", None, 24), ("blocks.1.mlp.experts.down_proj_lora_a", 3, 16)):
        stream = np.random.Generator(np.random.Philox(**philox(key_of(5, name if row is None else row_name(name, row)), 0)))
        drawn = torch.from_numpy(stream.random(8 * inputs, dtype=np.float32)).view(8, inputs)
        values = named[name] if row is None else named[name][row]
        assert torch.allclose(values, (2 * drawn - 1) / inputs**0.5, rtol=1e-6, atol=0)
        assert not named[name.replace("lora_a", "lora_b")].any()
