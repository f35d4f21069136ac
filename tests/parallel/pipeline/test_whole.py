"""Stages generate what one process does: logits through the cache, and tokens, drawn and greedy, of prompts of unlike lengths."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig, MTPConfig
from forge_models.components.experts import HashConfig, MoEConfig, SigmoidTopKConfig
from forge_models.generation import GenerationError, Sampling, generate
from forge_models.shape import Rope, Streams, ValueEmbeddings
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.transforms.context.transform import ContextParallel
from forge_parallel.transforms.expert import ExpertParallel
from forge_parallel.transforms.tensor.transform import TensorParallel
from harness.pool import World
from harness.siblings import fast
from parallel.pipelines import decoder_case, realized
from parallel.tiny import VOCAB

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5]]
DRAWN = Sampling(temperature=1.5, top_k=40, repetition_penalty=1.2, seed=7)
WINDOWS = DecoderConfig(
    dim=16, layers=5, heads=4, kv_heads=2, ffn_dim=24, vocab_size=VOCAB, max_length=32, attention=GQA(window=4, global_every=2)
)
HASHED = replace(
    WINDOWS,
    attention=GQA(),
    moe=MoEConfig(experts=4, top_k=2, ffn_dim=8, first_dense=1, router=HashConfig()),
    mtp=MTPConfig(depth=1),
)
MODELS = {"tied": decoder_case(True), "windows": replace(decoder_case(), build=WINDOWS.build)}
TABLED = replace(HASHED.moe, first_dense=0, router=SigmoidTopKConfig(bias_rate=0.0, hash_layers=(0, 4)))
"""On the first and on the last stage."""
MODELS["tables"] = replace(decoder_case(), build=replace(HASHED, moe=TABLED).build)
MODELS["hashed"] = replace(decoder_case(), build=HASHED.build)
TABLES = GQA(window=4, global_every=2, value_embeddings=ValueEmbeddings(layers=(1, 4), gate_channels=5))
MODELS["values"] = replace(decoder_case(), build=replace(WINDOWS, attention=TABLES).build)
MODELS["streams"] = replace(decoder_case(), build=replace(WINDOWS, streams=Streams(count=3, sinkhorn=5)).build)


def made(model: str, layout: str, schedule: str) -> tuple[list[list[int]], list[list[int]], list[torch.Tensor]]:
    """Drawn tokens, greedy ones with a prompt taken in pieces, and the logits of every forward before a token."""
    transforms: list[Any] = [TensorParallel(), ExpertParallel(), ContextParallel(kind="ulysses")]
    laid_out = realized(MODELS[model], layout, schedule, *transforms)
    seen: list[torch.Tensor] = []
    with laid_out.inference(whole_sequences=True):
        whole: Any = laid_out.whole()
        whole.register_forward_hook(lambda _module, _inputs, output: seen.append(output.double().clone()))
        drawn = generate(whole, PROMPTS, DRAWN, max_tokens=6, agree=laid_out.topology.from_first)
        greedy = generate(whole, PROMPTS, max_tokens=6, prefill=3, agree=laid_out.topology.from_first)
    return drawn, greedy, seen


CASES = [
    *((model, "pp2", "1f1b") for model in MODELS),
    *(("windows", "pp2", schedule) for schedule in ("interleaved", "zbv", "dualpipev")),
    *(("tied", layout, "1f1b") for layout in ("pp4", "pp2dp2", "pp2tp2", "pp2cp2", "hsdp2x1pp2")),
    ("streams", "pp2tp2", "1f1b"),
    ("hashed", "pp2dp2ep2", "interleaved"),
    ("tables", "pp2dp2ep2", "interleaved"),
]
FAST = (
    ("hashed", "pp2", "1f1b"),
    ("tables", "pp2", "1f1b"),
    ("streams", "pp2", "1f1b"),
    ("values", "pp2", "1f1b"),
    ("windows", "pp2", "zbv"),
    ("tied", "pp2tp2", "1f1b"),
)


@pytest.mark.parametrize(("model", "layout", "schedule"), fast(*FAST, of=CASES))
def test_stages_generate_what_one_process_does(world: World, model: str, layout: str, schedule: str) -> None:
    ranks = {"pp2": 2}.get(layout, 4)
    drawn, greedy, logits = made(model, "1", schedule)
    assert len({tuple(row) for row in drawn}) == len(PROMPTS)
    for found in world.run(made, ranks, model, layout, schedule):
        assert found[:2] == (drawn, greedy)
        assert len(found[2]) == len(logits)
        for mine, one in zip(found[2], logits, strict=True):
            torch.testing.assert_close(mine, one, rtol=1e-10, atol=1e-12)


def trained(layout: str) -> torch.Tensor:
    """Logits after an update that moves the tied table: its copy on the last stage is older until it is asked for."""
    model = realized(decoder_case(True), layout, "1f1b")
    optimizer = AdamWConfig(lr=0.5).build(model)
    for name, tensor, _ in model.trainable():
        tensor.grad = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)), dtype=tensor.dtype)
    optimizer.step()
    with model.inference(whole_sequences=True):
        whole: Any = model.whole()
        return whole(torch.tensor(PROMPTS[:1]), positions=None, cache=whole.new_cache(1, 8))


def test_tied_copies_are_those_of_the_weights_that_are_asked(world: World) -> None:
    alone = trained("1")
    for found in world.run(trained, 2, "pp2"):
        torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-12)


ROPE = Rope(scaling="dynamic", factor=2.0, original_max_length=8, local_theta=100.0)
LIMITED = replace(WINDOWS, layers=2, rope=ROPE)
"""Only the second block, on the other stage, turns its keys by a rope that a cache must not outgrow."""


def refused(layout: str) -> str:
    model = realized(replace(decoder_case(), build=LIMITED.build), layout, "1f1b")
    with model.inference(whole_sequences=True), pytest.raises(GenerationError) as refusal:
        generate(model.whole(), PROMPTS, max_tokens=6)  # type: ignore[arg-type]
    return str(refusal.value)


def test_all_ranks_refuse_what_one_part_cannot_hold(world: World) -> None:
    messages = world.run(refused, 2, "pp2")
    assert "original_max_length of dynamic rope scaling 8" in messages[0]
    assert messages == [refused("1")] * 2
