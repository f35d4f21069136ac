"""Conversations as text: which of it the assistant says, and which of it the template wrote itself.

Where a template marks by `{% generation %}` what the assistant says, that is learned. Any other is rendered up to each turn of
the assistant: what a turn adds is what the text has more than without it. The opening (`add_generation_prompt`) is not learned,
the rest of the turn is, its end included: that is what generation has to write. So any template works whose text only grows; one
that changes earlier turns is refused.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from forge_core.errors import DataError
from forge_data.tokenizers.bpe import named_tokens
from forge_vlm.data.traced import LEARNED, TRUSTED, Traced, joined

if TYPE_CHECKING:
    from forge_vlm.data.template import Template

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
"""Special tokens that transformers gives to templates, where the tokenizer has them."""
CONFIG = "tokenizer_config.json"
_PROBE = "a probe of content"


@dataclass(frozen=True)
class Turn:
    """What one role says.

    Attributes:
        role: such as `user`.
        content: text, or the pieces that `Chat.takes_pieces` speaks of; None where the turn has other fields only.
        more: further fields of the message, such as `tool_calls`.
    """

    role: str
    content: Any
    more: Mapping[str, Any] = field(default_factory=dict)

    def message(self) -> dict[str, Any]:
        """The turn as templates get it."""
        return {**self.more, "role": self.role, "content": self.content}


class TextSpan(NamedTuple):
    """Some of a conversation's text. `learned`: the assistant says it; `trusted`: the template wrote it itself."""

    text: str
    learned: bool
    trusted: bool


@dataclass(frozen=True)
class Chat:
    """A template.

    Attributes:
        template: in Jinja: of `TEMPLATES`, or of a tokenizer of transformers.
        tokens: (name, spelling) of the special tokens that it may write.
        complete: whether `tokens` has all there are, so that a template writes nothing for others, as in transformers. Otherwise
            one that writes another is refused.
    """

    template: str = TEMPLATES["plain"]
    tokens: tuple[tuple[str, str], ...] = ()
    complete: bool = False

    def knowing(self, tokens: Mapping[str, str]) -> "Chat":
        """The chat, with special tokens of a tokenizer for those of which its own files say nothing."""
        return self if self.complete else replace(self, tokens=tuple(sorted((dict(tokens) | dict(self.tokens)).items())))

    @property
    def identity(self) -> str:
        """Of what the template writes: for names of what is made with it."""
        return repr(self.template) + (f" {self.tokens} {self.complete}" if self.tokens or self.complete else "")

    def spans(self, turns: Sequence[Turn], tools: Any = None) -> list[TextSpan]:
        """The text of the turns, in their order; neighbors differ in what they are.

        Raises:
            DataError: the template cannot be rendered, changes earlier turns, or mixes its own text with other text so that they
                cannot be told apart.
        """
        if not turns:
            return []
        parts = self._parts(turns, tools)
        whole = joined(parts)
        learned = [bool(flag & LEARNED) for flag in whole.flags]
        for number, turn in enumerate(turns, 1):
            if turn.role == ASSISTANT and not self._compiled.marks:
                opened = joined(self._parts(turns[: number - 1], tools, opening=True))
                after = parts if number == len(turns) else self._parts(turns[:number], tools)
                begin, end = len(opened), _shared(after, parts)
                if not whole.startswith(opened) or end <= begin:
                    wrote = joined(after) if whole.startswith(opened) else opened
                    place = next((place for place, pair in enumerate(zip(wrote, whole, strict=False)) if pair[0] != pair[1]), 0)
                    was, now = (str.__repr__(str(text)[max(place - 20, 0) : place + 20]) for text in (wrote, whole))
                    raise DataError(
                        f"the chat template changes what it wrote before turn {number} ({turn.role}) or in it, so the "
                        f"assistant's words cannot be told apart; it wrote {was}, then {now}; mark them in the template by "
                        "{% generation %} and {% endgeneration %}, also where it drops the reasoning of earlier answers, or end "
                        "each record with its first answer"
                    )
                learned[begin:end] = [True] * (end - begin)
        kinds = zip(learned, (bool(flag & TRUSTED) for flag in whole.flags), strict=True)
        found, start = [], 0
        for kind, same in groupby(kinds):
            stop = start + sum(1 for _ in same)
            found.append(TextSpan(str.__str__(whole)[start:stop], *kind))
            start = stop
        return found

    def render(self, turns: Sequence[Turn]) -> list[tuple[str, bool]]:
        """(text, whether it is learned) of the turns, in their order; neighbors differ in the latter.

        Raises:
            DataError: see `spans`.
        """
        found = groupby(self.spans(turns), key=lambda span: span.learned)
        return [("".join(span.text for span in spans), learned) for learned, spans in found]

    def prompt(self, turns: Sequence[Turn]) -> str:
        """What generation goes on from: the turns, and the opening of the assistant's."""
        return str.__str__(self._text(turns, opening=True))

    def prompt_pieces(self, turns: Sequence[Turn], tools: Any = None) -> list[tuple[str, bool]]:
        """`prompt` as (text, trusted) pieces, which a tokenizer's `encode_pieces` takes."""
        return [(span.text, span.trusted) for span in self.prompt_spans(turns, tools)]

    def prompt_spans(self, turns: Sequence[Turn], tools: Any = None) -> list[TextSpan]:
        """`prompt` as spans, of which nothing is learned."""
        whole = self._text(turns, tools, opening=True)
        spans, start = [], 0
        for trusted, same in groupby(whole.flags, key=lambda flag: bool(flag & TRUSTED)):
            stop = start + sum(1 for _ in same)
            spans.append(TextSpan(str.__str__(whole)[start:stop], False, trusted))
            start = stop
        return spans

    @cached_property
    def takes_pieces(self) -> bool:
        """Whether the template writes contents that are lists of `{"type": "text", "text"}` and `{"type": "image"}`.

        Others are given the text of such a list, with a marker in the place of each image.
        """
        return self._writes([{"type": "text", "text": _PROBE}])

    @cached_property
    def takes_text(self) -> bool:
        """Whether the template writes contents that are text. Some templates of models of images write pieces only."""
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
        from forge_vlm.data.template import UnknownToken

        unknown = {} if self.complete else {name: UnknownToken(name) for name in TOKENS}
        messages = [turn.message() for turn in turns]
        return self._compiled.render(messages, opening=opening, tools=tools, tokens=unknown | dict(self.tokens))

    @cached_property
    def _compiled(self) -> "Template":
        from forge_vlm.data.template import Template

        return Template(self.template)


