"""Checks of formats of weights: converters, and models of Hugging Face folders."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from forge_testing import modules


def _takes_models(component: Any) -> bool:
    """Whether a format is for whole models. One that is for adapters (`adapters_only`) has to refuse models without."""
    from forge_core.errors import ForgeError

    if not getattr(component, "adapters_only", False):
        return True
    with TemporaryDirectory(prefix="forge-converter-") as folder:
        try:
            component.build().write(Path(folder) / "out", modules.small())
        except ForgeError:
            assert not any(Path(folder).iterdir()), "refuses a model without an adapter, but leaves files"
            return False
    raise AssertionError("is for adapters only, but writes a model without one; raise a ForgeError")


class ConverterChecks:
    """Checks of converters: they read back what they wrote, refuse other formats, and leave no partial model."""

    @staticmethod
    def check_round_trip(component: Any) -> None:
        """Checks that a model that is written and read back has bitwise equal tensors and logits."""
        if not _takes_models(component):
            return
        with TemporaryDirectory(prefix="forge-converter-") as folder:
            given = modules.small()
            component.build().write(Path(folder) / "out", given)
            back = component.build().read(Path(folder) / "out")
            assert back.tensors.keys() == given.tensors.keys(), (
                f"tensors {sorted(back.tensors.keys() ^ given.tensors.keys())} are on one side only"
            )
            found, wanted = back.read(list(given.tensors)), given.read(list(given.tensors))
            for name, tensor in wanted.items():
                stored = back.tensors[name]
                assert stored.shape == tuple(tensor.shape) == tuple(found[name].shape), f"{name} has another shape"
                assert stored.dtype == str(found[name].dtype).removeprefix("torch."), f"{name} is not of the dtype that is said"
                assert torch.equal(found[name], tensor), f"{name} is not what was written"
            before, after = modules.logits(given), modules.logits(back)
            assert torch.equal(before, after), "the model that is read back computes something else"
            assert back.facts.step == given.facts.step or not back.facts.step, "says another number of steps than was written"

    @staticmethod
    def check_boxes(component: Any) -> None:
        """Checks that `box` returns the requested part of a tensor."""
        if not _takes_models(component):
            return
        with TemporaryDirectory(prefix="forge-converter-") as folder:
            component.build().write(Path(folder) / "out", modules.small())
            back = component.build().read(Path(folder) / "out")
            for name, stored in back.tensors.items():
                offset, extent = [size // 3 for size in stored.shape], [size // 2 for size in stored.shape]
                whole = back.read([name])[name]
                part = whole[tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))]
                assert torch.equal(back.box(name, offset, extent), part), f"box of {name} at {offset} is another part of it"

    @staticmethod
    def check_taken(component: Any) -> None:
        """Checks that writing to an existing folder is an error and does not change the folder."""
        from forge_core.errors import ForgeError

        with TemporaryDirectory(prefix="forge-converter-") as folder:
            place = Path(folder) / "out"
            place.mkdir()
            (place / "mine").write_text("mine")
            try:
                component.build().write(place, modules.small())
            except ForgeError:
                pass
            else:
                raise AssertionError("writes where something is already; raise a ForgeError")
            assert [path.name for path in place.iterdir()] == ["mine"], "refuses a place where something is, but changes it"

    @staticmethod
    def check_interrupted(component: Any) -> None:
        """Checks that an interrupted write does not leave a readable model, and that writing again works."""
        from forge_core.errors import ForgeError

        if not _takes_models(component):
            return
        with TemporaryDirectory(prefix="forge-converter-") as folder:
            place = Path(folder) / "out"
            try:
                component.build().write(place, modules.Broken(modules.small()))
            except modules.Torn:
                pass
            else:
                raise AssertionError("an error of the weights that are read does not reach the caller")
            try:
                component.build().read(place)
            except ForgeError:
                pass
            else:
                raise AssertionError("reads what an interrupted write left as a model")
            component.build().write(place, modules.small())

    @staticmethod
    def check_foreign(component: Any) -> None:
        """Checks that reading a missing folder, an empty folder or unrelated files raises a ForgeError."""
        from forge_core.errors import ForgeError

        with TemporaryDirectory(prefix="forge-converter-") as folder:
            empty, other = Path(folder) / "empty", Path(folder) / "other"
            empty.mkdir()
            other.mkdir()
            (other / "notes.txt").write_text("no model")
            for path in (Path(folder) / "missing", empty, other):
                try:
                    component.build().read(path)
                except ForgeError:
                    continue
                raise AssertionError(f"reads {path.name!r}, where no model is, without an error")


TOLERANCE = 1e-4
"""Largest difference from the reference library's fp32 logits, relative to the largest logit; `convert` uses the same limit."""


class HfModelChecks:
    """Checks of every model in the Hugging Face format: it stores all tensors exactly, and refuses other models."""

    @staticmethod
    def check_holds(component: Any) -> None:
        """Checks that a model that is written and read back has the same tensors, bit for bit, and the same logits."""
        for place, weights in _written(component):
            back = component.build().read(place)
            wanted, found = weights.read(list(weights.tensors)), back.read(list(back.tensors))
            assert found.keys() == wanted.keys(), f"tensors {sorted(found.keys() ^ wanted.keys())} are missing on one side"
            for name, tensor in wanted.items():
                assert torch.equal(found[name], tensor), f"{name} differs from the written tensor"
            assert torch.equal(_logits(back), _logits(weights)), "the model that was read back has other logits"

    @staticmethod
    def check_reference(component: Any) -> None:
        """Checks that the logits equal those of the reference library."""
        from forge_models.hf.streamed_forward import fixed_rows

        for place, weights in _written(component):
            found = component.build().reference(place, *fixed_rows(weights.model))
            if not isinstance(found, str):
                error = float((found - _logits(weights)).abs().max() / found.abs().max().clamp(min=1e-30))
                assert error <= TOLERANCE, f"the reference differs by {error:.1e} of the largest logit"

    @staticmethod
    def check_refuses(component: Any) -> None:
        """Checks that `misfits` reports a text decoder."""
        assert component.build().misfits(modules.small()), "misfits accepts a text decoder"

    @staticmethod
    def check_foreign(component: Any) -> None:
        """Checks that reading a missing folder, an empty folder or an unknown model raises a ForgeError."""
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
    with TemporaryDirectory(prefix="forge-hf-") as folder:
        for number, model in enumerate(component.build().examples(Path(folder))):
            weights: Any = modules.InMemory(model)
            refused = component.build().misfits(weights)
            assert not refused, f"misfits rejects its own example: {'; '.join(refused)}"
            place = Path(folder) / f"out{number}"
            component.build().write(place, weights, tokenizer=None, max_shard_bytes=10_000)
            yield place, weights


def _logits(weights: Any) -> Any:
    from forge_models.hf.streamed_forward import fixed_rows, logits_of

    tokens, extras = fixed_rows(weights.model)
    return logits_of(weights, tokens, extras=extras)
