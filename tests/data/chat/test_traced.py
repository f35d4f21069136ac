"""Text that knows where its characters come from: against plain strings, for every method of a string and filter of Jinja."""

from typing import Any

import jinja2
import pytest

from forge_core.errors import DataError
from forge_data.chat.template import Template
from forge_data.chat.traced import TRUSTED, Traced, joined, traced, untrusted

CALLS: dict[str, tuple[Any, ...]] = {
    "center": (20, "*"),
    "ljust": (20,),
    "rjust": (20, "*"),
    "zfill": (20,),
    "expandtabs": (3,),
    "removeprefix": ("  a",),
    "removesuffix": ("D ",),
    "partition": ("c",),
    "rpartition": ("c",),
    "split": ("c",),
    "rsplit": ("c", 1),
    "replace": ("c", "+"),
    "join": (["x", "y", "z"],),
    "translate": ({},),
    "startswith": ("  a",),
    "endswith": ("D ",),
    "count": ("a",),
    "find": ("c",),
    "index": ("c",),
    "rfind": ("c",),
    "rindex": ("c",),
    "format_map": ({},),
    "maketrans": ({},),
}
NO_TEXT = {"encode", "maketrans", "format", "format_map"}
"""Methods that give no text, or that a template reaches only by way of its environment."""


def mixed() -> Traced:
    """`  a` of a user, a tab and `bc` of the template, `D ` of a user."""
    return joined([Traced("  a"), "\tbc", Traced("D ")])


@pytest.mark.parametrize("name", [name for name in dir(str) if not name.startswith("_") and name not in NO_TEXT])
def test_methods_give_the_text_of_strings_and_the_flags_of_their_characters(name: str) -> None:
    text, args = mixed(), CALLS.get(name, ())
    found, wanted = getattr(text, name)(*args), getattr(str.__str__(text), name)(*args)
    assert found == wanted
    origin = {character: flag for character, flag in zip(text, text.flags, strict=True) if character != " "}
    for each in found if isinstance(found, list | tuple) else [found]:
        if isinstance(each, str):
            assert isinstance(each, Traced), f"{name} forgets where its text comes from"
            assert len(each.flags) == len(each)
            for character, flag in zip(str.__str__(each), each.flags, strict=True):
                known = origin.get(character, origin.get(character.swapcase()))
                assert flag == (TRUSTED if character in "+*xyz0" else known) or character == " ", (name, character)


def test_operators_keep_flags() -> None:
    user = Traced("ab")
    for found, text, flags in (
        (user + "c", "abc", b"\0\0\1"),
        ("c" + user, "cab", b"\1\0\0"),
        (user * 2, "abab", bytes(4)),
        (2 * (user + "c"), "abcabc", b"\0\0\1" * 2),
        ((user + "cd")[1:3], "bc", b"\0\1"),
        ((user + "cd")[::-1], "dcba", b"\1\1\0\0"),
        ("".join(list(user + "c")), "abc", None),
    ):
        assert found == text and (flags is None or found.flags == flags)
    assert str(user) is user and {user: 1}["ab"] == 1 and hash(user) == hash("ab")
    assert untrusted({"k": ["v", 1, None]}) == {"k": ["v", 1, None]}
    assert isinstance(next(iter(untrusted({"k": 1}))), Traced)


WRITES = {
    "{{ user ~ '|' ~ 7 }}": "ab|7",
    "{{ '%s|%s' % (user, 'x') }}": "ab|x",
    "{{ '%s|' | format(user) }}": "ab|",
    "{{ '{}|{x}'.format(user, x='y') }}": "ab|y",
    "{{ ['|', user] | join('+') }}": "|+ab",
    "{{ '+'.join([user, '|']) }}": "ab+|",
    "{{ '|x'.replace('x', user) }}": "|ab",
    "{{ user | replace('a', '|') }}": "|b",
    "{{ '|' + user | upper }}": "|AB",
    "{{ user | list | join('|') }}": "a|b",
    "{{ [user, user] | map('upper') | join('|') }}": "AB|AB",
    "{% set text %}{{ user }}|{% endset %}{{ text }}": "ab|",
    "{% macro say(text) %}|{{ text }}{{ caller() }}{% endmacro %}{% call say(user) %}+{% endcall %}": "|ab+",
    "{% filter upper %}{{ user }}|{% endfilter %}": "AB|",
    "{{ (user + '|') | indent(2, true) }}": "  ab|",
    "{{ {'a': '|'}[user[0]] }}": "|",
    "{{ {'a': '|'}.get(user[0]) }}": "|",
    "{{ user | tojson }}": '"ab"',
    "{{ [user] }}": "['ab']",
    "{{ (user ~ '|') | center(7) }}": "  ab|  ",
    "{% for each in user %}{{ each }}|{% endfor %}": "a|b|",
    "{{ user | truncate(1, true, '|', 0) }}": "|",
    "{{ user | e }}|": "ab|",
    "{{ user | default('|') }}": "ab",
    "{{ nothing | default(user) }}|": "ab|",
    "{{ [user, '|'] | first }}{{ [user, '|'] | last }}": "ab|",
    "{{ (user ~ ' |') | title }}": "Ab |",
    "{{ [{'k': user}] | map(attribute='k') | first | upper }}|": "AB|",
    "{{ user.split('b') | first }}{{ '|b'.split('b')[0] }}": "a|",
    "{{ '|' if user == 'ab' and 'a' in user and user is string else user }}": "|",
    "{{ user | reverse }}|": "ba|",
    "{{ user | safe }}|": "ab|",
    "{{ '|%s' | e | format(user) }}": "|ab",
}
"""Templates, and what they write where `user` is `ab`. The letters a and b are the user's alone, and the bar the template's."""


@pytest.mark.parametrize("template", WRITES)
def test_what_a_template_writes_of_a_users_text_is_never_its_own(template: str) -> None:
    found = joined(Template(template).render([], opening=False, tools=None, tokens={"user": Traced("ab")}))
    assert found == WRITES[template] == jinja2.Environment().from_string(_plain(template)).render(user="ab")
    for character, flag in zip(found, found.flags, strict=True):
        assert flag == 0 if character in "abAB" else character != "|" or flag == TRUSTED, (found, found.flags)


def _plain(template: str) -> str:
    return template.replace("| tojson", "| replace('ab', '\"ab\"')")


def test_a_mixture_that_cannot_be_followed_is_refused() -> None:
    with pytest.raises(DataError, match="and Forge cannot tell them apart"):
        traced(lambda text: "".join(sorted(text)), ([*joined(["|", Traced("ba")])],), {})
    with pytest.raises(DataError, match="and Forge cannot tell them apart"):
        joined([Traced("ß"), "|"]).upper()
    for template in ("{{ user.format('|') }}", "{{ user.format_map({}) }}"):
        with pytest.raises(DataError, match="uses text of a message as a format string"):
            Template(template).render([], opening=False, tools=None, tokens={"user": Traced("ab")})
