"""The group table: what can be chosen by name, and the signature that `build` must have.

A group is one entry-point group. `build` lists the positional parameters that Forge passes to a component's `build`;
the registry compares them with the real signature when the component is loaded, so a plugin written for another
signature is refused before anything runs.
"""

from types import MappingProxyType
from typing import NamedTuple


class Group(NamedTuple):
    """One kind of plugin: how it is chosen in a recipe, what `build` is given and what it returns."""

    name: str
    chosen_by: str
    build: tuple[str, ...] | None
    returns: str
    doc: str

    @property
    def kind(self) -> str:
        """Singular noun for messages: `forge.optimizers` -> `optimizer`."""
        return self.name.removeprefix("forge.").replace("_", " ").removesuffix("s")


_TABLE = (
    Group("forge.models", "[model]", (), "torch.nn.Module that answers specs()", "A whole model, built on the meta device"),
    Group("forge.attentions", "[model] attention", ("context",), "torch.nn.Module", "A block's attention"),
    Group("forge.mlps", "[model] mlp", ("context",), "torch.nn.Module", "A block's feed-forward part"),
    Group("forge.norms", "[model] norm", ("dim",), "torch.nn.Module", "A normalisation over the last dimension"),
    Group("forge.routers", "[model.moe] router", ("context",), "torch.nn.Module", "Chooses experts per token"),
    Group("forge.fusions", "[model] fusion", ("context",), "block factory", "How images enter a decoder"),
    Group("forge.encoders", "[model] encoder", (), "torch.nn.Module", "Images to features"),
    Group("forge.adapters", "[model] adapter", ("context",), "torch.nn.Module", "Encoder features to model width"),
    Group("forge.transforms", "[transforms.NAME]", (), "forge_core.protocols.Transform", "One strategy applied to the model"),
    Group("forge.pipeline_schedules", "[parallel.pipeline]", (), "schedule factory", "Order of pipeline work"),
    Group("forge.optimizers", "[optimizer]", ("model",), "forge_core.protocols.Optimizer", "Updates parameters"),
    Group("forge.schedules", "[schedule]", ("steps",), "function of the step", "Factor on the learning rate"),
    Group("forge.objectives", "[objective]", (), "forge_core.protocols.Objective", "What is minimised"),
    Group("forge.sources", "[[data.sources]]", ("context",), "forge_core.protocols.Source", "Where documents come from"),
    Group("forge.tokenizers", "[data.tokenizer]", ("context",), "forge_core.protocols.Tokenizer", "Text to token ids"),
    Group("forge.hooks", "[[hooks]]", (), "forge_core.protocols.Hook", "Something that happens around a step"),
    Group("forge.trackers", "[[trackers]]", ("run",), "forge_core.protocols.Tracker", "Where numbers are written"),
    Group("forge.stores", "[checkpoint.store]", ("path",), "forge_core.protocols.Store", "Where checkpoint files live"),
    Group("forge.converters", "--from / --to", (), "forge_core.protocols.Converter", "A format of weights"),
    Group("forge.presets", "base", None, "path of a TOML file", "A recipe shipped with a distribution"),
    Group("forge.commands", "forge-train NAME", None, "typer application or function", "A subcommand"),
    Group("forge.checks", "always", None, "function (job, layout) -> faults", "A rule across sections"),
)

GROUPS = MappingProxyType({group.name: group for group in _TABLE})
"""Every group by name. Groups with `build=None` hold plain objects: preset files, commands and check functions."""

