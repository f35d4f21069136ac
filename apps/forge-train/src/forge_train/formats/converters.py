"""Formats of weights that Forge reads and writes: its own, and plain tensors under the names of the model."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Gt

from forge_core.component import Component


@dataclass(frozen=True, kw_only=True)
class Forge(Component):
    """Forge's checkpoints: a run's directory, a directory of checkpoints, or one checkpoint, of any layout."""

    implementation: ClassVar[str] = "forge_train.formats.forge:ForgeConverter"

    weights: str = "model"
    """Which weights are read: `model`, or what a hook kept next to them, such as `ema`, their average."""


@dataclass(frozen=True, kw_only=True)
class Safetensors(Component):
    """Plain safetensors: `model.safetensors`, or shards and their index, with the names of the model's tensors."""

    implementation: ClassVar[str] = "forge_train.formats.plain:PlainConverter"

    max_shard_bytes: Annotated[int, Gt(0)] = 5_000_000_000
    """Largest file of tensors; also what a conversion holds in memory."""
    recipe: str | None = None
    """TOML file or preset whose `[model]` the tensors are of, for files that Forge did not write."""
    prefix: str = ""
    """What stands before every name in the files, such as `model.`; tensors without it are left out."""


@dataclass(frozen=True, kw_only=True)
class Dcp(Component):
    """Checkpoints of `torch.distributed.checkpoint`, with the names of the model's tensors at the top."""

    implementation: ClassVar[str] = "forge_train.formats.torch_files:DcpConverter"

    recipe: str | None = None
    """TOML file or preset whose `[model]` the tensors are of, for files that Forge did not write."""
    prefix: str = ""
    """What stands before every name in the files, such as `model.`; tensors without it are left out."""
    unsafe_pickle: bool = False
    """Unpickle a checkpoint that Forge did not write, in a separate process. That can run any code of its author as this user."""


@dataclass(frozen=True, kw_only=True)
class Torch(Component):
    """Files of `torch.save` with a table of tensors; tables in it have names with dots between."""

    implementation: ClassVar[str] = "forge_train.formats.torch_files:TorchConverter"

    recipe: str | None = None
    """TOML file or preset whose `[model]` the tensors are of, for files that Forge did not write."""
    prefix: str = ""
    """What stands before every name in the files, such as `model.`; tensors without it are left out."""
    unsafe_pickle: bool = False
    """Unpickle a file that Forge did not write, in a separate process. That can run any code of its author as this user."""
