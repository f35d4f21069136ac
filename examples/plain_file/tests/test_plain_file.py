"""The class in the file passes the checks of its group, as a component of a wheel does."""

from pathlib import Path

from forge_testing import conforms


def test_the_class_conforms() -> None:
    conforms(f"{Path(__file__).parents[1] / 'mine.py'}:Lion", "forge.optimizers")