def _shared(shorter: Sequence[str], longer: Sequence[str]) -> int:
    """Characters up to which the longer text is the shorter one: all of it, or all but what a template puts behind the last turn.

    0 where it is neither: what is behind stands at the end of both.
    """
    text, whole = "".join(shorter), "".join(longer)
    if whole.startswith(text):
        return len(text)
    same = sum(len(part) for part, _ in takewhile(lambda pair: pair[0] == pair[1], zip(shorter, longer, strict=False)))
    return same if whole.endswith(text[same:]) else 0


def chat_of(name: str) -> Chat:
    """The template that a recipe names.

    Args:
        name: one of `TEMPLATES`, a template in Jinja, a file of one, a `tokenizer_config.json` or `chat_template.json`, or the
            folder of a tokenizer of transformers. Behind a file or folder, `:NAME` chooses one of several templates. The special
            tokens are those of the `tokenizer_config.json` in the same folder.

    Raises:
        DataError: it is none of these, or has no such template.
    """
    if name in TEMPLATES:
        return Chat(TEMPLATES[name])
    if "{{" in name or "{%" in name:
        return Chat(name)
    path, wanted = Path(name), "default"
    if ":" in name and not os.path.exists(name):  # noqa: PTH110 (which refuses no text)
        place, wanted = name.rsplit(":", 1)
        path = Path(place)
    found = _templates(path)
    if not found and path.name == CONFIG:  # newer folders keep the template in a file of its own
        found = _templates(path.parent)
    if wanted not in found:
        if not found:
            raise DataError(f"{path} has no chat_template as text; give the file of a template in Jinja")
        names = ", ".join(f"{path}:{own}" for own in found)
        raise DataError(f"{path} has no chat template {wanted!r}; write one of {names}")
    folder = path if path.is_dir() else path.parent
    tokens = named_tokens(folder)
    return Chat(found[wanted], tuple(sorted((tokens or {}).items())), tokens is not None)


def _templates(path: Path) -> dict[str, str]:
    """Templates of a file or folder by name; `default` is the one that has none."""
    if os.path.isdir(path):  # noqa: PTH112 (which refuses no text)
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
        raise DataError(f"{path} has no chat_template as text; give the file of a template in Jinja")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # also a name that no file can have
        raise DataError(
            f"template {str(path)!r} is neither a file nor one of {', '.join(TEMPLATES)}, nor the folder of a tokenizer"
        ) from error


def _json(path: Path, content: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error
    return found if isinstance(found, dict) else {}
