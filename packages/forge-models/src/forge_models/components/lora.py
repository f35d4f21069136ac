"""Low-rank adapters of a frozen base model, chosen by the table `[model.lora]`, and their format. Does not import torch."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import sqrt
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt

from forge_core.component import FREE, IDENTITY, Component, Place
from forge_core.errors import did_you_mean
from forge_core.specs import Matrix
from forge_models.base_format import TUNED, Format, rows_refusal

ALL_LINEAR = "all-linear"
"""Target that means every linear layer, as in the peft library."""


def is_stacked(name: str) -> bool:
    """Whether the name of a matrix is that of a stack of experts."""
    return name.rpartition(".")[0].endswith(".experts")


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters (LoRA, Hu et al., 2021): y = x W^T + s (x A^T) B^T, where only A and B are trained.

    The base W comes from `model.from_hf` or `[start]`. It never changes, and has no gradient and no optimizer state. Checkpoints
    contain the adapter and a hash of the base.
    """

    key_class: ClassVar = IDENTITY

    rank: Annotated[int, Gt(0)] = 8
    """Number of rows of A, and of columns of B."""
    alpha: Annotated[float, Gt(0)] = 16.0
    """Scale of the adapter: s = alpha / rank."""
    targets: tuple[str, ...] = ("blocks.*",)
    """Patterns of the names of adapted matrices, such as "*.q_proj" or "blocks.3.mlp.*", in which `*` matches dots as well. Each
    must match a linear layer or a stack of experts (`blocks.0.mlp.experts.up_proj`) in a block. As in `target_modules` of the
    peft library, a name without `*` is also the end of a name ("q_proj"), and "all-linear" is every linear layer. A class of
    transformers has names of its own, such as "model.layers.3.mlp.up_proj", whose start `blocks.3.` replaces in a pattern."""
    rank_stabilized: bool = False
    """Whether s = alpha / sqrt(rank), which suits large ranks (rsLoRA, Kalajdzievski, 2023)."""
    dora: bool = False
    """Whether the length of each row of W + s B A is a trained vector, which starts as that of W (DoRA, Liu et al., 2024). Not
    for experts, and not with `parallel.tp`."""
    train: tuple[Literal["embedding", "head"], ...] = ()
    """Parts of the base that are trained whole, beside the adapters, such as for new tokens; a checkpoint has all of their
    weights. Not with tied embeddings."""
    base_format: Literal["full"] | Format = "full"
    """How the matrices of the blocks of the base are held: in `precision.state`, or quantized, with 8 bits per value and a scale
    per row, or 4.5 bits per value (QLoRA, Dettmers et al., 2023). They are quantized while they are read, and dequantized for
    each product; everything computes with the quantized base, the merged model included. `nf4` needs rows of a multiple of 64
    values."""
    from_adapter: Annotated[str | None, FREE, Place] = None
    """Adapter that the run starts from: a folder of the peft library, or a run or checkpoint of Forge with an adapter of the same
    base. Unset, A is random and B is zero, so that the model starts as its base."""

    def __post_init__(self) -> None:
        if not self.targets:
            raise ValueError('targets is empty, so nothing would be trained; name matrices, such as targets = ["*.q_proj"]')
        if len(set(self.train)) < len(self.train):
            raise ValueError(f"train names a part twice: {', '.join(self.train)}")

    @property
    def tuned(self) -> tuple[str, ...]:
        """Names of the parameters of a decoder that are trained whole."""
        return tuple(TUNED[part] for part in self.train)

    @property
    def scaling(self) -> float:
        """The factor s of the adapter's output."""
        return self.alpha / (sqrt(self.rank) if self.rank_stabilized else self.rank)

    def matched(self, names: Iterable[str], others: Mapping[str, str] = MappingProxyType({})) -> tuple[str, ...]:
        """Returns those of `names`, the matrices of a model, that have an adapter, in their order; `others` are further names of
        some of them.

        Raises:
            ValueError: a pattern matches nothing, or DoRA would be applied to experts.
        """
        known = list(names)
        for pattern in self.targets:
            if not any(_matches(pattern, name, others) for name in known):
                last = dict.fromkeys(name.rpartition(".")[2] for name in known)
                near = did_you_mean(pattern, [*(f"*.{name}" for name in last), *known])
                raise ValueError(
                    f"targets: {pattern!r} matches no matrix in the blocks of the model, whose matrices are "
                    f"{', '.join(f'*.{name}' for name in last)}" + (f"; {near}" if near else "")
                )
        found = tuple(name for name in known if any(_matches(pattern, name, others) for pattern in self.targets))
        if self.dora and (experts := [name for name in found if is_stacked(name)]):
            raise ValueError(f"dora does not support experts, such as {experts[0]}; narrow targets, or set dora = false")
        return found

    def check(self, names: Collection[str]) -> None:
        """Checks the patterns against the names of a model's matrices.

        Raises:
            ValueError: see `matched`.
        """
        self.matched(names)

    def check_format(self, matrices: Mapping[str, Matrix]) -> None:
        """Checks that all matrices of the base, by name, can be held in `base_format`.

        Raises:
            ValueError: rows cannot be divided into blocks.
        """
        for name, matrix in matrices.items():
            if why := rows_refusal(name, matrix.shape[1], self.base_format):
                raise ValueError(why)


def _matches(pattern: str, name: str, others: Mapping[str, str]) -> bool:
    if pattern == ALL_LINEAR:
        return not is_stacked(name)
    return any(fnmatchcase(one, pattern) or one.endswith(f".{pattern}") for one in (name, others.get(name, name)))


@dataclass(frozen=True, kw_only=True)
class PeftConfig(Component):
    """Adapters of the peft library: `adapter_config.json` and `adapter_model.safetensors`, without the base."""

    implementation: ClassVar[str] = "forge_models.hf.peft:PeftConverter"
    adapters_only: ClassVar[bool] = True

    base: str | None = None
    """Folder of the base in the Hugging Face format; by default the one that the adapter names."""
    family: str | None = None
    """`model_type` of the base; by default that of its folder."""
