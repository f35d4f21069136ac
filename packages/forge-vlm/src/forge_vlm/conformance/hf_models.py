"""Checks of every model in the Hugging Face format: it stores all tensors exactly, and it refuses other models with a message."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TOLERANCE = 1e-4
"""Largest difference from the reference library's fp32 logits, relative to the largest logit; `convert` uses the same limit."""


def check_holds(component: Any) -> None:
    """A model that is written and read back has the same tensors, bit for bit, and the same logits."""
    import torch

    for place, weights in _written(component):
        back = component.build().read(place)
        wanted, found = weights.read(list(weights.tensors)), back.read(list(back.tensors))
        assert found.keys() == wanted.keys(), f"tensors {sorted(found.keys() ^ wanted.keys())} are missing on one side"
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), f"{name} differs from the written tensor"
        assert torch.equal(_logits(back), _logits(weights)), "the model that was read back has other logits"


def check_reference(component: Any) -> None:
    """The logits equal those of the reference library."""
    from forge_models.hf.streamed_forward import fixed_rows

    for place, weights in _written(component):
        found = component.build().reference(place, *fixed_rows(weights.model))
        if not isinstance(found, str):
            error = float((found - _logits(weights)).abs().max() / found.abs().max().clamp(min=1e-30))
            assert error <= TOLERANCE, f"the reference differs by {error:.1e} of the largest logit"


def check_refuses(component: Any) -> None:
    """`misfits` reports a text decoder."""
    from forge_models.conformance import weights

    assert component.build().misfits(weights.small()), "misfits accepts a text decoder"


def check_foreign(component: Any) -> None:
    """Reading a missing folder, an empty folder or an unknown model raises a ForgeError."""
    from forge_core.errors import ForgeError

    with TemporaryDirectory(prefix="forge-hf-") as folder:
        other = Path(folder) / "other"
        other.mkdir()
        (other / "config.json").write_text("{}")
        for path in (Path(folder) / "missing", Path(folder), other):
            try:
                component.build().read(path)
            except ForgeError:
                continue
            raise AssertionError(f"reads {path.name!r}, which contains no model, without an error")


def _written(component: Any) -> Iterator[tuple[Path, Any]]:
    """Yields (folder, weights) of every example after writing it."""
    from forge_models.conformance.weights import InMemory

    with TemporaryDirectory(prefix="forge-hf-") as folder:
        for number, model in enumerate(component.build().examples(Path(folder))):
            weights: Any = InMemory(model)
            refused = component.build().misfits(weights)
            assert not refused, f"misfits rejects its own example: {'; '.join(refused)}"
            place = Path(folder) / f"out{number}"
            component.build().write(place, weights, tokenizer=None, max_shard_bytes=10_000)
            yield place, weights


def _logits(weights: Any) -> Any:
    from forge_models.hf.streamed_forward import fixed_rows, logits_of

    tokens, extras = fixed_rows(weights.model)
    return logits_of(weights, tokens, extras=extras)
