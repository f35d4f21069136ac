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
    Group("forge.mlps", "[model] mlp", ("context",), "torch.nn.Module", "A block's feed-forward layer"),
    Group("forge.norms", "[model] norm", ("dim",), "torch.nn.Module", "A normalization over the last dimension"),
    Group("forge.routers", "[model.moe] router", ("context",), "torch.nn.Module", "Chooses experts per token"),
    Group("forge.fusions", "[model] fusion", ("context",), "block factory", "How images enter a decoder"),
    Group("forge.encoders", "[model] encoder", (), "torch.nn.Module", "Images to features"),
    Group("forge.adapters", "[model] adapter", ("context",), "torch.nn.Module", "Encoder features to model width"),
    Group("forge.transforms", "[transforms.NAME]", (), "forge_core.protocols.Transform", "One strategy applied to the model"),
    Group("forge.pipeline_schedules", "[parallel.pipeline]", (), "schedule factory", "Order of pipeline work"),
    Group("forge.optimizers", "[optimizer]", ("model",), "forge_core.protocols.Optimizer", "Updates parameters"),
    Group("forge.schedules", "[schedule]", ("steps",), "function of the step", "Factor on the learning rate"),
    Group("forge.objectives", "[objective]", (), "forge_core.protocols.Objective", "What is minimized"),
    Group("forge.sources", "[[data.sources]]", ("context",), "forge_core.protocols.Source", "Where documents come from"),
    Group("forge.tokenizers", "[data.tokenizer]", ("context",), "forge_core.protocols.Tokenizer", "Text to token ids"),
    Group("forge.hooks", "[[hooks]]", (), "forge_core.protocols.Hook", "Something that happens around a step"),
    Group("forge.trackers", "[[trackers]]", ("run",), "forge_core.protocols.Tracker", "Where numbers are written"),
    Group("forge.stores", "[checkpoint.store]", ("path",), "forge_core.protocols.Store", "Where checkpoint files live"),
    Group("forge.converters", "--from / --to", (), "forge_core.protocols.Converter", "A format of weights"),
    Group("forge.hf_models", "--family / config.json", (), "forge_core.protocols.HfModel", "A model in the Hugging Face format"),
    Group("forge.presets", "base", None, "path of a TOML file", "A recipe shipped with a distribution"),
    Group("forge.commands", "forge-train NAME", None, "typer application or function", "A subcommand"),
    Group("forge.proofs", "always", None, "path of a folder", "Receipts of `forge-train parity --record`"),
    Group("forge.conformance", "plugins doctor", None, "module of check_* functions", "Checks of the parts of a group"),
    Group("forge.checks", "always", None, "function (job, layout) -> faults", "A rule across sections"),
)

GROUPS = MappingProxyType({group.name: group for group in _TABLE})
"""Every group by name. Groups with `build=None` hold plain objects: preset files, commands and check functions."""

HOMES: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {
        "forge-ckpt": ("forge.stores",),
        "forge-data": ("forge.sources", "forge.tokenizers"),
        "forge-models": (
            *("forge.models", "forge.attentions", "forge.mlps", "forge.norms", "forge.routers", "forge.objectives"),
            "forge.converters",
        ),
        "forge-parallel": ("forge.transforms", "forge.pipeline_schedules", "forge.optimizers"),
        "forge-vlm": (
            *("forge.models", "forge.fusions", "forge.encoders", "forge.adapters", "forge.hooks", "forge.sources"),
            *("forge.hf_models", "forge.presets"),
        ),
        "forge-train": (
            *("forge.schedules", "forge.hooks", "forge.trackers", "forge.converters", "forge.presets", "forge.commands"),
        ),
    }
)
"""Groups in which each distribution of Forge offers something, so that an unknown name can say what to install."""
