"""The processor of a folder with images: what `transformers.AutoProcessor` needs to make the ids and pixels of training.

A processor expands one token for each image, so a tokenizer without one gets the placeholder of images as an added token. A chat
template of text is put behind one that turns contents with images into text.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forge_core.errors import DataError
from forge_data.chat.conversation import chat_of
from forge_models.hf.writer import added_token, write_json
from forge_vlm.data.documents import MARKER

FILE, TEMPLATE, TOKENIZER = "processor_config.json", "chat_template.jinja", "tokenizer.json"
MOST_UNUSED = 4096
"""Ids without a token before the placeholder that get one, at most."""
TO_TEXT = (
    "{% set ours = namespace(messages=[]) %}{% for m in messages %}"
    "{% if m['content'] is string or m['content'] is not iterable %}"
    "{% set ours.messages = ours.messages + [m] %}{% else %}{% set text %}{% for piece in m['content'] %}"
    "{% if piece['type'] == 'text' %}{{ piece['text'] }}{% else %}<image>{% endif %}{% endfor %}{% endset %}"
    "{% set ours.messages = ours.messages + [dict(m, content=text)] %}{% endif %}{% endfor %}{% set messages = ours.messages %}"
)
"""Before a template of text: contents become text with the marker of images, as those of records do."""
USAGE = """
Images and conversations become the ids and pixels of training by the processor of this folder:

```python
from transformers import AutoProcessor

processor = AutoProcessor.from_pretrained("path/of/this/folder")
content = [{"type": "image", "path": "cat.png"}, {"type": "text", "text": "What is it?"}]
inputs = processor.apply_chat_template(
    [{"role": "user", "content": content}],
    add_generation_prompt=True,
    tokenize=True,
    return_dict=True,
    return_tensors="pt",
    sanitize_control_tokens=True,  # what users write is text; versions of transformers before 5.20 do not have it
    processor_kwargs={"add_special_tokens": False},  # a template writes those that training had
)
```
"""
NO_TEMPLATE = """
The processor has no chat template: {why}. Text with images becomes ids by `processor(images=..., text=...)`.
"""
NONE = """
`transformers.AutoProcessor` cannot open this folder: {why}.
"""


def write(folder: Path, placeholder: int, config: Callable[[str], Mapping[str, Any]]) -> None:
    """Adds to a written folder what its processor needs, and to its model card how it is used, or why it has none.

    Args:
        folder: with its tokenizer.
        placeholder: id of the token that stands for a part of an image.
        config: the keys of the processor for the text of this token.
    """
    token, why = _token(folder, placeholder)
    if token is None:
        tell(folder, NONE.format(why=why))
        return
    write_json(folder / FILE, config(token))
    why = _write_template(folder, token)
    tell(folder, NO_TEMPLATE.format(why=why) if why else USAGE)


def tell(folder: Path, text: str) -> None:
    """Adds to the model card of a folder."""
    with (folder / "README.md").open("a", encoding="utf-8") as card:
        card.write(text)


def _token(folder: Path, placeholder: int) -> tuple[str | None, str]:
    """The text of the placeholder, which the tokenizer has afterwards; or None, and why it cannot have one."""
    path = folder / TOKENIZER
    if not path.is_file():
        return None, f"it has no {TOKENIZER}, so no token can be the placeholder of images ({placeholder})"
    if (text := added_token(folder, placeholder)) is not None:
        return text, ""
    content = json.loads(path.read_text(encoding="utf-8"))
    model, added = content["model"], content.setdefault("added_tokens", [])
    vocab = model.get("vocab")
    words = vocab if isinstance(vocab, dict) else {entry[0]: number for number, entry in enumerate(vocab or ())}
    taken = {number: text for text, number in words.items()} | {entry["id"]: entry["content"] for entry in added}
    if placeholder in taken:
        return None, f"its tokenizer has the word {taken[placeholder]!r} as token {placeholder}, the placeholder of images"
    if MARKER in taken.values():
        return None, f"its tokenizer has {MARKER!r} as another token than the placeholder of images ({placeholder})"
    unused = range(max(taken, default=-1) + 1, placeholder)
    if model.get("type") == "BPE" and not model.get("ignore_merges"):
        # No merge leads to these, so that text alone never becomes one; an added token that is no word gets the next free id.
        model["vocab"] = {**words, **{entry["content"]: entry["id"] for entry in added}, MARKER: placeholder}
        unused = range(0)
    elif placeholder < max(taken, default=-1) or len(unused) > MOST_UNUSED:
        return None, f"its tokenizer has {len(taken)} tokens, and the placeholder of images is not one of the next {MOST_UNUSED}"
    texts = [(f"<|unused_{number}|>", number) for number in unused]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added += [{"id": number, "content": text, **flags, "special": True} for text, number in [*texts, (MARKER, placeholder)]]
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return MARKER, ""


def _write_template(folder: Path, token: str) -> str:
    """Writes the chat template by which contents have images; or says why there is none."""
    try:
        chat = chat_of(str(folder))
    except DataError:
        return "the weights came without one, and their data had none or several"
    template = chat.template
    if not chat.takes_pieces:
        template = TO_TEXT + template
    if token != MARKER:
        if MARKER not in template:
            return ""
        if MARKER in chat.template:
            return f"the template writes {MARKER!r}, and the tokenizer has {token!r} as the placeholder of images"
        template = template.replace(MARKER, token)
    (folder / TEMPLATE).write_text(template, encoding="utf-8")
    return ""
