"""All that this plugin promises, in one line."""

from forge_core import conforms


def test_lionize_conforms() -> None:
    conforms("forge-lionize")
