"""Chat templates: conversations as text, which parts the assistant says, and which parts the template wrote itself.

Text that a template marks with `{% generation %}` is learned. A template without marks is rendered up to each turn of the
assistant; the text that a turn adds is learned, including its end, but not its opening (`add_generation_prompt`). This works for
every template whose text only grows. A template that changes earlier turns is refused.
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from itertools import groupby, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from forge_core.errors import DataError
from forge_data.chat.traced import LEARNED, TRUSTED, Traced, joined
from forge_data.tokenizers.bpe import named_tokens

if TYPE_CHECKING:
    from forge_data.chat.template import Template

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
TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of the special tokens that transformers passes to templates."""
CONFIG = "tokenizer_config.json"
_PROBE = "a probe of content"


class UnstableTemplate(DataError):
    """A template without marks that changes earlier text, so the assistant's words cannot be found by rendering prefixes."""


@dataclass(frozen=True)
class Turn:
    """A message of one role.

    Attributes:
        role: such as `user`.
        content: text, or a list of pieces (see `Chat.takes_pieces`); None if the turn has other fields only.
        more: further fields of the message, such as `tool_calls`.
    """

    role: str
    content: Any
    more: Mapping[str, Any] = field(default_factory=dict)

    def message(self) -> dict[str, Any]:
        """Returns the turn as the dict that templates receive."""
        return {**self.more, "role": self.role, "content": self.content}


class TextSpan(NamedTuple):
    """A part of a conversation's text. `learned`: the assistant says it; `trusted`: the template wrote it itself."""

    text: str
    learned: bool
    trusted: bool


