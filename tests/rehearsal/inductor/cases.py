"""What Forge compiles on CUDA, as Forge does it: a whole step of a small model on one device, and functions outside of blocks.

Sizes are small; widths are those of a large model's head, and multiples of what its kernels take.
"""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from forge_core.batch import Batch
from forge_core.layout import Layout
from forge_models.blocks.head import ChunkedCrossEntropy
from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SigmoidTopKConfig
from forge_models.objectives import CrossEntropy
from forge_models.shape import Losses
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.optimizers import AdamW8bitConfig, AdamWConfig
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step
from forge_parallel.torch_private import fake_store
from forge_parallel.transforms.compilation import compile_blocks
from forge_parallel.transforms.compile import Compile
from forge_parallel.transforms.float8.transform import Float8
from forge_parallel.transforms.tensor.transform import TensorParallel
from rehearsal.inductor.record import Record, recorded

ROWS, LENGTH = 2, 256
SIZES: dict[str, Any] = {
    "dim": 512, "heads": 4, "kv_heads": 2, "ffn_dim": 1408, "vocab_size": 512, "max_length": LENGTH, "layers": 1,
}  # fmt: skip
EXPERTS = MoEConfig(
    experts=8, top_k=2, shared=1, ffn_dim=256, router=SigmoidTopKConfig(bias_rate=1e-2), losses=Losses(global_batch=1e-2, z=1e-4)
)
ONE = Layout()
EVERYWHERE = (80, 100)
"""Architectures, further to the device's, for which the kernel of the optimizer has to assemble."""


def compiled(name: str) -> Record:
    """Compiles one of `CASES`."""
    with warnings.catch_warnings(action="ignore"):  # building a model with compiled blocks imports the compiler
        return CASES[name]()


def _batch(longest: int | None) -> Batch:
    """Rows of documents of so many tokens, or of one."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(SIZES["vocab_size"], (ROWS, LENGTH), generator=generator)
    documents = None
    if longest is not None:
        documents = (torch.arange(LENGTH, dtype=torch.int32) // longest).expand(ROWS, -1).contiguous()
    return Batch(tokens, tokens.roll(-1, 1), documents=documents).with_document_starts()


def _model(decoder: DecoderConfig, *transforms: Any, state: str = "fp32", layout: Layout = ONE) -> Any:
    topology = Topology.of(layout, torch.device("cuda", 0))
    plan = Plan.of([transform.build() for transform in transforms], layout)
    with recorded():  # the compiler is tried, and that is not launched either
        return realize(Blueprint.of(decoder.build), plan, topology, 0, "bf16", state)


def _step(decoder: DecoderConfig, *transforms: Any, packed: bool = False) -> Record:
    model = _model(decoder, Compile(), *transforms)
    return _trained(model, packed)


def _trained(model: Any, packed: bool = False) -> Record:
    """Two steps with other documents: the second compiles nothing, or it shows."""
    step = Step(model, CrossEntropy().build())
    with recorded() as record:
        for longest in (100, 70):
            step([_batch(longest if packed else None)])
    return record


def _experts_of_ranks() -> Record:
    """As where experts are shared over ranks: what dispatches tokens is not compiled. Here it keeps all of them."""
    model = _model(DecoderConfig(**SIZES, moe=EXPERTS))
    layout = SimpleNamespace(layout=Layout(dp_shard=2, ep=2))
    for part in model.parts:
        context: Any = SimpleNamespace(specs=model.specs, topology=layout)
        compile_blocks(part, context, fullgraph=True, mode="default", budget=1.0)
    return _trained(model)


def _tensor_parallel() -> Record:
    """As on one of two ranks that exchange nothing: exchanges become parts of products, by operators that torch writes out."""
    from torch import distributed
    from torch._inductor import config
    from torch.distributed import _symmetric_memory as memory

    distributed.init_process_group("fake", store=fake_store(), rank=0, world_size=2)
    unset = config.patch(_micro_pipeline_tp=False)
    with unset, memory._test_mode(), mock.patch.object(memory, "enable_symm_mem_for_group", lambda name: None):
        return _trained(_model(DecoderConfig(**SIZES), TensorParallel(asynchronous=True), Compile(), layout=Layout(tp=2)))


def _loss_head() -> Record:
    """A chunk of a large vocabulary, with a soft cap, then a shorter one."""
    head = ChunkedCrossEntropy(rows=64).compiled()
    hidden = torch.zeros(96, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.zeros(32_000, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    labels = torch.zeros(96, dtype=torch.int64, device="cuda")
    with recorded() as record:
        head(hidden, weight, labels, 1e-4, 30.0)[0].backward()
    return record


def _update(component: Any, state: str, further: tuple[int, ...] = ()) -> Record:
    model = _model(DecoderConfig(**SIZES), state=state)
    with recorded():  # the compiler is tried
        optimizer = component.build(model)
    for _, tensor, _ in model.trainable():
        tensor.grad = torch.zeros_like(tensor)
    with recorded(further) as record:
        optimizer.step(torch.zeros((), device="cuda"))
    return record


def _flex() -> Record:
    """Documents of flex attention outside of a compiled block, with a soft cap."""
    from forge_models.blocks.attention import LocalAttention

    core = LocalAttention("flex", capped=True)
    documents = _documents()
    with recorded() as record:
        blocks = core.prepare(documents, LENGTH, None, documents.device)
        core(*_heads(), blocks, 0.1, 30.0).sum().backward()
    return record


def _ring() -> Record:
    """Flex attention to one block of keys of a ring, and its backward."""
    from forge_core.protocols.model import PositionedTokens
    from forge_parallel.transforms.context import flex_blocks

    documents = _documents()
    placed = PositionedTokens(torch.arange(LENGTH, device="cuda"), documents)
    q, k, v = _heads()
    with recorded() as record:
        mask = flex_blocks.mask_between(placed, placed, 100)
        out, sums = flex_blocks.forward(q, k, v, mask, True, 0.1)
        flex_blocks.backward(torch.ones_like(out), q, k, v, out, sums, mask, True, 0.1)
    return record


def _documents() -> torch.Tensor:
    documents = _batch(100).documents
    assert documents is not None
    return documents.cuda()


def _heads() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (
        torch.zeros(ROWS, heads, LENGTH, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True) for heads in (4, 2, 2)
    )
    return q, k, v


CASES: dict[str, Callable[[], Record]] = {
    "dense": lambda: _step(DecoderConfig(**SIZES)),
    "experts": lambda: _step(DecoderConfig(**SIZES, moe=EXPERTS)),
    "experts of ranks": _experts_of_ranks,
    "documents": lambda: _step(DecoderConfig(**SIZES), packed=True),
    "flex documents": lambda: _step(DecoderConfig(**SIZES, attention=GQA(core="flex")), packed=True),
    "float8": lambda: _step(DecoderConfig(**SIZES), Float8()),
    "tensor parallel": _tensor_parallel,
    "loss head": _loss_head,
    "AdamW bf16": lambda: _update(AdamWConfig(), "bf16", EVERYWHERE),
    "AdamW 8 bit": lambda: _update(AdamW8bitConfig(), "fp32"),
    "flex": _flex,
    "ring": _ring,
}
