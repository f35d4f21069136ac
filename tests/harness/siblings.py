"""Which of many like cases every change runs. The others are slow: what they show, the rows of compositions show, too."""

from collections.abc import Iterable
from typing import Any

import pytest


def fast(*chosen: Any, of: Iterable[Any]) -> list[Any]:
    """The cases of a `parametrize`, all but the chosen ones marked slow. A case with several arguments is a tuple.

    Raises:
        ValueError: a chosen case is not among them.
    """
    cases = list(of)
    if missing := [case for case in chosen if case not in cases]:
        raise ValueError(f"{missing} are not among the cases {cases}")
    return [case if case in chosen else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
