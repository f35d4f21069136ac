"""Published training speeds, as rows that the time model can predict: architectures, layouts and how steps ran.

`published.tsv` has one row per run, with its source. `split` says whether constants were fitted to it (`fit`) or only scored
(`held`): every second row of a framework, in order. Rows of a framework on special GPUs are only scored.

Facts that a source does not state are assumed as its software does by default: Megatron-Bridge sums gradients once a step in
bf16, shards optimizer state only, overlaps tensor parallelism, and forces equal loads of experts.
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from forge_core.layout import Layout
from forge_models import GELU, GQA, MLA, DecoderConfig, MoEConfig
from forge_parallel.model.realize import Blueprint
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.pipeline.schedules import Interleaved, OneForwardOneBackward
from forge_parallel.timing.hardware import Hardware
from forge_parallel.timing.step_time import Efficiency, StepTime, predict
from forge_parallel.timing.work import Execution, ModelWork, Scores, StageBlocks, stages_of, work_of

TABLE = Path(__file__).with_name("published.tsv")


def _llama(dim: int, layers: int, heads: int, ffn: int, vocab: int = 128256) -> DecoderConfig:
    return DecoderConfig(dim=dim, layers=layers, heads=heads, kv_heads=8, ffn_dim=ffn, vocab_size=vocab, max_length=8192)


def _qwen3(dim: int, layers: int, heads: int, ffn: int) -> DecoderConfig:
    experts = MoEConfig(experts=128, top_k=8, ffn_dim=ffn)
    sizes: dict[str, Any] = {"dim": dim, "layers": layers, "heads": heads, "kv_heads": 4, "head_dim": 128, "ffn_dim": 4 * ffn}
    return DecoderConfig(**sizes, vocab_size=151936, attention=GQA(qk_norm="head"), moe=experts)


MODELS: Mapping[str, DecoderConfig] = {
    "llama3-8b": _llama(4096, 32, 32, 14336),
    "llama3-70b": _llama(8192, 80, 64, 28672),
    "llama3-405b": _llama(16384, 126, 128, 53248),
    "dense-13b": _llama(5120, 40, 40, 17920),
    "dense-175b": _llama(12288, 96, 96, 39680),
    "mpt-70b": DecoderConfig(
        dim=8192, layers=80, heads=64, ffn_dim=32768, vocab_size=50368, max_length=2048, mlp=GELU(), tied_embeddings=True
    ),
    "mpt-7b": DecoderConfig(
        dim=4096, layers=32, heads=32, ffn_dim=16384, vocab_size=50432, max_length=2048, mlp=GELU(), tied_embeddings=True
    ),
    "qwen3-30b": _qwen3(2048, 48, 32, 768),
    "qwen3-235b": _qwen3(4096, 94, 64, 1536),
    "gpt-oss-120b": DecoderConfig(
        dim=2880,
        layers=36,
        heads=64,
        kv_heads=8,
        head_dim=64,
        ffn_dim=2880,
        vocab_size=201088,
        attention=GQA(window=128, global_every=2),
        moe=MoEConfig(experts=128, top_k=4, ffn_dim=2880),
    ),
    "deepseek-v3": DecoderConfig(
        dim=7168,
        layers=61,
        heads=128,
        ffn_dim=18432,
        vocab_size=129280,
        attention=MLA(q_lora_rank=1536),
        moe=MoEConfig(experts=256, top_k=8, shared=1, first_dense=3, ffn_dim=2048),
    ),
}
"""Architectures by the names of the table."""


@dataclass(frozen=True)
class Described:
    """A model: its blueprint, and its work."""

    blueprint: Blueprint
    work: ModelWork


@cache
def described(name: str) -> Described:
    """Returns the model with a name of `MODELS`."""
    config = MODELS[name]
    shape, blueprint = config.shape, Blueprint.of(config.build)
    attention: Any = shape.attention
    scores = [Scores(attention.score_width(shape.context(index)), window) for index, window in enumerate(shape.windows())]
    return Described(blueprint, work_of(blueprint, scores, config.moe.top_k if config.moe else 1))


@dataclass(frozen=True)
class Row:
    """A published run, ready for `predict`.

    Attributes:
        framework, model, date, source: where it comes from.
        fitted: whether constants were fitted to it.
        measured: tokens per second of one GPU.
        memory: peak of a GPU in GB; None if not stated.
    """

    framework: str
    model: str
    date: str
    source: str
    fitted: bool
    hardware: Hardware
    layout: Layout
    execution: Execution
    pipeline: Pipeline | None
    stages: tuple[StageBlocks, ...]
    measured: float
    memory: float | None

    def modeled(self, efficiency: Efficiency) -> StepTime:
        """Returns the modeled step."""
        work = described(self.model).work
        return predict(work, self.stages, self.layout, self.execution, self.hardware, efficiency, self.pipeline)

    @property
    def name(self) -> str:
        """Model, GPUs and layout."""
        return f"{self.model} on {self.layout.world} {self.hardware.name}, {self.layout}"


def rows(table: Path = TABLE) -> Iterator[Row]:
    """Yields the rows of a table with the columns of `published.tsv`."""
    with table.open(newline="") as lines:
        for line in csv.DictReader(lines, delimiter="\t"):
            yield _row(line)


def _row(line: Mapping[str, str]) -> Row:
    layout, megatron = Layout.parse(line["layout"]), line["sharded"] == "optimizer"
    schedule = (
        OneForwardOneBackward() if line["stages_per_rank"] == "1" else Interleaved(stages_per_rank=int(line["stages_per_rank"]))
    )
    pipeline = Pipeline(schedule.build()) if layout.pp > 1 else None
    float8 = "fp8" in line["precision"]
    execution = Execution(
        rows=int(line["micro_batch"]),
        length=int(line["length"]),
        micro_batches=int(line["micro_batches"]),
        state=line["state"],
        float8=float8,
        float8_experts=float8,
        recompute=None if line["recompute"] == "none" else line["recompute"],  # type: ignore[arg-type]
        compiled=line["compiled"] == "yes",
        once=megatron,
        asynchronous=megatron,
        dispatcher="hierarchical" if megatron else "all_to_all",
        gradient_bytes=2 if megatron else 4,
        frozen=line["task"] == "lora",
    )
    special = TABLE.with_name(f"{line['gpu']}.toml")
    hardware = replace(Hardware.load(str(special) if special.exists() else line["gpu"]), per_node=int(line["per_node"]))
    return Row(
        *(line[key] for key in ("framework", "model", "date", "source")),
        line["split"] == "fit",
        hardware,
        layout,
        execution,
        pipeline,
        stages_of(described(line["model"]).blueprint, pipeline, layout.pp),
        float(line["tokens_per_second_per_gpu"]),
        float(line["memory_gb"]) if line["memory_gb"] else None,
    )
