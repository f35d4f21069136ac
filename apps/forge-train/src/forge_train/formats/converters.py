"""Components of the formats of weights that Forge reads and writes: its own, and tensors under the model's names."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt

from forge_core.component import Component


@dataclass(frozen=True, kw_only=True)
class Forge(Component):
    """Forge's checkpoints: a run's directory, a directory of checkpoints, or one checkpoint, of any layout."""

    implementation: ClassVar[str] = "forge_train.formats.forge:ForgeConverter"

    weights: str = "model"
    """Weights to read: `model`, or a set that a hook saved, such as their average `ema`."""


@dataclass(frozen=True, kw_only=True)
class Safetensors(Component):
    """Safetensors with the names of the model's tensors: `model.safetensors`, or shards and their index."""

    implementation: ClassVar[str] = "forge_train.formats.plain:PlainConverter"

    max_shard_bytes: Annotated[int, Gt(0)] = 5_000_000_000
    """Maximum size of one file in bytes; also the memory that a conversion needs."""
    recipe: str | None = None
    """TOML file or preset whose `[model]` the tensors are of, for files that Forge did not write."""
    prefix: str = ""
    """What stands before every name in the files, such as `model.`; tensors without it are left out."""


@dataclass(frozen=True, kw_only=True)
class Dcp(Component):
    """Checkpoints of `torch.distributed.checkpoint`, with the names of the model's tensors at the top level."""

    implementation: ClassVar[str] = "forge_train.formats.torch_files:DcpConverter"

    recipe: str | None = None
    """TOML file or preset whose `[model]` the tensors are of, for files that Forge did not write."""
    prefix: str = ""
    """What stands before every name in the files, such as `model.`; tensors without it are left out."""
    names: Literal["forge", "kempnerforge", "torchtitan"] = "forge"
    """Whose names, layouts and folders the checkpoint has; those of other frameworks can only be read."""
    unsafe_pickle: bool = False
    """Also unpickle objects that are not tensors, in a separate process. This can run any code of the author as this user."""


@dataclass(frozen=True, kw_only=True)
class Torch(Component):
    """Files of `torch.save` with a dict of tensors; the names of nested dicts are joined with dots."""

    implementation: ClassVar[str] = "forge_train.formats.torch_files:TorchConverter"

    recipe: str | None = None
    """TOML file or preset whose `[model]` the tensors are of, for files that Forge did not write."""
    prefix: str = ""
    """What stands before every name in the files, such as `model.`; tensors without it are left out."""
    unsafe_pickle: bool = False
    """Also unpickle objects that are not tensors, in a separate process. This can run any code of the author as this user."""
