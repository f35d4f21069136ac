"""Values that are gathered from a model cut over ranks are those of one process, token by token."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from forge_core.batch import PADDING, Batch
from forge_core.layout import Layout
from forge_interp.captures import capture
from forge_interp.commands.ranks import ValuePiece, assemble_pieces, capture_sharded, pack, unpack
from forge_interp.tap_names import InterpError
from forge_models.components.attentions import GQA, MLA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig
from forge_models.objectives import CrossEntropy
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step
from forge_parallel.transforms.context.transform import ContextParallel
from forge_parallel.transforms.expert import ExpertParallel
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel
from harness.pool import World
from harness.siblings import fast
from parallel.pipelines import piped

CPU = torch.device("cpu")
DENSE = DecoderConfig(dim=16, layers=3, heads=4, kv_heads=2, ffn_dim=26, vocab_size=37, max_length=32)
MODELS = {
    "dense": DENSE,
    "dense4": replace(DENSE, layers=4),
    "one_kv": replace(DENSE, kv_heads=1, attention=GQA(window=5)),
    "latent": replace(DENSE, kv_heads=4, attention=MLA(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4)),
    "experts": replace(DENSE, moe=MoEConfig(experts=4, top_k=2, ffn_dim=8, shared=1)),
}
SELECTIONS: dict[str, dict[str, Any]] = {
    "all": {"names": "*"},
    "heads": {"names": "attention.heads", "layers": [0, -1], "heads": [3, 1]},
    "places": {"names": ["blocks.*.residual_after", "blocks.1.attention.k"], "positions": [0, -1, 5]},
    "last": {"names": ["residual", "blocks.0.mlp.hidden"], "positions": "last"},
    "slice": {"names": "norm", "positions": slice(3, 11, 2)},
}
NOT_HEARD = ("logits", "mtp.")
"""Not made where a loss is asked for."""


def rows(number: int, packed_rows: bool | str) -> Batch:
    """Four rows of 16 tokens. With "mask" documents are ignored, and only a mask tells the padding."""
    generator = torch.Generator().manual_seed(number)
    tokens, labels = (torch.randint(0, 37, (4, 16), generator=generator) for _ in range(2))
    documents = token_mask = None
    if packed_rows == "mask":
        token_mask = torch.arange(16) < torch.tensor([11, 16, 3, 12])[:, None]
    elif packed_rows:
        documents = torch.tensor([[0] * 5 + [1] * 11, [0] * 16, [0] * 12 + [PADDING] * 4, [0] * 3 + [1] * 3 + [2] * 10])
    samples = tuple(100 * number + row for row in (7, 3, 9, 1))
    return Batch(tokens, labels, documents=documents, samples=samples, token_mask=token_mask)


def share(batch: Batch, rank: int, ranks: int) -> Batch:
    size = len(batch.tokens) // ranks
    mine = slice(rank * size, (rank + 1) * size)
    documents = None if batch.documents is None else batch.documents[mine]
    token_mask = None if batch.token_mask is None else batch.token_mask[mine]
    return Batch(batch.tokens[mine], batch.labels[mine], documents=documents, samples=batch.samples[mine], token_mask=token_mask)


def gathered(
    model: str, layout: str, selection: str, packed_rows: bool | str, train: bool, kind: Any, schedule: str = "1f1b"
) -> tuple[dict[str, torch.Tensor], torch.Tensor, float, float]:
    """What every rank has in the end; the loss with it and, before, without."""
    at = Layout.parse(layout)
    component = MODELS[model]
    transforms: list[Any] = [FullyShard(), TensorParallel(), ExpertParallel(), ContextParallel(kind=kind)]
    plan = Plan.of(transforms, at, piped(schedule)) if at.pp > 1 else Plan.of(transforms, at)
    laid_out = realize(Blueprint.of(component.build), plan, Topology.of(at, CPU), 3, "fp64", "fp64")
    with torch.device("meta"):
        whole = component.build()
    topology, step = laid_out.topology, Step(laid_out, CrossEntropy().build())
    batches = [share(rows(number, packed_rows), topology.data_rank, topology.data_size) for number in range(2)]
    options = dict(SELECTIONS[selection])
    if options["names"] == "*":
        options["names"] = [name for name in names_of(component) if not name.startswith(NOT_HEARD)]
    plain = step(batches).numbers()["loss"] if train else step.evaluate(batches).loss
    with capture_sharded(laid_out, whole, samples=[batch.samples for batch in batches], **options) as seen:
        loss = step(batches).numbers()["loss"] if train else step.evaluate(batches).loss
    return {name: seen[name] for name in seen}, seen.tokens, loss, plain


def names_of(component: DecoderConfig) -> list[str]:
    from forge_interp.tap_names import taps

    with torch.device("meta"):
        return list(taps(component.build()))


def expected(model: str, selection: str, packed_rows: bool | str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """`capture` on one process, in the order of sample numbers and places."""
    at = Layout.parse("1")
    laid_out = realize(Blueprint.of(MODELS[model].build), Plan.of([], at), Topology.of(at, CPU), 3, "fp64", "fp64")
    options = dict(SELECTIONS[selection])
    if options["names"] == "*":
        options["names"] = [name for name in names_of(MODELS[model]) if not name.startswith(NOT_HEARD)]
    found: dict[str, list[torch.Tensor]] = {}
    tokens = []
    laid_out.part.eval()
    for number in range(2):
        batch = rows(number, packed_rows)
        with torch.no_grad(), capture(laid_out.part, **options) as seen:
            laid_out.part(batch.tokens, documents=batch.documents, token_mask=batch.token_mask)
        where = seen.tokens[0]
        tokens.append(torch.stack([torch.tensor(batch.samples)[where[:, 0]], where[:, 1]], 1))
        for name, value in seen.items():
            rowwise = value.dim() - len(seen.infos[name].shape) == 2
            found.setdefault(name, []).append(value.flatten(0, 1) if rowwise else value)
    every = torch.cat(tokens)
    order = sorted(range(len(every)), key=lambda at: every[at].tolist())
    return {name: torch.cat(values)[order] for name, values in found.items()}, every[order]


CASES = [
    *(("dense", layout, "all", False, "all_gather") for layout in ("1", "dp2", "tp2", "cp2", "pp2")),
    *(("dense", layout, "all", True, "all_gather") for layout in ("hsdp2x2", "dp2tp2", "cp2tp2", "pp2tp2", "dp2cp2", "tp4")),
    ("dense", "cp2", "all", False, "ring"),
    ("dense", "cp2", "all", False, "ulysses"),
    *(("one_kv", layout, "all", False, "all_gather") for layout in ("tp2", "tp4", "cp2tp2")),
    *(("latent", layout, "all", True, "all_gather") for layout in ("tp2", "dp2")),
    *(("experts", layout, "all", True, "all_gather") for layout in ("dp2ep2", "dp4ep2", "pp2dp2ep2", "dp2tp2ep4")),
    *(("dense", "tp2", selection, False, "all_gather") for selection in ("heads", "places", "last", "slice")),
    *(("dense", layout, "last", True, "all_gather") for layout in ("dp2", "pp2tp2", "cp2")),
    *(("dense", "cp2tp2", selection, False, "ring") for selection in ("heads", "places", "last", "slice")),
    *(("dense", layout, "last", "mask", "all_gather") for layout in ("1", "cp2", "pp2", "dp2tp2")),
    *(("dense", layout, "all", "mask", "all_gather") for layout in ("1", "cp2")),
]
FAST = (CASES[2], CASES[3], CASES[7], CASES[14], CASES[18], CASES[-11], CASES[-10], *CASES[-6:-3], CASES[-2])


@pytest.mark.parametrize(("model", "layout", "selection", "packed_rows", "kind"), fast(*FAST, of=CASES))
def test_ranks_give_what_one_process_has(
    world: World, model: str, layout: str, selection: str, packed_rows: bool | str, kind: str
) -> None:
    values, tokens = expected(model, selection, packed_rows)
    size = Layout.parse(layout).world
    arguments = (model, layout, selection, packed_rows, False, kind)
    every = world.run(gathered, size, *arguments) if size > 1 else [gathered(*arguments)]
    for found, places, loss, plain in every:
        assert loss == plain
        assert torch.equal(places, tokens)
        assert found.keys() == values.keys()
        for name, value in values.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("layout", "schedule"),
    fast(
        ("pp2", "interleaved"),
        of=[("dp2", "1f1b"), ("tp2", "1f1b"), ("pp2", "1f1b"), ("pp2", "interleaved"), ("pp2", "zbv"), ("pp2dp2", "gpipe")],
    ),
)
def test_a_training_step_is_heard_like_an_evaluation(world: World, layout: str, schedule: str) -> None:
    values, tokens = expected("dense4", "places", False)
    arguments = ("dense4", layout, "places", False, True, "all_gather", schedule)
    for found, places, loss, plain in world.run(gathered, Layout.parse(layout).world, *arguments):
        assert loss == plain
        assert torch.equal(places, tokens)
        for name, value in values.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def refusals(layout: str) -> list[str]:
    at = Layout.parse(layout)
    component = MODELS["dense"]
    laid_out = realize(Blueprint.of(component.build), Plan.of([FullyShard()], at), Topology.of(at, CPU), 3, "fp64", "fp64")
    with torch.device("meta"):
        whole, other = component.build(), replace(component, ffn_dim=20).build()
    batch, messages = rows(0, True), []
    step = Step(laid_out, CrossEntropy().build())
    plain = [Batch(batch.tokens, batch.labels)]
    for batches, model, options in (
        (plain, whole, {"names": "norm", "positions": "mean"}),
        (plain, whole, {"names": "blocks.9.residual"}),
        (plain, whole, {"names": "norm", "positions": 16}),
        (plain, whole, {"names": "norm", "samples": [[1, 2, 3]]}),
        (plain, other, {"names": "blocks.0.mlp.hidden"}),
        (plain, whole, {"names": "norm", "samples": [[1, 2, 2, 3]]}),
        (plain, whole, {"names": ["norm", "logits"]}),
    ):
        try:
            with capture_sharded(laid_out, model, **options) as seen:
                step.evaluate(batches)
            assert seen["norm"].shape == (64, 16)
            messages.append(str(seen["logits"]))
        except InterpError as refusal:
            messages.append(str(refusal))
    model: Any = laid_out.part
    with (
        laid_out.inference(whole_sequences=True),
        pytest.raises(InterpError, match="in a forward with a cache"),
        capture_sharded(laid_out, whole, "norm"),
    ):
        model(batch.tokens, cache=model.new_cache(4, 20))
    return messages


def test_what_cannot_be_gathered_is_refused_by_name() -> None:
    for message, start in zip(
        refusals("1"),
        (
            "positions 'mean' are not supported on several ranks",
            "'blocks.9.residual' matches no inner value",
            "position 16 is beyond the 16 tokens of a row",
            "samples does not have 4 numbers for forward 0",
            "blocks.0.mlp.hidden has 26 of 20 features on this rank",
            "norm: a share is missing, or two ranks sent the same one",
            "logits is not available: read it after the context has ended",
        ),
        strict=True,
    ):
        assert message.startswith(start)


def test_rows_that_all_data_ranks_have_alike_are_sent_once(world: World) -> None:
    (values, tokens), *others = world.run(alike, 2, "dp2")
    assert tokens.tolist() == [[row, place] for row in range(4) for place in range(16)]
    assert torch.equal(others[0][0], values)


def alike(layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    at = Layout.parse(layout)
    laid_out = realize(Blueprint.of(DENSE.build), Plan.of([FullyShard()], at), Topology.of(at, CPU), 3, "fp64", "fp64")
    with torch.device("meta"):
        whole = DENSE.build()
    with capture_sharded(laid_out, whole, "blocks.0.hook_resid_post", alike=True) as seen:
        Step(laid_out, CrossEntropy().build()).evaluate([rows(0, False)])
    return seen["blocks.0.hook_resid_post"], seen.tokens


def test_pieces_travel_as_bytes_and_come_together_once() -> None:
    tokens = torch.tensor([[5, 1], [2, 0]])
    pieces = [
        ValuePiece(tokens, torch.tensor([1, 0]), torch.arange(12).view(2, 2, 3).to(torch.bfloat16)),
        ValuePiece(tokens[:1], torch.tensor([2]), torch.full((1, 1, 3), -1.0, dtype=torch.bfloat16)),
        ValuePiece(tokens[1:], torch.tensor([2]), torch.full((1, 1, 3), -2.0, dtype=torch.bfloat16)),
        ValuePiece(tokens[:0], torch.tensor([2]), torch.empty(0, 1, 3, dtype=torch.bfloat16)),
    ]
    sent = [*unpack(pack(pieces[:1])), *unpack(pack(pieces[1:])), *unpack(pack([]))]
    assert len(sent) == 3
    where, value = assemble_pieces("x", sent, (3, 3))
    assert where.tolist() == [[2, 0], [5, 1]]
    assert value.tolist() == [[[9, 10, 11], [6, 7, 8], [-2] * 3], [[3, 4, 5], [0, 1, 2], [-1] * 3]]
    for wrong in (sent[:2], [*sent, sent[1]]):
        with pytest.raises(InterpError, match="x: a share is missing"):
            assemble_pieces("x", wrong, (3, 3))
