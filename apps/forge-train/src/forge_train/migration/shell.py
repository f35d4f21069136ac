"""Reads command-line arguments from shell scripts and argument files, without running them.

Arrays and variables that are assigned plain text are substituted. What a shell would have to compute, and everything inside of
conditions and loops, is `Unread`.
"""

import re
import shlex
from collections.abc import Iterator
from typing import Any

from forge_core.errors import ForgeError
from forge_train.migration.engine import SourceSetting, Unread

_ASSIGNMENT = re.compile(r"^(?:(?:export|readonly|declare(?: -\w+)?|local)\s+)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]([^}]*))?(?:\[[@*]\])?\}|(\w+))")
_SUM = re.compile(r"\$\(\(\s*([^()]*?)\s*\)\)")
_OPEN = re.compile(r"^\s*(?:if|for|while|until|case)\b")
_CLOSE = re.compile(r"^\s*(?:fi|done|esac)\b")
_ENDS = {"|", "||", "&&", "&", ";", ">", ">>", "2>&1", "<", "&>", "2>"}
_MISSING = "\x01"
"""Begins the word for an array that the script does not define."""
FLAG = re.compile(r"^--[A-Za-z][\w-]*(?:=|$)")


def read_arguments(text: str) -> tuple[dict[str, SourceSetting], list[Unread]]:
    """Reads `--flag value`, `--flag=value` and `--flag` of a script or an argument file.

    Returns settings by name, without dashes in front and with `-` for `_`; the last one counts. A flag without a value is True, a
    flag with several values a list.

    Raises:
        ForgeError: a quote or a parenthesis is not closed.
    """
    variables: dict[str, str] = {}
    arrays: dict[str, list[tuple[str, int]]] = {}
    commands: list[tuple[str, int]] = []
    rest: list[Unread] = []
    depth = 0
    for statement, line in _statements(text):
        if _CLOSE.match(statement):
            depth = max(0, depth - 1)
            continue
        if _OPEN.match(statement):
            depth += 0 if re.search(r"\b(?:fi|done|esac)\s*;?$", statement) else 1
            rest += _flags_unread(statement, line)
            continue
        if depth or re.match(r"^\s*(?:else|elif|then|do)\b", statement):
            rest += _flags_unread(statement, line)
            continue
        if (found := _ASSIGNMENT.match(statement)) and not found[3].startswith("="):
            name, more, value = found[1], bool(found[2]), found[3].strip()
            if value.startswith("("):
                items = [*_words(value[1:].rpartition(")")[0], line)]
                arrays[name] = [*arrays[name], *items] if more and name in arrays else items
            else:
                plain = substituted(_unquoted(value, line), variables)
                variables[name] = variables.get(name, "") + plain if more else plain
            continue
        commands += [*_words(statement, line), (";", line)]
    tokens = [*_expanded(commands, variables, arrays)]
    if not any(FLAG.match(token) for token, _ in tokens):
        tokens = [token for items in arrays.values() for token in _expanded(items, variables, arrays)]
        tokens += [token for value in variables.values() if "--" in value for token in _expanded([(value, 0)], variables, arrays)]
    settings, unknown = _settings(tokens)
    return settings, [*{part.text: part for part in reversed(rest)}.values()][::-1] + unknown


def _statements(text: str) -> Iterator[tuple[str, int]]:
    """Yields statements with their first line: joins continued lines, open quotes and open parentheses; removes comments."""
    pending, first = "", 0
    for number, raw in enumerate(text.split("\n"), 1):
        line = _without_comment(raw.rstrip("\r"))
        first = first or number
        if line.rstrip().endswith("\\"):
            pending += line.rstrip()[:-1] + f" \x00{number + 1}\x00"
            continue
        pending += line
        if _is_open(pending):
            pending += f" \x00{number + 1}\x00"
            continue
        if pending.strip():
            yield pending.strip(), first
        pending, first = "", 0
    if pending.strip():
        if _is_open(pending):
            raise ForgeError(f"line {first} opens a quote or a parenthesis that is never closed; correct the script")
        yield pending.strip(), first


def _without_comment(line: str) -> str:
    quote = ""
    for index, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (index == 0 or line[index - 1] in " \t("):
            return line[:index]
    return line


def _is_open(text: str) -> bool:
    """Whether an array's parenthesis or a quote is not closed."""
    plain = re.sub(r"'[^']*'|\"(?:\\.|[^\"\\])*\"", "", text)
    if plain.count("'") % 2 or plain.count('"') % 2:
        return True
    return bool(re.match(r"^\s*(?:(?:export|readonly|declare(?: -\w+)?|local)\s+)?\w+\+?=\(", plain)) and plain.count(
        "("
    ) > plain.count(")")


