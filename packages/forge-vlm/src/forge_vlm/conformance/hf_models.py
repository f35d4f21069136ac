"""What every kind of model in the Hugging Face format has to do: hold what it says it holds, and refuse the rest by name."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TOLERANCE = 1e-4
"""Largest difference from another library's fp32 logits, in units of the largest logit, as `convert` allows it."""


def check_holds(component: Any) -> None:
    """A model that is written and read back is the same: every tensor bit for bit, and the logits."""
    import torch

    for place, weights in _written(component):
        back = component.build().read(place)
        wanted, found = weights.read(list(weights.tensors)), back.read(list(back.tensors))
        assert found.keys() == wanted.keys(), f"tensors {sorted(found.keys() ^ wanted.keys())} are on one side only"
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), f"{name} is not what was written"
        assert torch.equal(_logits(back), _logits(weights)), "the model that is read back computes something else"


def check_reference(component: Any) -> None:
    """The other library's logits are ours."""
    from forge_models.hf.streamed_forward import fixed_rows

    for place, weights in _written(component):
        found = component.build().reference(place, *fixed_rows(weights.model))
        if not isinstance(found, str):
            error = float((found - _logits(weights)).abs().max() / found.abs().max().clamp(min=1e-30))
            assert error <= TOLERANCE, f"the reference differs by {error:.1e} of the largest logit"


def check_refuses(component: Any) -> None:
    """A decoder of text is not one of these models, and a message says so."""
    from forge_models.conformance import weights

    assert component.build().misfits(weights.small()), "takes a decoder of text for one of its models"


def check_foreign(component: Any) -> None:
    """A place where there is nothing, an empty folder and other people's files are refused by a ForgeError."""
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
            raise AssertionError(f"reads {path.name!r}, where no model is, without an error")


def _written(component: Any) -> Iterator[tuple[Path, Any]]:
    """(folder, weights) of every example, written."""
    from forge_models.conformance.weights import InMemory

    with TemporaryDirectory(prefix="forge-hf-") as folder:
        for number, model in enumerate(component.build().examples(Path(folder))):
            weights: Any = InMemory(model)
            refused = component.build().misfits(weights)
            assert not refused, f"misfits refuses its example: {'; '.join(refused)}"
            place = Path(folder) / f"out{number}"
            component.build().write(place, weights, tokenizer=None, max_shard_bytes=10_000)
            yield place, weights


def _logits(weights: Any) -> Any:
    from forge_models.hf.streamed_forward import fixed_rows, logits_of

    tokens, extras = fixed_rows(weights.model)
    return logits_of(weights, tokens, extras=extras)
