"""Checkpoints of runs whose mixture was rounded (version 1): they go on where the order is the same, else are refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from forge_core.errors import DataError
from forge_data.components import RandomTokens
from forge_data.loading.stream import open_stream
from forge_data.section import Data, Phase


def data(*weights: float, phases: tuple[Phase, ...] = (), **more: Any) -> Data:
    labels = zip("abc", weights, strict=False)
    sources = [RandomTokens(vocab_size=90, tokens=900, label=label, weight=weight) for label, weight in labels]
    return Data(sequence_length=8, sources=sources, phases=list(phases), **more)


def opened(recipe: Data) -> Any:
    return open_stream(recipe, workspace=Path("unused"), seed=5, global_batch=8, micro_batch=8)


def cursor_after(recipe: Data, steps: int) -> Any:
    stream = opened(recipe)
    return next(cursor for number, (_, cursor) in enumerate(stream.from_cursor(stream.start()), 1) if number == steps)


def names_of(recipe: Data, cursor: Any) -> str:
    with pytest.raises(DataError) as refused:
        opened(recipe).from_cursor(cursor)
    return str(refused.value)


LR_RAMP = (Phase(start=2, ramp=3, lr_scale=0.1),)
SAME = {
    "short": (data(0.7, 0.2, 0.1), [34, 9, 5], "42126fae952849fa3e4afe9ef90da3bf"),
    "equal, T = 2": (data(2.0, 2.0, temperature=2.0), [24, 24], "e7feac795422b71270060de19ae4e269"),
    "phases": (
        data(3.0, 1.0, phases=(Phase(start=2, weights={"b": 2.0}), Phase(start=4, weights={"a": 0.123}))),
        [23, 25],
        "ef8c68b3688bde7d62a7a1d0358df610",
    ),
    "ramp of the learning rate": (data(0.75, 0.25, phases=LR_RAMP), [36, 12], "9f231a2a70f2bff9fec4c783f096b669"),
    "65,536": (data(0.65535, 0.00001), [48, 0], "97e6be9cd078e82ae40afee6508c8c88"),
    "ramp of one source": (data(3.0, phases=LR_RAMP), [48], "3f6db07acf73b15428880ee8cbddd8b0"),
}
"""Recipes, and the draws and fingerprints in their cursors after step 6 as version 1 wrote them."""
OTHER = {
    "long": data(1.0, 1e-7),
    "65,537": data(0.65536, 0.00001),
    "T = 2": data(0.5, 0.25, temperature=2.0),
    "T = 2, whole roots": data(1.0, 0.25, temperature=2.0),  # its powers may have been others on the machine that wrote it
    "ramp": data(0.5, 0.5, phases=(Phase(start=2, ramp=3, weights={"a": 0.0}),)),
    "later": data(0.5, 0.5, phases=(Phase(start=4, weights={"a": 0.1234567}),)),
    "ramp of the learning rate, weights of 4": data(3.0, 1.0, phases=LR_RAMP),
}


@pytest.mark.parametrize("name", SAME)
def test_w7_cursors_of_an_unchanged_order_are_those_of_version_1(name: str) -> None:
    recipe, draws, fingerprint = SAME[name]
    cursor = cursor_after(recipe, 6)
    assert (
        list(cursor["draws"].values()) == draws and cursor["fingerprint"] == fingerprint and "mixture" not in cursor["identity"]
    )


@pytest.mark.parametrize("name", OTHER)
def test_w7_cursors_of_another_order_are_refused_by_version_with_what_to_do(name: str) -> None:
    cursor = cursor_after(OTHER[name], 6)
    assert cursor["identity"]["mixture"] == 2
    opened(OTHER[name]).from_cursor(cursor)
    old = cursor | {"identity": {k: v for k, v in cursor["identity"].items() if k != "mixture"}, "fingerprint": "0" * 32}
    said = names_of(OTHER[name], old)
    assert "mixture was version 1" in said and "continue a run of an older Forge with that version of Forge" in said
    assert "start a new run, or list in data.changed the settings that may differ" in said
    assert next(opened(dataclasses.replace(OTHER[name], changed=("mixture",))).from_cursor(old))[1]["sample"] == 7 * 8


def test_w7_what_lies_ahead_does_not_count() -> None:
    for name, steps in (("ramp", 2), ("later", 4), ("ramp of the learning rate, weights of 4", 2)):
        border = cursor_after(OTHER[name], steps)
        assert "mixture" not in border["identity"] and opened(OTHER[name]).from_cursor(border)
        assert "mixture" in cursor_after(OTHER[name], steps + 1)["identity"]


def test_w7_the_identity_has_the_exact_shares() -> None:
    identity = cursor_after(OTHER["long"], 1)["identity"]
    assert [source["share"] for source in identity["sources"].values()] == ["10000000/10000001", "1/10000001"]
    said = names_of(data(1.0, 2e-7), cursor_after(OTHER["long"], 1))
    assert "sources.b.share was 1/10000001, is 1/5000001" in said and "version" not in said
    said = names_of(data(1.0, 1.0), cursor_after(OTHER["long"], 1))
    assert "mixture was 2, is nothing" in said and "version" not in said
