"""All that this plugin promises, in one line."""

from forge_testing import conforms


def test_lionize_conforms() -> None:
    conforms("forge-lionize")
