"""Removes secrets from messages, logs, reports, trackers and checkpoints.

URLs are reduced to parts that cannot be secret: scheme, host, port and path. User, password, query and fragment are always
hidden, because the names of signatures, tokens and cookies differ between services. Values of keys that mean a secret, such as
`api_key` or `auth`, are hidden.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from forge_core.errors import CheckpointError, Fault

HIDDEN = "(hidden)"
_UNSET = "none"
"""Value of an optional key that is not set."""

_WORDS = r"(?<![a-z]){0}(?![a-z])"
_ALWAYS = re.compile(
    "|".join(
        [
            *("secret", "passw", "passphrase", "credential", "bearer", "cookie", "signature", "webhook", "jwt", "api[_-]?key"),
            r"auth(?!or(?!i[sz]))",
            r"private[_-]?key",
            *(_WORDS.format(word) for word in ("pwd", "pw", "pass", "dsn", "sig", "sas", "pat")),
        ]
    )
)
_PERHAPS = re.compile(r"token(?!i[sz])|keys?(?![a-z])")
"""Numbers under such a key are counts: `max_tokens = 12`."""

_COUNTED = re.compile(
    "|".join(
        (
            r"tokens(?![a-z])",
            r"(?<![a-z_])(?:bos|eos|pad|unk|mask|sep|cls|image|video|audio|stop)_token(?![a-z])",  # of a vocabulary
            r"(?<![a-z])key(?=s? ?(heads|norm|class|lines|value|names?|dim)(?![a-z]))",
            "monkey",
            "(key|token)_error",
        )
    )
)

_HOST = re.compile(r"(?:\[[\da-fA-F:.%\w]*\]|[^:\[\]@]*)(?::\d*)?")
_IN_URL = r"""(?:[^\s'"<>`\\]|\\(?!["'nrt]))"""
_URL = re.compile(rf"""(?<![\w+.-])[\w+.-]+://{_IN_URL}*(?:'(?:(?!://)[^\s"<>`])*@{_IN_URL}*)?""")
"""A password may contain a single quote; without a following `@`, the quote ends the URL."""

_BARE_USER = re.compile(r"""(?<![\w/@.:-])[^\s/:@'"=(,\[{]+:[^\s/:@'"(]+@(?=[\w-]+\.[\w.-]*\w)""")
_QUERY = re.compile(r"""(?<=[\w/])\?(?=[\w.%-]+=)[^\s'"]+""")
_ASSIGNED = re.compile(
    r"""(?<![\w.-])(?P<key>[\w.-]*|"[^"\n]*"|'[^'\n]*')(?P<is>\s*[=:]\s*)(?P<value>"(?:\\.|[^"\\])*"|'[^']*')"""
)
_PLAIN = re.compile(
    r"""(?<![\w.-])(?P<key>[\w-][\w.-]*)(?P<is>\s*=\s*)(?P<value>(?:(?:Bearer|Basic|Token)\s+)?[^\s,;'"\[\]{}()]+)"""
)
_HEADER = re.compile(
    r"(?i)(?<![\w-])(?P<key>[\w-]*(?:authorization|cookie|password|passwd|secret|api-key|token|signature)): +[^\s'\"].*"
)
_SCHEME = re.compile(r"(?i)\b(?P<kind>bearer|basic)\s+(?P<value>[\w.~+/-]{8,}=*)")
_KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|(?:AKIA|ASIA)[0-9A-Z]{16}"
    r"|xox[abprs]-[\w-]{10,}|eyJ[\w-]{6,}\.[\w-]{10,}\.[\w-]*)"
)
"""Tokens with a recognizable form, anywhere in a text."""