@dataclass(frozen=True)
class Chat:
    """A chat template.

    Attributes:
        template: Jinja source: one of `TEMPLATES`, or the template of a transformers tokenizer.
        tokens: (name, spelling) of the special tokens that the template may write.
        complete: True if `tokens` lists all special tokens: other tokens are rendered as empty text, as in transformers.
            Otherwise a template that writes another token is refused.
    """

    template: str = TEMPLATES["plain"]
    tokens: tuple[tuple[str, str], ...] = ()
    complete: bool = False

    def knowing(self, tokens: Mapping[str, str]) -> "Chat":
        """Returns the chat with additional special tokens from a tokenizer; tokens of the template's own files take
        precedence."""
        return self if self.complete else replace(self, tokens=tuple(sorted((dict(tokens) | dict(self.tokens)).items())))

    @property
    def identity(self) -> str:
        """Text that is equal if the template writes the same; part of the names of prepared data."""
        return repr(self.template) + (f" {self.tokens} {self.complete}" if self.tokens or self.complete else "")

    @property
    def marks(self) -> bool:
        """Whether the template marks the assistant's words with `{% generation %}`."""
        return self._compiled.marks

    def spans(self, turns: Sequence[Turn], tools: Any = None, wanted: Collection[int] | None = None) -> list[TextSpan]:
        """Returns the text of the turns in order; neighboring spans differ in `learned` or `trusted`.

        Args:
            turns: the turns.
            tools: descriptions of tools, as JSON, or None.
            wanted: numbers of the assistant's turns that are learned, counted from 0 in `turns`; by default all.

        Raises:
            UnstableTemplate: the template changes earlier turns and does not mark the assistant's words.
            DataError: the template cannot be rendered, or mixes its own text with text of messages so that the two cannot be
                separated.
        """
        if not turns:
            return []
        parts = self._parts(turns, tools)
        whole = joined(parts)
        learned = [bool(flag & LEARNED) for flag in whole.flags]
        for number, turn in enumerate(turns, 1):
            if turn.role == ASSISTANT and not self._compiled.marks and (wanted is None or number - 1 in wanted):
                opened = joined(self._parts(turns[: number - 1], tools, opening=True))
                after = parts if number == len(turns) else self._parts(turns[:number], tools)
                begin, end = len(opened), _shared(after, parts)
                if not whole.startswith(opened) or end <= begin:
                    wrote = joined(after) if whole.startswith(opened) else opened
                    place = next((place for place, pair in enumerate(zip(wrote, whole, strict=False)) if pair[0] != pair[1]), 0)
                    was, now = (str.__repr__(str(text)[max(place - 20, 0) : place + 20]) for text in (wrote, whole))
                    raise UnstableTemplate(
                        f"the chat template changes earlier text before or in turn {number} ({turn.role}), so Forge cannot find "
                        f"the assistant's words; it first wrote {was}, then {now}; mark those words in the template with "
                        "{% generation %} and {% endgeneration %}, or, if the template drops the reasoning of earlier answers, "
                        "end each record with its first answer"
                    )
                learned[begin:end] = [True] * (end - begin)
        if self._compiled.marks and wanted is not None:
            _keep(learned, [number in wanted for number, turn in enumerate(turns) if turn.role == ASSISTANT])
        kinds = zip(learned, (bool(flag & TRUSTED) for flag in whole.flags), strict=True)
        found, start = [], 0
        for kind, same in groupby(kinds):
            stop = start + sum(1 for _ in same)
            found.append(TextSpan(str.__str__(whole)[start:stop], *kind))
            start = stop
        return found

    def render(self, turns: Sequence[Turn]) -> list[tuple[str, bool]]:
        """Returns (text, learned) of the turns in order; neighbors differ in `learned`.

        Raises:
            DataError: see `spans`.
        """
        found = groupby(self.spans(turns), key=lambda span: span.learned)
        return [("".join(span.text for span in spans), learned) for learned, spans in found]

    def prompt(self, turns: Sequence[Turn]) -> str:
        """Returns the prompt for generation: the turns, and the opening of the assistant's turn."""
        return str.__str__(self._text(turns, opening=True))

    def prompt_pieces(self, turns: Sequence[Turn], tools: Any = None) -> list[tuple[str, bool]]:
        """Returns `prompt` as (text, trusted) pieces for a tokenizer's `encode_pieces`."""
        return [(span.text, span.trusted) for span in self.prompt_spans(turns, tools)]

    def prompt_spans(self, turns: Sequence[Turn], tools: Any = None) -> list[TextSpan]:
        """Returns `prompt` as spans, none of them learned."""
        whole = self._text(turns, tools, opening=True)
        spans, start = [], 0
        for trusted, same in groupby(whole.flags, key=lambda flag: bool(flag & TRUSTED)):
            stop = start + sum(1 for _ in same)
            spans.append(TextSpan(str.__str__(whole)[start:stop], False, trusted))
            start = stop
        return spans

    @cached_property
    def takes_pieces(self) -> bool:
        """Whether the template renders contents that are lists of pieces: texts, and places of images.

        Other templates receive the text of the list, with a marker in place of each image.
        """
        return self._writes([{"type": "text", "text": _PROBE}])

    @cached_property
    def takes_text(self) -> bool:
        """Whether the template renders contents that are text; some templates of models with images render pieces only."""
        return self._writes(_PROBE)

    def _writes(self, content: Any) -> bool:
        try:
            text = self._text([Turn("user", content)])
        except DataError:
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text

    def _text(self, turns: Sequence[Turn], tools: Any = None, opening: bool = False) -> Traced:
        return joined(self._parts(turns, tools, opening))

    def _parts(self, turns: Sequence[Turn], tools: Any = None, opening: bool = False) -> list[Traced]:
        if not turns and not opening:
            return []
        unknown = {} if self.complete else {name: _jinja().UnknownToken(name) for name in TOKENS}
        messages = [turn.message() for turn in turns]
        return self._compiled.render(messages, opening=opening, tools=tools, tokens=unknown | dict(self.tokens))

    @cached_property
    def _compiled(self) -> "Template":
        return _jinja().Template(self.template)


