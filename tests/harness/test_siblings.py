"""All cases stay, in their order; those that every change runs have to be among them."""

import pytest

from harness.siblings import fast


def test_all_but_the_chosen_cases_are_slow() -> None:
    made = fast("b", of=["a", "b"])
    assert made[1] == "b" and made[0].values == ("a",)
    assert [mark.name for mark in made[0].marks] == ["slow"]
    assert fast((1, 2), of=[(1, 2), (3, 4)])[1].values == (3, 4)


def test_a_chosen_name_that_is_misspelled_is_refused() -> None:
    with pytest.raises(ValueError, match="'c'"):
        fast("c", of=["a", "b"])
