"""Compares two checkpoints: names, shapes, dtypes, values, and metadata."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forge_ckpt.checkpoint.read import StoredTensors, boxes

PORTION = 1 << 20
"""Number of elements of a tensor that are compared at a time."""


@dataclass(frozen=True)
class TensorDifference:
    """Difference of one tensor that has the same shape and dtype in both checkpoints.

    Attributes:
        elements: number of elements of the tensor.
        differing: number of elements whose bits differ.
        absolute: largest |a - b| of finite elements.
        relative: largest |a - b| / max(|a|, |b|) of finite elements.
        not_finite: number of differing elements that are infinite or NaN in a or b.
    """

    name: str
    elements: int
    differing: int
    absolute: float
    relative: float
    not_finite: int

    @property
    def share(self) -> float:
        """Fraction of the elements that differ."""
        return self.differing / self.elements if self.elements else 0.0


@dataclass(frozen=True)
class CheckpointDifference:
    """All differences between checkpoints a and b.

    Attributes:
        only_a, only_b: tensors that exist only in a, or only in b.
        forms: tensors with different shapes or dtypes: (name, form in a, form in b).
        values: tensors with equal shapes and dtypes, but different values.
        equal: number of tensors with equal bits.
        facts: key -> (value in a, value in b) of `meta`, such as `config.optimizer.lr`; `ABSENT` if a key is missing.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    forms: tuple[tuple[str, str, str], ...]
    values: tuple[TensorDifference, ...]
    equal: int
    facts: Mapping[str, tuple[Any, Any]]

    @property
    def none(self) -> bool:
        """Whether there is no difference."""
        return not (self.only_a or self.only_b or self.forms or self.values or self.facts)


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


def difference(a: StoredTensors, b: StoredTensors) -> CheckpointDifference:
    """Compares two checkpoints, with only a few MiB of tensors in memory at a time."""
    both = [name for name in a.tensors if name in b.tensors]
    forms, values, equal = [], [], 0
    for name in both:
        one, other = a.tensors[name], b.tensors[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            forms.append((name, f"{one.dtype} {list(one.shape)}", f"{other.dtype} {list(other.shape)}"))
            continue
        tensor = _compared(name, a, b)
        if tensor.differing:
            values.append(tensor)
        else:
            equal += 1
    facts_a, facts_b = dict(_flat(a.manifest.meta)), dict(_flat(b.manifest.meta))
    pairs = {key: (facts_a.get(key, ABSENT), facts_b.get(key, ABSENT)) for key in {**facts_a, **facts_b}}
    return CheckpointDifference(
        only_a=tuple(name for name in a.tensors if name not in b.tensors),
        only_b=tuple(name for name in b.tensors if name not in a.tensors),
        forms=tuple(forms),
        values=tuple(values),
        equal=equal,
        facts={key: pair for key, pair in pairs.items() if not _same(*pair)},
    )


def _compared(name: str, a: StoredTensors, b: StoredTensors) -> TensorDifference:
    info = a.tensors[name]
    elements, differing, not_finite, absolute, relative = 0, 0, 0, 0.0, 0.0
    for offset, extent in boxes(info.shape, PORTION):
        one, other = a.box(name, offset, extent).reshape(-1), b.box(name, offset, extent).reshape(-1)
        elements += one.numel()
        unlike = (_bits(one) != _bits(other)).any(1)
        count = int(unlike.sum())
        if not count:
            continue
        differing += count
        left, right = _wide(one[unlike]), _wide(other[unlike])
        distance, size = (left - right).abs(), torch.maximum(left.abs(), right.abs())
        finite = torch.isfinite(size)
        not_finite += count - int(finite.sum())
        distance, size = distance[finite], size[finite]
        if len(distance):
            absolute = max(absolute, float(distance.max()))
            relative = max(relative, float((distance / size.clamp(min=torch.finfo(torch.float64).tiny)).max()))
    return TensorDifference(name, elements, differing, absolute, relative, not_finite)


def _bits(flat: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of each element as a row, so that -0 differs from 0, and a NaN equals itself."""
    return flat.contiguous().view(torch.uint8).view(len(flat), flat.element_size())


def _wide(flat: torch.Tensor) -> torch.Tensor:
    return flat.to(torch.complex128 if flat.is_complex() else torch.float64)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of all plain values; an empty table or list counts as a value."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for position, item in enumerate(value):
            yield from _flat(item, f"{path}.{position}" if path else str(position))
    elif path:
        yield path, value


def _same(a: Any, b: Any) -> bool:
    """Whether two values and their types are equal: 1, 1.0 and true differ."""
    return type(a) is type(b) and a == b
