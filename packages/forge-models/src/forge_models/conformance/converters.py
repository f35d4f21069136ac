"""What every converter has to do: give back what it wrote, refuse what is not its format, and leave nothing half written."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def check_round_trip(component: Any) -> None:
    """A model that is written and read back is the same: every tensor bit for bit, and the logits."""
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
    """A box of a tensor is that part of it."""
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
    """A place where something is already is refused, and stays as it is."""
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
    """What stops in the middle is not read as a model, and another try works."""
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
    """A place where there is nothing, an empty folder and other people's files are refused by a ForgeError."""
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
