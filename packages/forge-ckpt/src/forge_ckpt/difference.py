"""How two checkpoints differ: names, forms, values, and the facts that were kept with them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forge_ckpt.checkpoint.read import StoredTensors, boxes

PORTION = 1 << 20
"""Elements of a tensor that are compared at a time."""


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that both have in the same form.

    Attributes:
        elements: of the tensor.
        differing: elements whose bits differ.
        absolute: largest |a - b|.
        relative: largest |a - b| / max(|a|, |b|).
        not_finite: differing elements that are infinite or no number on a side; the two largest leave them out.
    """

    name: str
    elements: int
    differing: int
    absolute: float
    relative: float
    not_finite: int

    @property
    def share(self) -> float:
        """Of the elements, those that differ."""
        return self.differing / self.elements if self.elements else 0.0


@dataclass(frozen=True)
class CheckpointDifference:
    """What differs between checkpoints a and b.

    Attributes:
        only_a, only_b: tensors that one of them has.
        forms: tensors with another shape or dtype: (name, a's, b's).
        values: tensors of the same form with other values.
        equal: number of tensors whose bits are all the same.
        facts: key -> (a's value, b's value) of `meta`, such as `config.optimizer.lr`; `ABSENT` where one has none.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    forms: tuple[tuple[str, str, str], ...]
    values: tuple[TensorDifference, ...]
    equal: int
    facts: Mapping[str, tuple[Any, Any]]

    @property
    def none(self) -> bool:
        """Whether both are the same."""
        return not (self.only_a or self.only_b or self.forms or self.values or self.facts)


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


def difference(a: StoredTensors, b: StoredTensors) -> CheckpointDifference:
    """Compares two checkpoints; of the tensors it holds a few MiB at a time."""
    both = [name for name in a.tensors if name in b.tensors]
    forms, values, equal = [], [], 0
    for name in both:
        one, other = a.tensors[name], b.tensors[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            forms.append((name, f"{one.dtype} {list(one.shape)}", f"{other.dtype} {list(other.shape)}"))
            continue
        found = _compared(name, a, b)
        if found.differing:
            values.append(found)
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
    """The bytes of each element, a row each: -0 is not 0, and a NaN is itself."""
    return flat.contiguous().view(torch.uint8).view(len(flat), flat.element_size())


def _wide(flat: torch.Tensor) -> torch.Tensor:
    return flat.to(torch.complex128 if flat.is_complex() else torch.float64)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with dots between, down to plain values; an empty table or list is one."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for position, item in enumerate(value):
            yield from _flat(item, f"{path}.{position}" if path else str(position))
    elif path:
        yield path, value


def _same(a: Any, b: Any) -> bool:
    """1, 1.0 and true are three values."""
    return type(a) is type(b) and a == b
