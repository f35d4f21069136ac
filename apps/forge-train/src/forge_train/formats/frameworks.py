"""Weights in distributed checkpoints of KempnerForge and torchtitan, and in files of nanoGPT, under their names.

The tables say where each tensor of a Forge decoder is there. Sources: KempnerForge 5666d0d (June 2026, `kempnerforge/model` and
`checkpoint/manager.py`), torchtitan b5bcd76 (August 2026, `models/common` and the state-dict adapters of its models),
torchtitan's names of 2025, and nanoGPT 3adf61e (November 2025, `model.py` and `train.py`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any
from weakref import finalize

import torch

from forge_core.errors import ForgeError
from forge_core.protocols.weights import StoredTensor, WeightsInfo
from forge_train.formats.converters import NANOGPT_FILE
from forge_train.formats.plain import check_fit, model_of, open_tensors, stored_tensor
from forge_train.formats.unpickle import METADATA, unpickle

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")

_SHOWN = 20


@dataclass(frozen=True)
class ForeignTensor:
    """Where a tensor of Forge is in a checkpoint of another framework.

    Attributes:
        names: its name there, or one for each expert, whose tensors are stacked.
        stacked: True if there is a tensor for each expert.
        transposed: True if the last two dimensions are exchanged there.
        heads: number of heads whose rotated dimensions are adjacent pairs there; 0 if they are halves, as in Forge.
        part: (index, number) of equal parts of the first dimension there, of which the tensor is one.
    """

    names: tuple[str, ...]
    stacked: bool = False
    transposed: bool = False
    heads: int = 0
    part: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class Names:
    """The names of a framework.

    Attributes:
        framework: its name, for messages.
        roots: beginnings of the model's names in a checkpoint; `model.` is removed.
        outside: names outside of blocks -> names there.
        within: names within a block -> names within a layer there. Entries ending in a dot stand for all that begin with them.
        ignored: pattern of names that hold no weights.
        pairs: True if rotated dimensions are adjacent pairs, in models without norms of queries.
        zero: end of the names of Forge whose tensors mean something else there unless they are zero; "" if there are none.
        blocks: name of the list of layers there.
        fused: projections of Forge that are one tensor there, in their order in its first dimension.
        rotary: False if nothing is rotated there.
    """

    framework: str
    roots: tuple[str, ...]
    outside: Mapping[str, tuple[str, ...]]
    within: Mapping[str, tuple[str, ...]]
    ignored: re.Pattern[str]
    pairs: bool = False
    zero: str = ""
    blocks: str = "layers"
    fused: tuple[str, ...] = ()
    rotary: bool = True

    def of(self, name: str) -> tuple[str, ...]:
        """Returns the names that a tensor of Forge can have there; empty if the framework has no such tensor."""
        if not (found := _BLOCK.fullmatch(name)):
            return self.outside.get(name, ())
        number, rest = found.groups()
        for ours, theirs in self.within.items():
            if rest == ours or (ours.endswith(".") and rest.startswith(ours)):
                return tuple(f"{self.blocks}.{number}.{one}{rest.removeprefix(ours)}" for one in theirs)
        return ()


_SAME = ("attention_norm.", "mlp_norm.", "attention.q_proj.", "attention.k_proj.", "attention.v_proj.", "attention.o_proj.")
_NORMS = ("attention.q_norm.", "attention.k_norm.")
_MLP = ("gate_proj", "up_proj", "down_proj")

KEMPNERFORGE = Names(
    framework="KempnerForge",
    roots=("model.",),
    outside={
        "embed.weight": ("token_embedding.embedding.weight",),
        "head.weight": ("output_head.proj.weight",),
        "norm.weight": ("norm.weight",),
        "norm.bias": ("norm.bias",),
    },
    within={
        **{name: (name,) for name in (*_SAME, *_NORMS)},
        **{f"mlp.{name}.": (f"mlp.{name}.",) for name in _MLP},
        **{f"mlp.shared.{name}.": (f"mlp.shared_expert.{name}.",) for name in _MLP},
        **{
            f"mlp.experts.{name}": (f"mlp.experts.{{expert}}.{name}.weight", f"mlp.{name.removesuffix('_proj')}_w")
            for name in _MLP
        },
        "mlp.router.weight": ("mlp.router.gate.weight",),
        "mlp.router.bias": ("mlp.router.expert_bias",),
    },
    ignored=re.compile(r".*\.expert_ema"),
    zero=".router.bias",
)
_TITAN = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_WIDTHS = {"gate_proj": "EFD", "down_proj": "EDF", "up_proj": "EFD"}
TORCHTITAN = Names(
    framework="torchtitan",
    roots=("model.", "tok_embeddings.", "layers.", "norm.", "lm_head.", "output."),
    outside={
        "embed.weight": ("tok_embeddings.weight",),
        "head.weight": ("lm_head.weight", "output.weight"),
        "norm.weight": ("norm.weight",),
    },
    within={
        "attention_norm.": ("attention_norm.",),
        "mlp_norm.": ("ffn_norm.",),
        **{name: (name,) for name in _NORMS},
        **{f"attention.{one}_proj.": (f"attention.qkv_linear.w{one}.", f"attention.w{one}.") for one in "qkv"},
        "attention.o_proj.": ("attention.wo.",),
        **{f"mlp.{name}.": (f"feed_forward.{short}.",) for name, short in _TITAN.items()},
        **{f"mlp.shared.{name}.": (f"moe.shared_experts.{short}.",) for name, short in _TITAN.items()},
        **{
            f"mlp.experts.{name}": (f"moe.routed_experts.inner_experts.{short}_{_WIDTHS[name]}", f"moe.experts.{short}")
            for name, short in _TITAN.items()
        },
        "mlp.router.weight": ("moe.router.gate.weight",),
        "mlp.router.bias": ("moe.expert_bias_E", "moe.expert_bias"),
    },
    ignored=re.compile(r"freqs_cis|rope\.cache|.*\.tokens_per_expert(_E)?"),
    pairs=True,
)
NANOGPT = Names(
    framework="nanoGPT",
    roots=("model.",),
    outside={
        "embed.weight": ("transformer.wte.weight",),
        "positions.weight": ("transformer.wpe.weight",),
        "head.weight": ("lm_head.weight",),
        "norm.weight": ("transformer.ln_f.weight",),
        "norm.bias": ("transformer.ln_f.bias",),
    },
    within={
        "attention_norm.": ("ln_1.",),
        "mlp_norm.": ("ln_2.",),
        **{f"attention.{one}_proj.": ("attn.c_attn.",) for one in "qkv"},
        "attention.o_proj.": ("attn.c_proj.",),
        "mlp.up_proj.": ("mlp.c_fc.",),
        "mlp.down_proj.": ("mlp.c_proj.",),
    },
    ignored=re.compile(r".*\.attn\.bias"),  # the causal mask of torch without flash attention
    blocks="transformer.h",
    fused=("q_proj", "k_proj", "v_proj"),
    rotary=False,
)


class FrameworkWeights:
    """`Weights` under the names of another framework, memory-mapped from safetensors files.

    Args:
        names: names of the framework.
        folders: folders with the files, one for each pipeline stage.
        recipe: recipe with the `[model]` of the tensors.
        origin: name of the weights in messages.
        step: number of steps that trained them.
        others: number of tensors of the checkpoint that are not the model's.

    Raises:
        ForgeError: the model is not a decoder, or the tensors do not fit it, or mean something else there; one error lists them.
    """

    def __init__(self, names: Names, folders: Sequence[Path], recipe: str, origin: Path, step: int, others: int = 0) -> None:
        self._found: dict[str, tuple[Any, str]] = {}
        for folder in folders:
            self._found |= {_plain(name): place for name, place in open_tensors(folder)[0].items()}
        self.model = model_of(None, recipe, origin)
        if (shape := getattr(self.model, "shape", None)) is None or not hasattr(shape, "kv_heads"):
            raise ForgeError(f"only decoders can be read from {names.framework}, and the model of {recipe} is none")
        with torch.device("meta"):
            module: torch.nn.Module = self.model.build()  # type: ignore[attr-defined] (components of models have it)
        ties = dict(module.specs().ties)  # type: ignore[operator] (a decoder has it)
        wanted = [name for name, _ in module.named_parameters() if name not in ties]
        self._places = {
            name: place
            for name in (*wanted, *(name for name, _ in module.named_buffers()))
            if (place := self._place(names, name, shape)) is not None
        }
        if faults := [*self._faults(names, wanted), *self._changes_of_meaning(names, shape)]:
            shown = [*faults[:_SHOWN], *([f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else [])]
            told = f"the tensors in {origin}, under the names of {names.framework}, do not fit the model of {recipe}:"
            raise ForgeError("\n  ".join([told, *shown]))
        self.tensors: Mapping[str, StoredTensor] = {name: self._outline(place) for name, place in self._places.items()}
        check_fit(self.model, self.tensors, origin)
        notes = (f"{others} tensors that are not the model's, such as optimizer state, were left out",) if others else ()
        self.facts = WeightsInfo(step=step, origin=str(origin), notes=notes)

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Returns whole tensors."""
        return {name: self._tensor(self._places[name]) for name in names}

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> torch.Tensor:
        """Reads one tensor and returns its slice at `offset` with shape `extent`."""
        return self._tensor(self._places[name])[tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))]

    def _place(self, names: Names, name: str, shape: Any) -> ForeignTensor | None:
        """Returns the place of a tensor of Forge; None if it is not there."""
        turned = {"q_proj": shape.heads, "k_proj": shape.kv_heads} if self._pairs(names) else {}
        kind = name.split(".")[-2]
        heads = turned.get(kind, 0)
        part = (names.fused.index(kind), len(names.fused)) if kind in names.fused else (0, 1)
        for one in names.of(name):
            stacked = "{expert}" in one
            all_of_it = (one.format(expert=expert) for expert in count()) if stacked else (one,)
            if parts := tuple(takewhile(self._found.__contains__, all_of_it)):
                return ForeignTensor(parts, stacked, one.endswith("_w"), heads, part)
        return None

    def _pairs(self, names: Names) -> bool:
        """Returns whether rotated dimensions are adjacent pairs: in torchtitan those of Llama, and not those of Qwen."""
        return names.pairs and not any(".attention.q_norm." in name for name in self._found)

    def _faults(self, names: Names, wanted: Sequence[str]) -> Iterator[str]:
        """Yields tensors that are missing, and tensors that would be left over."""
        for name in wanted:
            if name not in self._places:
                yield f"{name}: missing ({' or '.join(names.of(name)) or f'{names.framework} has no such tensor'})"
        used = {one for place in self._places.values() for one in place.names}
        for name in sorted(self._found.keys() - used):
            tied = name in names.outside["head.weight"] and "head.weight" not in wanted and "embed.weight" in self._places
            if not names.ignored.fullmatch(name) and not (tied and self._equal(name, *self._places["embed.weight"].names)):
                yield f"{name}: not in the model"

    def _changes_of_meaning(self, names: Names, shape: Any) -> Iterator[str]:
        """Yields tensors that compute something else there, or whose orientation cannot be told."""
        if self._pairs(names) and shape.rope.partial != 1:
            yield f"rope.partial = {shape.rope.partial}: {names.framework} rotates whole heads; set it to 1"
        if shape.moe is not None and getattr(shape.moe.router, "bias", False):
            yield (
                f"model.moe.router.bias = true: {names.framework} has no learned biases of routers, and its expert biases affect "
                "only the choice; remove the key"
            )
        if not names.rotary and any(shape.attention.rotates_at(layer) for layer in range(shape.layers)):
            yield f"model.attention.nope_every is not 1: {names.framework} rotates nothing; set it to 1"
        for name, place in self._places.items():
            if names.zero and name.endswith(names.zero) and self._tensor(place).count_nonzero():
                yield (
                    f"{place.names[0]}: in {names.framework} this bias also changes the weights of the chosen experts; in Forge "
                    "it affects only the choice"
                )
            if ".moe.experts." in place.names[0] and (square := self._outline(place).shape)[-1] == square[-2]:
                yield f"{place.names[0]}: square, so nothing tells whether this release of {names.framework} transposed it"

    def _equal(self, one: str, other: str) -> bool:
        return torch.equal(*(handle.get_tensor(stored) for handle, stored in (self._found[one], self._found[other])))

    def _outline(self, place: ForeignTensor) -> StoredTensor:
        stored = stored_tensor(*self._found[place.names[0]])
        extent = (len(place.names), *stored.shape) if place.stacked else stored.shape
        extent = (extent[0] // place.part[1], *extent[1:])
        return replace(stored, shape=(*extent[:-2], extent[-1], extent[-2]) if place.transposed else extent)

    def _tensor(self, place: ForeignTensor) -> torch.Tensor:
        parts = [handle.get_tensor(stored) for handle, stored in map(self._found.__getitem__, place.names)]
        whole = torch.stack(parts) if place.stacked else parts[0]
        if place.transposed:
            whole = whole.transpose(-1, -2).contiguous()
        if place.part[1] > 1:
            whole = whole.chunk(place.part[1])[place.part[0]]
        if place.heads:  # (heads, pairs, 2) -> (heads, 2, pairs)
            whole = whole.unflatten(0, (place.heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return whole


FRAMEWORKS: Mapping[str, Names] = {"kempnerforge": KEMPNERFORGE, "torchtitan": TORCHTITAN}
"""Frameworks with distributed checkpoints, by their names in the option `--names`."""


def read_framework(names: Names, path: Path, recipe: str | None, unsafe: bool) -> FrameworkWeights:
    """Opens a checkpoint: a folder with the files of one, or with one folder for each pipeline stage (`pp0`, `pp1`, ...).

    Args:
        names: names of the framework.
        path: the folder of one step.
        recipe: recipe with the `[model]` of the tensors.
        unsafe: also unpickle objects that are not tensors.

    Raises:
        ForgeError: there is no recipe or no checkpoint, it contains more than tensors, or it does not fit the model.
    """
    stages = [path] if (path / METADATA).is_file() else sorted(file.parent for file in path.glob(f"pp*/{METADATA}"))
    if not stages:
        raise ForgeError(f"{path} is no checkpoint of {names.framework}: it has no {METADATA}; pass the folder of one step")
    return _read(names, "dcp", stages, path, recipe, unsafe)


def read_nanogpt(path: Path, recipe: str | None, unsafe: bool) -> FrameworkWeights:
    """Opens a file of nanoGPT, or the `ckpt.pt` of a folder; see `read_framework`.

    Raises:
        ForgeError: there is no recipe or no file, it contains more than tensors and plain values, or it does not fit the model.
    """
    file = path / NANOGPT_FILE if path.is_dir() else path
    if not file.is_file():
        raise ForgeError(f"{file} does not exist; pass the file of nanoGPT, or the out_dir with its {NANOGPT_FILE}")
    return _read(NANOGPT, "torch", [file], file, recipe, unsafe)


def _read(names: Names, kind: str, stages: Sequence[Path], path: Path, recipe: str | None, unsafe: bool) -> FrameworkWeights:
    if recipe is None:
        raise ForgeError(
            f"{path}: a checkpoint of {names.framework} does not describe its model; write a recipe with forge-train migrate, "
            "and pass it as --recipe"
        )
    folder = Path(mkdtemp(prefix="forge-unpickled-"))
    try:
        folders = [folder / str(number) for number in range(len(stages))]
        others = sum(unpickle(kind, stage, part, unsafe, *names.roots) for stage, part in zip(stages, folders, strict=True))
        weights = FrameworkWeights(names, folders, recipe, path, _step_of(path), others)
    except BaseException:
        rmtree(folder, ignore_errors=True)
        raise
    finalize(weights, rmtree, folder, ignore_errors=True)
    return weights


def _step_of(path: Path) -> int:
    """Returns the step in a folder's name, such as `step_1000` or `step-1000`; 0 if there is none."""
    found = re.fullmatch(r"step[-_](\d+)", path.name)
    return int(found[1]) if found else 0


def _plain(name: str) -> str:
    """Returns a name without the model's place in the checkpoint, and without what `torch.compile` puts before it."""
    return name.removeprefix("model.").removeprefix("_orig_mod.")
