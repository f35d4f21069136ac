"""Checks of converters: they read back what they wrote, refuse other formats, and leave no partial model."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def check_round_trip(component: Any) -> None:
    """Checks that a model that is written and read back has bitwise equal tensors and logits."""
    import torch

    from forge_models.conformance import weights

    with TemporaryDirectory(prefix="forge-converter-") as folder:
        given = weights.small()
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
        before, after = weights.logits(given), weights.logits(back)
        assert torch.equal(before, after), "the model that is read back computes something else"
        assert back.facts.step == given.facts.step or not back.facts.step, "says another number of steps than was written"


def check_boxes(component: Any) -> None:
    """Checks that `box` returns the requested part of a tensor."""
    import torch

    from forge_models.conformance import weights

    with TemporaryDirectory(prefix="forge-converter-") as folder:
        component.build().write(Path(folder) / "out", weights.small())
        back = component.build().read(Path(folder) / "out")
        for name, stored in back.tensors.items():
            offset, extent = [size // 3 for size in stored.shape], [size // 2 for size in stored.shape]
            whole = back.read([name])[name]
            part = whole[tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))]
            assert torch.equal(back.box(name, offset, extent), part), f"box of {name} at {offset} is another part of it"


def check_taken(component: Any) -> None:
    """Checks that writing to an existing folder is an error and does not change the folder."""
    from forge_core.errors import ForgeError
    from forge_models.conformance import weights

    with TemporaryDirectory(prefix="forge-converter-") as folder:
        place = Path(folder) / "out"
        place.mkdir()
        (place / "mine").write_text("mine")
        try:
            component.build().write(place, weights.small())
        except ForgeError:
            pass
        else:
            raise AssertionError("writes where something is already; raise a ForgeError")
        assert [path.name for path in place.iterdir()] == ["mine"], "refuses a place where something is, but changes it"


def check_interrupted(component: Any) -> None:
    """Checks that an interrupted write does not leave a readable model, and that writing again works."""
    from forge_core.errors import ForgeError
    from forge_models.conformance import weights

    with TemporaryDirectory(prefix="forge-converter-") as folder:
        place = Path(folder) / "out"
        try:
            component.build().write(place, weights.Broken(weights.small()))
        except weights.Torn:
            pass
        else:
            raise AssertionError("an error of the weights that are read does not reach the caller")
        try:
            component.build().read(place)
        except ForgeError:
            pass
        else:
            raise AssertionError("reads what an interrupted write left as a model")
        component.build().write(place, weights.small())


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
