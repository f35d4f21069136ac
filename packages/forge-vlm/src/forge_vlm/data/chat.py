"""Conversations as text, and which of it the assistant says.

A template is rendered turn by turn: what a turn adds is what the text has more than without it. Of a turn of the assistant the
opening (`add_generation_prompt`) is not learned, the rest is, its end included: that is what generation has to write. So any
template works whose text only grows; one that changes earlier turns is refused.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.errors import DataError

if TYPE_CHECKING:
    from jinja2 import Template

ASSISTANT = "assistant"
TEMPLATES = {
    "plain": (
        "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
}
"""Templates by name, in Jinja."""


@dataclass(frozen=True)
class Turn:
    """What one role says."""

    role: str
    content: str


@dataclass(frozen=True)
class Chat:
    """A template, by its text in Jinja: that of `TEMPLATES`, or of a tokenizer of transformers."""

    template: str = TEMPLATES["plain"]

    def render(self, turns: Sequence[Turn]) -> list[tuple[str, bool]]:
        """(text, whether it is learned) of the turns, in their order; neighbors differ in the latter.

        Raises:
            DataError: the template cannot be rendered, or changes earlier turns.
        """
        found: list[tuple[str, bool]] = []
        before = ""
        for number, turn in enumerate(turns, 1):
            opened = self._text(turns[: number - 1], opening=True) if turn.role == ASSISTANT else before
            after = self._text(turns[:number])
            if not opened.startswith(before) or not after.startswith(opened):
                raise DataError(
                    f"the chat template changes what it wrote before turn {number} ({turn.role}), so the assistant's words "
                    f"cannot be told apart; it wrote {_end(opened)!r}, then {_end(after[: len(opened)])!r}"
                )
            found += [(opened[len(before) :], False), (after[len(opened) :], turn.role == ASSISTANT)]
            before = after
        merged: list[tuple[str, bool]] = []
        for text, learned in found:
            if merged and merged[-1][1] == learned:
                merged[-1] = (merged[-1][0] + text, learned)
            elif text:
                merged.append((text, learned))
        return merged

    def prompt(self, turns: Sequence[Turn]) -> str:
        """What generation goes on from: the turns, and the opening of the assistant's."""
        return self._text(turns, opening=True)

    def _text(self, turns: Sequence[Turn], opening: bool = False) -> str:
        if not turns and not opening:
            return ""
        import jinja2

        try:
            return self._compiled.render(messages=[asdict(turn) for turn in turns], add_generation_prompt=opening, **_TOKENS)
        except (jinja2.TemplateError, TypeError) as error:
            raise DataError(f"the chat template cannot be rendered: {error}") from error

    @cached_property
    def _compiled(self) -> "Template":
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            """What templates call for turns that they do not take."""
            raise jinja2.TemplateError(message)

        place = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
        place.globals["raise_exception"] = refuse
        try:
            return place.from_string(self.template)
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template is not valid Jinja: {error}") from error


_TOKENS: dict[str, Any] = {"bos_token": "", "eos_token": "", "tools": None}
"""A document gets its end from the tokenizer; the text of a template has none."""


def chat_of(name: str) -> Chat:
    """The template of a name in `TEMPLATES`, or in a file: `.jinja`, or the `tokenizer_config.json` of a tokenizer.

    Raises:
        DataError: it is neither a name nor a file, or the file has no template.
    """
    import json

    if name in TEMPLATES:
        return Chat(TEMPLATES[name])
    path = Path(name)
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"template {name!r} is neither a file nor one of {', '.join(TEMPLATES)}") from error
    if path.suffix != ".json":
        return Chat(content)
    try:
        found = json.loads(content)
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error
    template = found.get("chat_template") if isinstance(found, dict) else None
    if not isinstance(template, str):
        raise DataError(f"{path} has no chat_template as text; give the file of a template in Jinja")
    return Chat(template)


def _end(text: str) -> str:
    return text[-40:]