def secret(key: str) -> bool:
    """Whether the text under `key` may be a secret."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower()
    return bool(_ALWAYS.search(name) or _PERHAPS.search(_COUNTED.sub("", name)))


def _is_always(key: str) -> bool:
    """Whether `key` always means a secret, so that numbers are hidden too."""
    return bool(_ALWAYS.search(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower()))


def redacted(value: Any, key: str = "", *, certain: bool = False) -> Any:
    """Returns a copy of plain data without secrets: values of secret keys, and secret parts of URLs.

    Args:
        value: plain data.
        key: key of the value.
        certain: hides only values of keys that always mean a secret, such as `password`, but not `key` or `token`.
    """
    if isinstance(value, Mapping):
        return {name: redacted(item, name if secret(str(name)) else key, certain=certain) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(item, key, certain=certain) for item in value]
    is_secret = _is_always(key) or (not certain and secret(key))
    if isinstance(value, str):
        whole = redacted_url(value) if re.match(r"[a-zA-Z][\w+.-]*://\S*$", value) else value
        return HIDDEN if is_secret and value not in ("", _UNSET) else redacted_text(whole)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and _is_always(key):
        return HIDDEN
    return value


def redacted_url(url: str) -> str:
    """Returns a URL with only scheme, host, port and path; returns other text unchanged.

    A password may contain `/` and `@`. An `@` that can only belong to the path, as in `hf://datasets/a@main/b`, stays.
    """
    scheme, found, rest = url.partition("://")
    if not found:
        return url
    query = rest.partition("?")[2]
    # Otherwise, ? belongs to a pattern.
    is_query = scheme.lower().endswith(("http", "https")) or "=" in query or query.startswith(HIDDEN)
    marks = "?#" if is_query else "#"
    end = min((rest.index(mark) for mark in marks if mark in rest), default=len(rest))
    place, more = rest[:end], rest[end:]
    first = place.partition("/")[0]
    if "@" in more and not _HOST.fullmatch(first):  # the password contains a ? or #
        place, more = "@" + re.split(r"[?#]", more.rpartition("@")[2])[0], ""
    if "@" in place and ("@" in first or ":" in first.rpartition("]")[2]):
        place = f"{HIDDEN}@{place.rpartition('@')[2]}"
    elif place.startswith("@"):
        place = f"{HIDDEN}{place}"
    elif not _HOST.fullmatch(first):
        place = HIDDEN
    place = re.sub(r";\w+=[^/]*", f";{HIDDEN}", place)
    return f"{scheme}://{place}" + (f"{more[0]}{HIDDEN}" if len(more) > 1 else more)


def refuse_redacted(tables: Mapping[str, Any], origin: str) -> None:
    """Refuses `tables`, read from `origin`, that contain hidden secrets.

    Raises:
        CheckpointError: a secret was hidden; the message names its key.
    """
    if names := ", ".join(_hidden(tables)):
        raise CheckpointError(
            f"{origin} does not keep secrets: {names} is hidden. Use the recipe instead, such as the run's config.toml; to only "
            "encode text, use --tokenizer"
        )


def _hidden(value: Any, *path: str) -> Iterator[str]:
    if isinstance(value, str) and HIDDEN in value:
        yield ".".join(path)
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _hidden(item, *path, str(name))
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _hidden(item, *path, str(index))


def redacted_text(text: str) -> str:
    """Returns text, such as TOML, a log or a message, without secrets: values of secret keys, secret parts of URLs, credentials
    in headers, and tokens with a recognizable form.

    Strings in a multi-line array of a secret key, and in a table with a secret header, are also hidden.
    """
    lines = []
    secret_table = open_array = False
    for line in text.splitlines(keepends=True):
        if header := re.match(r"\s*\[+([^\]\[=\"',]+)\]+\s*(#.*)?$", line):
            secret_table, open_array = secret(header[1]), False
            lines.append(line)
            continue
        if array := re.match(r"\s*([\w.\"'-]+)\s*=\s*\[", line):
            open_array = secret(array[1])
        lines.append(_all_strings(line) if secret_table or open_array else _secret_strings(line))
        if line.rstrip().endswith("]"):
            open_array = False
    return "".join(lines)


def redacted_fault(fault: Fault) -> Fault:
    """Returns a fault whose message does not quote the value of a secret key."""
    return replace(fault, message=_all_strings(fault.message), hint=_all_strings(fault.hint)) if secret(fault.key) else fault


def _all_strings(line: str) -> str:
    return re.sub(r"""("(?:\\.|[^"\\])*"|'[^']*')""", f'"{HIDDEN}"', line)


def _secret_strings(line: str) -> str:
    line = _URL.sub(_hidden_url, line)
    line = _BARE_USER.sub(f"{HIDDEN}@", line)
    line = _QUERY.sub(f"?{HIDDEN}", line)
    line = _ASSIGNED.sub(lambda match: _assigned(match, f'"{HIDDEN}"'), line)
    line = _PLAIN.sub(_plain, line)
    line = _HEADER.sub(lambda match: f"{match['key']}: {HIDDEN}" if secret(match["key"]) else match[0], line)
    line = _SCHEME.sub(lambda match: f"{match['kind']} {HIDDEN}", line)
    return _KNOWN.sub(HIDDEN, line)


def _hidden_url(match: "re.Match[str]") -> str:
    """Redacts a URL in a text. Punctuation after the URL does not belong to it, except for a bracket that opens in the URL."""
    whole, end = match[0], len(match[0])
    pairs = {")": "(", "]": "[", "}": "{"}
    while end and whole[end - 1] in ").,;:!?]}'":
        last = whole[end - 1]
        if last in pairs and whole.count(pairs[last], 0, end) >= whole.count(last, 0, end):
            break
        end -= 1
    return redacted_url(whole[:end]) + whole[end:]


def _assigned(match: "re.Match[str]", instead: str) -> str:
    return match["key"] + match["is"] + instead if secret(match["key"]) and match["value"][1:-1] not in ("", _UNSET) else match[0]


def _plain(match: "re.Match[str]") -> str:
    """Redacts unquoted values as in environments, such as `password=1` and `HF_TOKEN=x`, but not `max_tokens = 12`."""
    key, value = match["key"], match["value"]
    is_count = re.fullmatch(r"[-+\d._e]+|true|false|none|value|\.\.\.", value.lower()) is not None  # or a placeholder
    return key + match["is"] + HIDDEN if _is_always(key) or (secret(key) and not is_count) else match[0]