def _words(text: str, line: int) -> Iterator[tuple[str, int]]:
    """Yields words as a shell splits them, each with its line."""
    for index, part in enumerate(re.split(r"\x00(\d+)\x00", text)):
        if index % 2:  # the number of the next line
            line = int(part)
            continue
        try:
            words = shlex.split(part, comments=False)
        except ValueError as error:
            raise ForgeError(
                f"line {line}: {error}; correct the script, or write its arguments to a file and migrate that"
            ) from error
        yield from ((word, line) for word in words)


def _unquoted(value: str, line: int) -> str:
    return " ".join(word for word, _ in _words(re.sub(r"\x00\d+\x00", " ", value), line))


def _flags_unread(statement: str, line: int) -> Iterator[Unread]:
    for flag in dict.fromkeys(re.findall(r"(?<![\w-])--[A-Za-z][\w-]*", statement)):
        yield Unread(flag, line, "stands in a condition or a loop, which is not executed; set it in the recipe if it applies")


def _expanded(
    words: list[tuple[str, int]], variables: dict[str, str], arrays: dict[str, list[tuple[str, int]]], depth: int = 0
) -> Iterator[tuple[str, int]]:
    """Yields words with arrays and variables substituted. Words with several arguments, such as "--lr 1e-4", are split."""
    for word, line in words:
        array = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}|\$\{?(\w+)\}?", word)
        name = (array[1] or array[2]) if array else ""
        if name in arrays and depth < 8:
            yield from _expanded(arrays[name], variables, arrays, depth + 1)
            continue
        text = substituted(word, variables)
        if array and array[1] and text == word:
            yield f"{_MISSING}{name}", line
        elif " " in text and (FLAG.match(text.split()[0]) or (array and "--" in text)):
            yield from _words(text, line)
        elif text or not array:
            yield text, line


def substituted(text: str, variables: dict[str, str]) -> str:
    """Returns text with the values of known variables, defaults of unknown ones, and sums of integers."""
    for _ in range(8):
        before = text
        text = _SUM.sub(lambda found: _sum(found, variables), text)
        text = _VARIABLE.sub(lambda found: _value(found, variables), text)
        if text == before:
            break
    return text


def _value(found: re.Match[str], variables: dict[str, str]) -> str:
    name = found[1] or found[3]
    if name in variables:
        return variables[name]
    return found[0] if found[2] is None else found[2].strip("\"'")


def _sum(found: re.Match[str], variables: dict[str, str]) -> str:
    text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: variables.get(name[1], name[0]), found[1])
    factors = re.fullmatch(r"\s*(\d{1,9})\s*([*+/-])\s*(\d{1,9})\s*", text)
    if factors is None:
        return found[0]
    one, two = int(factors[1]), int(factors[3])
    if factors[2] == "/":
        return str(one // two) if two else found[0]
    return str({"*": one * two, "+": one + two, "-": one - two}[factors[2]])


def _settings(tokens: list[tuple[str, int]]) -> tuple[dict[str, SourceSetting], list[Unread]]:
    settings: dict[str, SourceSetting] = {}
    rest: list[Unread] = []
    at = 0
    while at < len(tokens):
        token, line = tokens[at]
        at += 1
        if token.startswith(_MISSING):
            name = token.removeprefix(_MISSING)
            rest.append(Unread(f"${{{name}[@]}}", line, "is not defined in this file; set its arguments in the recipe yourself"))
        if not FLAG.match(token):
            continue
        name, equals, value = token[2:].partition("=")
        values = [value] if equals else []
        while not equals and at < len(tokens) and not _is_end(tokens[at][0]):
            values.append(tokens[at][0])
            at += 1
        if any("$" in item or "`" in item for item in values):
            why = "is computed by the shell or given to the script, which is not executed; set it in the recipe yourself"
            rest.append(Unread(f"--{name} {' '.join(values)}", line, why))
            settings.pop(name.replace("_", "-"), None)
            continue
        plain = [scalar(item) for item in values]
        settings[name.replace("_", "-")] = SourceSetting(
            True if not plain else plain[0] if len(plain) == 1 else plain, line or None
        )
    return settings, rest


def _is_end(token: str) -> bool:
    """Whether a word ends the values of a flag: the next flag, a missing array, the program, or the end of the command."""
    return bool(FLAG.match(token)) or token in _ENDS or token.endswith((".py", ";")) or token.startswith(_MISSING)


def scalar(text: str) -> Any:
    """Returns an argument as an integer, a number or text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
