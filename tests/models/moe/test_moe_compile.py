"""Compiled blocks with experts, in bf16: the numbers of the plain ones, one graph for all, none made later."""

import warnings

import pytest
import torch
from torch._dynamo.utils import counters

from forge_core.layout import Layout
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SigmoidTopKConfig
from forge_models.objectives import CrossEntropy
from forge_models.shape import Losses
from forge_parallel.model.plan import Plan
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.transforms.compile import Compile
from forge_parallel.verify.parity import Case, compare, measure

CPU = torch.device("cpu")
EXPERTS = MoEConfig(experts=4, shared=1, ffn_dim=24, router=SigmoidTopKConfig(), losses=Losses(sequence=0.1, z=0.01))
SIZES = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "vocab_size": 61, "max_length": 16}


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own imports warn
        yield


@pytest.mark.slow
def test_compilation_changes_nothing(compiler):
    build, objective = DecoderConfig(**SIZES, moe=EXPERTS).build, CrossEntropy().build()
    sizes = {"rows": 4, "micro_batch": 4, "steps": 2, "grad_clip": 1e9}
    case = Case(build, objective, AdamWConfig().build, 61, **sizes, compute="bf16", state="fp32")
    plain, compiled = measure(case, Plan.of([], Layout()), CPU), measure(case, Plan.of([Compile().build()], Layout()), CPU)
    difference = compare(plain, compiled)
    assert max(difference.loss, difference.norm) < 2**-9
    assert difference.gradients < 2**-5
    assert counters["stats"]["unique_graphs"] == 1, "all blocks share one graph, in all steps"
