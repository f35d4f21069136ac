"""What the tests of pipelines have in common: the schedules, a decoder that is cut, and one rank of a run."""

import warnings
from dataclasses import replace
from typing import Any, get_args

import torch

from forge_core.layout import Layout
from forge_models.components.decoder import DecoderConfig
from forge_models.objectives import CrossEntropy
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.pipeline import schedules as orders
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.placement.topology import Topology
from forge_parallel.transforms.compile import Compile
from forge_parallel.transforms.context.transform import ContextParallel, Kind
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel
from forge_parallel.verify.parity import Case, Measurement, measure
from parallel.tiny import VOCAB

CPU = torch.device("cpu")
SCHEDULES = {
    "gpipe": orders.GPipe(),
    "1f1b": orders.OneForwardOneBackward(),
    "interleaved": orders.Interleaved(),
    "interleaved_zero_bubble": orders.InterleavedZeroBubble(),
    "zbv": orders.ZeroBubbleV(),
    "dualpipev": orders.DualPipeV(),
}


def decoder_case(tied: bool = True, layers: int = 5, **changes: Any) -> Case:
    """Grouped key-value heads, and an objective with metrics."""
    decoder = DecoderConfig(
        dim=16, layers=layers, heads=4, kv_heads=2, ffn_dim=24, vocab_size=VOCAB, max_length=32, tied_embeddings=tied
    )
    objective = CrossEntropy(z_loss=1e-2).build()
    case = Case(decoder.build, objective, AdamWConfig(lr=1e-2).build, VOCAB, rows=8, micro_batch=1, steps=2)
    return replace(case, **changes)


def piped(schedule: str, split: str = "balanced") -> Pipeline:
    """What a plan takes."""
    return Pipeline(SCHEDULES[schedule].build(), split)


def measured(
    case: Case, layout: str, schedule: str = "1f1b", split: str = "balanced", features: frozenset[str] = frozenset()
) -> Measurement:
    """One rank of a run with these features, named as in `forge_parallel.verify.proofs`."""
    laid_out = Layout.parse(layout)
    transforms: list[Any] = [FullyShard(reduce="each" if "reduce_each" in features else "last")]
    if "recompute" in features:
        transforms.append(Recompute())
    if "compile" in features:
        transforms.append(Compile())
    if laid_out.tp > 1:
        transforms.append(TensorParallel())
    transforms += [ContextParallel(kind=kind) for kind in get_args(Kind) if f"cp_{kind}" in features and laid_out.cp > 1]
    with warnings.catch_warnings():
        if "compile" in features:  # the compiler's own imports warn, and so does the way it looks at its inputs
            warnings.simplefilter("ignore")
        return measure(case, Plan.of(transforms, laid_out, piped(schedule, split)), CPU)


def realized(case: Case, layout: str, schedule: str, *more: Any, shard: Any = None) -> ParallelModel:
    """This rank's model."""
    laid_out = Layout.parse(layout)
    plan = Plan.of([shard or FullyShard(), *more], laid_out, piped(schedule))
    return realize(Blueprint.of(case.build), plan, Topology.of(laid_out, CPU), case.seed, case.compute, case.state)
