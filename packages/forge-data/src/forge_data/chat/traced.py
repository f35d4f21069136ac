"""Strings that record the origin of each character through all operations of a chat template.

A template is trusted, its inputs are not. The output mixes both, and the two must be separated again: a control token is one only
where the template wrote it; the same spelling in a user's message is ordinary text.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import GeneratorType
from typing import Any

from forge_core.errors import DataError

TRUSTED, LEARNED = 1, 2
"""Flags of a character: `TRUSTED`: the template wrote it itself; `LEARNED`: the template marks it as the assistant's words."""
_PRIVATE = 0xF0000
"""First of 65,534 private-use characters."""


class Traced(str):
    """A string with flags per character. A plain string in a template belongs to the template: all of it is `TRUSTED`.

    Methods that copy characters keep their flags. For other functions that return strings, `traced` finds the flags or raises.
    """

    flags: bytes
    __slots__ = ("flags",)

    def __new__(cls, text: str, flags: "bytes | int" = 0) -> "Traced":
        made = super().__new__(cls, text)
        made.flags = bytes([flags]) * len(text) if isinstance(flags, int) else flags
        return made

    def __str__(self) -> str:
        return self

    def __hash__(self) -> int:
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) if isinstance(other, str) else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        return Traced, (_plain(self), self.flags)

    def __add__(self, other: str) -> "Traced":
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> "Traced":
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: Any) -> "Traced":
        return Traced(_plain(self) * times, self.flags * times)

    def __rmul__(self, times: Any) -> "Traced":
        return self * times

    def __getitem__(self, key: Any) -> "Traced":
        flags = self.flags[key]
        return Traced(_plain(self)[key], flags)

    def __iter__(self) -> Iterator["Traced"]:
        return (self[place] for place in range(len(self)))

    def __mod__(self, other: Any) -> str:
        return traced(lambda text, rest: str.__mod__(text, rest), (self, other), {})

    def __format__(self, spec: str) -> str:
        return traced(lambda text: str.__format__(text, spec), (self,), {})

    def strip(self, characters: Any = None, /) -> "Traced":
        return self.lstrip(characters).rstrip(characters)

    def lstrip(self, characters: Any = None, /) -> "Traced":
        return self[len(self) - len(_plain(self).lstrip(characters)) :]

    def rstrip(self, characters: Any = None, /) -> "Traced":
        return self[: len(_plain(self).rstrip(characters))]

    def removeprefix(self, prefix: str, /) -> "Traced":
        return self[len(self) - len(_plain(self).removeprefix(prefix)) :]

    def removesuffix(self, suffix: str, /) -> "Traced":
        return self[: len(_plain(self).removesuffix(suffix))]

    def split(self, sep: Any = None, maxsplit: Any = -1) -> list["Traced"]:  # type: ignore[override]
        return self._found(_plain(self).split(sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: Any = None, maxsplit: Any = -1) -> list["Traced"]:  # type: ignore[override]
        return self._found(_plain(self).rsplit(sep, maxsplit), len(sep or ""))

    def splitlines(self, *args: Any, **kwargs: Any) -> list["Traced"]:  # type: ignore[override]
        return self._found(_plain(self).splitlines(*args, **kwargs))

    def partition(self, separator: str, /) -> tuple["Traced", ...]:  # type: ignore[override]
        return tuple(self._found(_plain(self).partition(separator)))

    def rpartition(self, separator: str, /) -> tuple["Traced", ...]:  # type: ignore[override]
        return tuple(self._found(_plain(self).rpartition(separator)))

    def replace(self, old: str, new: str, count: Any = -1, /) -> str:
        if not old:
            return traced(str.replace, (self, old, new, count), {})
        parts = self._found(_plain(self).split(old, count), len(old))
        between = [new] * (2 * len(parts) - 1)
        between[::2] = parts
        return joined(between)

    def join(self, parts: Iterable[str], /) -> "Traced":
        between: list[str] = []
        for part in parts:
            between += [self, part] if between else [part]
        return joined(between)

    def _found(self, parts: Sequence[str], between: int = 0) -> list["Traced"]:
        """Returns the parts of this text, in order, with their flags; `between` is the number of characters between two parts.

        With 0 the parts are adjacent, or the text between them, such as white space, cannot be mistaken for a part.
        """
        found, start = [], 0
        for part in parts:
            start = _plain(self).index(part, start)
            found.append(self[start : start + len(part)])
            start += len(part) + between
        return found


def _through(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def call(self: Traced, *args: Any, **kwargs: Any) -> Any:
        return traced(method, (self, *args), kwargs)

    call.__name__ = name
    return call


_CHANGE = "capitalize casefold center expandtabs ljust lower rjust swapcase title translate upper zfill"
for _name in _CHANGE.split():
    setattr(Traced, _name, _through(_name))


def joined(parts: Iterable[str]) -> Traced:
    """Returns the concatenation of strings, traced or the template's own."""
    kept = list(parts)
    if strange := next((part for part in kept if type(part) not in (str, Traced)), None):
        raise DataError(f"the chat template writes a value of type {type(strange).__name__}, whose origin is unknown")
    return Traced("".join(map(_plain, kept)), b"".join(map(flags_of, kept)))


def flags_of(text: str) -> bytes:
    """Returns the flags of each character."""
    return text.flags if isinstance(text, Traced) else bytes([TRUSTED]) * len(text)


def untrusted(value: Any) -> Any:
    """Returns a JSON value whose strings, keys included, are marked as inputs of the template."""
    if isinstance(value, str):
        return Traced(_plain(value))
    if isinstance(value, Mapping):
        return {untrusted(key): untrusted(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [untrusted(each) for each in value]
    return value


def traced(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function with traced strings and returns its result, traced if it is a string.

    Strings whose case changes character by character keep their flags, and so does every string whose characters all have the
    same flags. Otherwise the function is called again with each character from outside the template replaced by another one: a
    function that only copies characters writes the replacements where it wrote the originals.

    Raises:
        DataError: the template mixes its own text with its inputs so that the origin of characters cannot be determined.
    """
    given = [list(each) if isinstance(each, GeneratorType) else each for each in args]
    result = function(*given, **kwargs)
    if not isinstance(result, str) or isinstance(result, Traced):
        return result
    result = _plain(result)
    strings = list(_strings([given, list(kwargs.values())]))
    if not any(isinstance(each, Traced) for each in strings):
        return result
    if isinstance(given[0], Traced) and len(strings) == 1 and len(result) == len(given[0]):
        return Traced(result, given[0].flags)  # such as upper case
    if len(kinds := {flag for each in strings for flag in flags_of(each)}) <= 1:
        return Traced(result, min(kinds, default=0))
    codes: dict[tuple[str, int], str] = {}
    hidden = function(*(_hidden(each, codes) for each in given), **{name: _hidden(each, codes) for name, each in kwargs.items()})
    original = {code: pair for pair, code in codes.items()}
    pairs = [original.get(code, (code, TRUSTED)) for code in hidden]
    if "".join(character for character, _ in pairs) != result:
        raise DataError(
            f"the chat template mixes its own text and text of messages in {result[:40]!r}, and Forge cannot tell them apart; "
            "write the two next to each other"
        )
    return Traced(result, bytes(flag for _, flag in pairs))


def _hidden(value: Any, codes: dict[tuple[str, int], str]) -> Any:
    """Returns the value with each character from outside the template replaced."""
    if isinstance(value, Traced):
        pairs = zip(_plain(value), value.flags, strict=True)
        return "".join(pair[0] if pair[1] == TRUSTED else codes.setdefault(pair, chr(_PRIVATE + len(codes))) for pair in pairs)
    if isinstance(value, Mapping):
        return {key: _hidden(each, codes) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_hidden(each, codes) for each in value)
    return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _strings(key)
            yield from _strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


_plain = str.__str__
"""The string as a plain `str`."""
