"""Conversations as text: against the templates of transformers, and which of it is learned."""

import json
from pathlib import Path

import pytest

from forge_core.errors import DataError
from forge_data.chat.conversation import TEMPLATES, Chat, Turn, chat_of

TALK = [Turn("user", "Hi."), Turn("assistant", "Hello!"), Turn("user", "What?"), Turn("assistant", "Nothing.")]
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>\n"
    "{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
"""ChatML with the tags by which transformers tells the assistant's tokens."""


def learned(chat: Chat, turns: list[Turn]) -> list[str]:
    return [text for text, is_learned in chat.render(turns) if is_learned]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": turn.role, "content": turn.content} for turn in TALK]
    (whole,), _ = render_jinja_template([messages], chat_template=TEMPLATES[name])
    assert "".join(text for text, _ in Chat(TEMPLATES[name]).render(TALK)) == whole
    (opened,), _ = render_jinja_template([messages[:3]], chat_template=TEMPLATES[name], add_generation_prompt=True)
    assert Chat(TEMPLATES[name]).prompt(TALK[:3]) == opened


def test_what_is_learned_is_what_transformers_marks_as_the_assistants() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": turn.role, "content": turn.content} for turn in TALK]
    (whole,), (spans,) = render_jinja_template([messages], chat_template=MARKED, return_assistant_tokens_mask=True)
    ours = Chat(TEMPLATES["chatml"])
    assert "".join(text for text, _ in ours.render(TALK)) == whole
    assert learned(ours, TALK) == [whole[start:stop] for start, stop in spans] == ["Hello!<|im_end|>\n", "Nothing.<|im_end|>\n"]


def test_each_template_opens_a_turn_as_it_is_trained() -> None:
    for name, template in TEMPLATES.items():
        chat = Chat(template)
        (given, no), (said, yes) = chat.render(TALK[:2])
        assert (no, yes) == (False, True), name
        assert given == chat.prompt(TALK[:1]) and "Hello!" in said and "Hello!" not in given, name


def test_turns_of_others_are_never_learned() -> None:
    assert learned(Chat(), [Turn("system", "Be kind."), Turn("user", "Hi."), Turn("tool", "7")]) == []
    assert Chat().render([]) == []


def test_a_template_that_changes_earlier_turns_is_refused() -> None:
    last_only = "{% for m in messages %}{{ m.content if loop.last else '...' }}{% endfor %}"
    with pytest.raises(DataError, match=r"changes earlier text before or in turn 2 \(assistant\)"):
        Chat(last_only).render(TALK)
    no_opening = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>>{% endif %}"
    with pytest.raises(DataError, match="changes earlier text before or in turn 2"):
        Chat(no_opening).render(TALK)


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{% for m in messages %}", "is not valid Jinja"),
        ("{{ raise_exception('roles must alternate') }}", "cannot be rendered: roles must alternate"),
        ("{{ messages[0].secret.key }}", "cannot be rendered"),
        ("{{ messages[0].content + eos_token }}", "writes eos_token, which is unknown; set template to the folder"),
        ("{{ bos_token }}", "writes bos_token, which is unknown; set template to the folder"),
        ("{{ 7 // 0 }}", "cannot be rendered: ZeroDivisionError"),
        ("{{ namespace(_x=1) }}", "begins with an underscore"),
        ("{% autoescape true %}{{ messages[0].content }}{% endautoescape %}", "a value of type Markup"),
        ("{{ messages.__class__.__mro__ }}", "cannot be rendered"),
    ],
)
def test_bad_templates_are_refused(template: str, fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        Chat(template).render(TALK)


def test_templates_come_by_name_from_a_file_and_from_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages | length }}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].role }}"}))
    (tmp_path / "none.json").write_text("{}")
    (tmp_path / "broken.json").write_text("{")
    assert chat_of("chatml").template == TEMPLATES["chatml"]
    assert chat_of(str(tmp_path / "mine.jinja")).prompt(TALK) == "4"
    assert chat_of(str(tmp_path / "tokenizer_config.json")).prompt(TALK) == "user"
    with pytest.raises(DataError, match="has no chat_template as text"):
        chat_of(str(tmp_path / "none.json"))
    with pytest.raises(DataError, match="is not valid JSON"):
        chat_of(str(tmp_path / "broken.json"))
    with pytest.raises(DataError, match=r"give one of plain, chatml, llama3"):
        chat_of("chatmi")


QWEN3_LIKE = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}BEGIN"
    "{% if loop.index0 > ns.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "END{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Reasoning is written after the last question only, as Qwen3's template does it."""
UNMARKED = QWEN3_LIKE.replace("BEGIN", "").replace("END", "")
WITH_MARKS = QWEN3_LIKE.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}")


def test_a_template_that_drops_earlier_reasoning_is_refused_with_what_to_do() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    reasons = {1: "a greeting", 3: "nothing comes to mind"}
    messages = [
        {"role": turn.role, "content": turn.content} | ({"reasoning_content": reasons[at]} if at in reasons else {})
        for at, turn in enumerate(TALK)
    ]
    turns = [
        Turn(turn.role, turn.content, {"reasoning_content": reasons[at]} if at in reasons else {}) for at, turn in enumerate(TALK)
    ]
    for given in (turns, TALK):
        with pytest.raises(
            DataError,
            match=r"turn 2 \(assistant\), .* mark those words in the template with {% generation %}.* earlier answers, end",
        ):
            Chat(UNMARKED).render(given)
    marked = Chat(WITH_MARKS)
    (whole,), (spans,) = render_jinja_template([messages], chat_template=WITH_MARKS, return_assistant_tokens_mask=True)
    assert "".join(text for text, _ in marked.render(turns)) == whole and "a greeting" not in whole
    assert learned(marked, turns) == [whole[start:stop] for start, stop in spans]
    (first,), _ = render_jinja_template([messages[:2]], chat_template=UNMARKED)
    assert "".join(text for text, _ in Chat(UNMARKED).render(turns[:2])) == first
    assert learned(Chat(UNMARKED), turns[:2]) == ["<think>\na greeting\n</think>\n\nHello!<|im_end|>\n"]