def _keep(learned: list[bool], wanted: Sequence[bool]) -> None:
    """Unmarks the words of turns that are not wanted; the n-th stretch of marked words is that of the assistant's n-th turn.

    Raises:
        DataError: some turns have no marked words of their own.
    """
    if all(wanted):
        return
    stretches, start = [], 0
    for is_learned, same in groupby(learned):
        stop = start + sum(1 for _ in same)
        stretches += [(start, stop)] if is_learned else []
        start = stop
    if len(stretches) != len(wanted):
        raise DataError(
            f"the chat template marks {len(stretches)} stretches of text for {len(wanted)} turns of the assistant, so Forge "
            "cannot tell them apart; train on all turns, or put {% generation %} around each answer as a whole"
        )
    for (start, stop), keep in zip(stretches, wanted, strict=True):
        learned[start:stop] = [keep] * (stop - start)


def _jinja() -> Any:
    """Returns the module that renders templates.

    Raises:
        DataError: jinja2 is not installed.
    """
    try:
        return import_module("forge_data.chat.template")
    except ModuleNotFoundError as error:
        raise DataError("chat templates need jinja2; pip install 'forge-data[chat]'") from error


def _shared(shorter: Sequence[str], longer: Sequence[str]) -> int:
    """Returns the number of characters up to which the longer text equals the shorter one, without the text after the last turn.

    Text after the last turn stands at the end of both. Returns 0 if the longer text does not continue the shorter one.
    """
    text, whole = "".join(shorter), "".join(longer)
    if whole.startswith(text):
        return len(text)
    same = sum(len(part) for part, _ in takewhile(lambda pair: pair[0] == pair[1], zip(shorter, longer, strict=False)))
    return same if whole.endswith(text[same:]) else 0


def chat_of(name: str) -> Chat:
    """Returns the template that a recipe names.

    Args:
        name: one of `TEMPLATES`, Jinja source, a file with it, a `tokenizer_config.json` or `chat_template.json`, or the folder
            of a transformers tokenizer. After a file or folder, `:NAME` selects one of several templates. Special tokens are read
            from the `tokenizer_config.json` in the same folder.

    Raises:
        DataError: `name` is none of these, or the named template does not exist.
    """
    if name in TEMPLATES:
        return Chat(TEMPLATES[name])
    if "{{" in name or "{%" in name:
        return Chat(name)
    path, wanted = Path(name), "default"
    if ":" in name and not os.path.exists(name):  # noqa: PTH110 (which raises for some text)
        place, wanted = name.rsplit(":", 1)
        path = Path(place)
    found = _templates(path)
    if not found and path.name == CONFIG:  # newer folders keep the template in a file of its own
        found = _templates(path.parent)
    if wanted not in found:
        if not found:
            raise DataError(f"{path} has no chat_template as text; set template to a file with a Jinja template")
        names = ", ".join(f"{path}:{own}" for own in found)
        raise DataError(f"{path} has no chat template {wanted!r}; choose one of {names}")
    folder = path if path.is_dir() else path.parent
    tokens = named_tokens(folder)
    return Chat(found[wanted], tuple(sorted((tokens or {}).items())), tokens is not None)


def _templates(path: Path) -> dict[str, str]:
    """Returns the templates of a file or folder by name; a template without a name is `default`."""
    if os.path.isdir(path):  # noqa: PTH112 (which raises for some text)
        files = (path / "chat_template.jinja", path / "chat_template.json", path / CONFIG)
        found: dict[str, str] = {}
        for file in reversed([file for file in files if file.is_file()]):
            found |= _templates(file)
        return found | {file.stem: _read(file) for file in sorted(path.glob("additional_chat_templates/*.jinja"))}
    content = _read(path)
    if path.suffix != ".json":
        return {"default": content}
    template = _json(path, content).get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        template = {str(each.get("name")): each.get("template") for each in template if isinstance(each, dict)}
    if template is None:
        return {}
    found = {str(own): text for own, text in template.items() if isinstance(text, str)} if isinstance(template, dict) else {}
    if not found:
        raise DataError(f"{path} has no chat_template as text; set template to a file with a Jinja template")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not a valid file name
        raise DataError(
            f"template {str(path)!r} cannot be read: give one of {', '.join(TEMPLATES)}, a file, or the folder of a tokenizer"
        ) from error


def _json(path: Path, content: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error
    return found if isinstance(found, dict) else {}