KNOWN_ELSEWHERE: MappingProxyType[tuple[str, str], str] = MappingProxyType(
    {
        ("forge.attentions", "gqa"): "forge-models",
        ("forge.attentions", "mla"): "forge-models",
        ("forge.commands", "convert"): "forge-train",
        ("forge.converters", "forge"): "forge-train",
        ("forge.converters", "hf"): "forge-models",
        ("forge.hooks", "evaluate"): "forge-train",
        ("forge.hooks", "log"): "forge-train",
        ("forge.hooks", "progress"): "forge-train",
        ("forge.hooks", "replicas"): "forge-train",
        ("forge.hooks", "routing"): "forge-train",
        ("forge.hooks", "sample"): "forge-train",
        ("forge.hooks", "save"): "forge-train",
        ("forge.mlps", "geglu"): "forge-models",
        ("forge.mlps", "gelu"): "forge-models",
        ("forge.mlps", "relu"): "forge-models",
        ("forge.mlps", "relu2"): "forge-models",
        ("forge.mlps", "swiglu"): "forge-models",
        ("forge.models", "decoder"): "forge-models",
        ("forge.norms", "layernorm"): "forge-models",
        ("forge.norms", "rmsnorm"): "forge-models",
        ("forge.objectives", "cross_entropy"): "forge-models",
        ("forge.optimizers", "adamw"): "forge-parallel",
        ("forge.pipeline_schedules", "1f1b"): "forge-parallel",
        ("forge.pipeline_schedules", "dualpipev"): "forge-parallel",
        ("forge.pipeline_schedules", "gpipe"): "forge-parallel",
        ("forge.pipeline_schedules", "interleaved"): "forge-parallel",
        ("forge.pipeline_schedules", "interleaved_zero_bubble"): "forge-parallel",
        ("forge.pipeline_schedules", "zbv"): "forge-parallel",
        ("forge.presets", "125m"): "forge-train",
        ("forge.presets", "13b"): "forge-train",
        ("forge.presets", "1b"): "forge-train",
        ("forge.presets", "20m"): "forge-train",
        ("forge.presets", "30b"): "forge-train",
        ("forge.presets", "350m"): "forge-train",
        ("forge.presets", "70b"): "forge-train",
        ("forge.presets", "7b"): "forge-train",
        ("forge.presets", "8x7b"): "forge-train",
        ("forge.presets", "debug"): "forge-train",
        ("forge.presets", "debug-moe"): "forge-train",
        ("forge.presets", "demo"): "forge-train",
        ("forge.routers", "hash"): "forge-models",
        ("forge.routers", "sigmoid_topk"): "forge-models",
        ("forge.routers", "softmax_topk"): "forge-models",
        ("forge.schedules", "constant"): "forge-train",
        ("forge.schedules", "cosine"): "forge-train",
        ("forge.schedules", "linear"): "forge-train",
        ("forge.schedules", "multi_step"): "forge-train",
        ("forge.schedules", "wsd"): "forge-train",
        ("forge.sources", "arrow"): "forge-data",
        ("forge.sources", "datatrove"): "forge-data",
        ("forge.sources", "huggingface"): "forge-data",
        ("forge.sources", "jsonl"): "forge-data",
        ("forge.sources", "llmc"): "forge-data",
        ("forge.sources", "megatron"): "forge-data",
        ("forge.sources", "parquet"): "forge-data",
        ("forge.sources", "random"): "forge-data",
        ("forge.sources", "stdlib"): "forge-data",
        ("forge.sources", "store"): "forge-data",
        ("forge.sources", "text"): "forge-data",
        ("forge.sources", "tokens"): "forge-data",
        ("forge.stores", "local"): "forge-ckpt",
        ("forge.tokenizers", "bpe"): "forge-data",
        ("forge.tokenizers", "bytes"): "forge-data",
        ("forge.tokenizers", "sentencepiece"): "forge-data",
        ("forge.tokenizers", "tiktoken"): "forge-data",
        ("forge.trackers", "jsonl"): "forge-train",
        ("forge.trackers", "tensorboard"): "forge-train",
        ("forge.trackers", "wandb"): "forge-train",
        ("forge.transforms", "compile"): "forge-parallel",
        ("forge.transforms", "context"): "forge-parallel",
        ("forge.transforms", "expert"): "forge-parallel",
        ("forge.transforms", "float8"): "forge-parallel",
        ("forge.transforms", "recompute"): "forge-parallel",
        ("forge.transforms", "shard"): "forge-parallel",
        ("forge.transforms", "tensor"): "forge-parallel",
    }
)
"""Names that a sibling distribution offers, so that an unknown name can say what to install."""
