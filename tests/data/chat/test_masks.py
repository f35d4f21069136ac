"""Which tokens of a conversation are trained: against transformers where its mask is right, against hand-made masks elsewhere."""

import json
from typing import Any

import pytest

from data.chat.templates import ANSWERS, SAID, SIX, STOPS, SYSTEM, TALK, marked, unmarked
from data.tokenizers.kinds import KINDS, content, fast
from forge_core.errors import DataError
from forge_data.chat.conversation import Chat
from forge_data.chat.formats import examples_of
from forge_data.chat.masks import EncodedExample, ExampleEncoder
from forge_data.tokenizers.bpe import BpeTokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}]
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Where is the cat?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"at": 'a"b'}}}],
    },
    {"role": "tool", "content": "the mat"},
    {"role": "assistant", "content": "On the mat."},
]


@pytest.fixture(scope="module")
def kinds() -> dict[str, tuple[Any, BpeTokenizer]]:
    made = {name: KINDS[name]() for name in ("byte_level", "split_bytes", "metaspace_first")}
    return {name: (fast(each, **TOKENS), BpeTokenizer(content(each), "</s>")) for name, each in made.items()}


def encoded(
    record: dict[str, Any], template: str, ours: Any, stop: str = "<|im_end|>", train: str = "all"
) -> list[EncodedExample]:
    chat = Chat(template, tuple(sorted(TOKENS.items())), complete=True)
    stops = [ours._backend.token_to_id(each) for each in stop.split()]
    encoder = ExampleEncoder(chat, ours, stops)
    return [encoder.encode(example) for example in examples_of(record, "messages", train)]


def harmless(talk: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation without the spelling of a control token, of which transformers makes one."""
    return [{**each, "content": each["content"].replace("</s> said", "it said")} for each in talk]


def said(example: EncodedExample, theirs: Any) -> list[str]:
    """The texts of the stretches of trained tokens, control tokens included."""
    runs: list[list[int]] = []
    before = False
    for index, learned in zip(example.ids.tolist(), example.learned.tolist(), strict=True):
        if learned:
            runs = runs if before else [*runs, []]
            runs[-1].append(index)
        before = learned
    return [theirs.decode(run, clean_up_tokenization_spaces=False) for run in runs]


@pytest.mark.parametrize("name", SIX)
def test_trained_tokens_are_those_of_transformers(name: str, kinds: dict[str, Any]) -> None:
    for kind, (theirs, ours) in kinds.items():
        stop = STOPS.get(name, "</s>")
        talks = [TALK, TALK[:2], *([] if name == "gemma" else [SYSTEM + TALK])]
        for talk in talks:
            wanted = theirs.apply_chat_template(
                harmless(talk), chat_template=marked(SIX[name]), return_assistant_tokens_mask=True, return_dict=True
            )
            (found,) = encoded({"messages": harmless(talk)}, marked(SIX[name]), ours, stop)
            assert found.ids.tolist() == wanted["input_ids"], kind
            assert found.learned.tolist() == list(map(bool, wanted["assistant_masks"])), kind
            assert found.turns == found.ended == len(talk) // 2


@pytest.mark.parametrize("name", SIX)
def test_a_template_without_tags_trains_what_a_hand_made_mask_says(name: str, kinds: dict[str, Any]) -> None:
    """The mask of transformers is empty here. A stop token that a user spells is text, and is neither one nor an end."""
    theirs, ours = kinds["byte_level"]
    stop = STOPS.get(name, "</s>")
    (found,) = encoded({"messages": TALK}, unmarked(SIX[name]), ours, stop)
    assert said(found, theirs) == SAID.get(name, ANSWERS)
    assert found.ended == found.turns == 2
    (tagged,) = encoded({"messages": TALK}, marked(SIX[name]), ours, stop)
    assert tagged.ids.tolist() == found.ids.tolist() and tagged.learned.tolist() == found.learned.tolist()
    stops = [place for place, index in enumerate(found.ids.tolist()) if index == ours._backend.token_to_id(stop)]
    assert found.learned[stops].sum() == 2, "the stop token of each answer is trained, and of nothing else"


@pytest.mark.parametrize("name", SIX)
def test_a_stop_token_that_the_tags_leave_out_is_trained(name: str, kinds: dict[str, Any]) -> None:
    theirs, ours = kinds["byte_level"]
    stop = STOPS.get(name, "</s>")
    short = SIX[name]
    for end in ("<|im_end|>END", "{{ eos_token }}END", " ~ '<|im_end|>' }}END", " ~ eos_token }}END", "{{- '<|im_end|>' }}END"):
        if end in short:
            written = end.removesuffix("END")
            body, write = (" }}", "{{ " + written[3:]) if written.startswith(" ~") else ("", written)
            short = short.replace(end, f"{body}END{write}")
    talk = harmless(TALK)
    whole = theirs.apply_chat_template(talk, chat_template=marked(short), return_assistant_tokens_mask=True, return_dict=True)
    wanted = whole["assistant_masks"]
    (found,) = encoded({"messages": talk}, marked(short), ours, stop)
    missed = [
        place for place, (ours_, theirs_) in enumerate(zip(found.learned.tolist(), wanted, strict=True)) if ours_ != theirs_
    ]
    assert [int(found.ids[place]) for place in missed] == [ours._backend.token_to_id(stop)] * 2 and sum(wanted)
    assert found.learned[missed].all() and said(found, theirs) == [
        each.replace("</s> said", "it said") for each in SAID.get(name, ANSWERS)
    ]
    (foreign,) = encoded({"messages": TALK}, marked(short), ours, "[INST]" if name != "deepseek" else "[/INST]")
    assert (foreign.turns, foreign.ended) == (2, 0)


def test_a_marked_stretch_reaches_its_stop_over_text_of_the_template_only(kinds: dict[str, Any]) -> None:
    theirs, ours = kinds["byte_level"]
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{{ '\n</s>' }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    (found,) = encoded({"messages": TALK}, template, ours, "</s>")
    assert said(found, theirs) == ["On the mat.\n</s>", "In the park, </s> said.\n</s>"]
    never = (
        template.replace("{{ '\n</s>' }}", "").replace("{% else %}", "{% else %}:").replace("{% endfor %}", "{% endfor %}</s>")
    )
    (found,) = encoded({"messages": TALK}, never, ours, "</s>")
    assert said(found, theirs) == ["On the mat.", "In the park, </s> said.</s>"] and (found.turns, found.ended) == (2, 1)


def test_text_after_the_stop_token_is_not_trained(kinds: dict[str, Any]) -> None:
    theirs, ours = kinds["byte_level"]
    phi = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
    )
    (found,) = encoded({"messages": TALK}, phi, ours, "</s> <|im_end|>")
    assert said(found, theirs) == ANSWERS
    (found,) = encoded({"messages": TALK}, phi, ours, "</s>")
    assert said(found, theirs) == ["On the mat.<|im_end|>\n", "In the park, </s> said.<|im_end|>\n</s>"]
    assert (found.turns, found.ended) == (2, 1)


@pytest.mark.parametrize("template", [marked(SIX["chatml"]), unmarked(SIX["chatml"])], ids=["tags", "no tags"])
def test_which_answers_are_trained_can_be_chosen(template: str, kinds: dict[str, Any]) -> None:
    theirs, ours = kinds["byte_level"]
    (last,) = encoded({"messages": TALK}, template, ours, train="last")
    assert said(last, theirs) == ANSWERS[1:]
    first, second = encoded({"messages": TALK}, template, ours, train="each")
    assert said(first, theirs) == ANSWERS[:1] and said(second, theirs) == ANSWERS[1:]
    assert first.ids.tolist() == theirs.apply_chat_template(TALK[:2], chat_template=template, return_dict=False)
    weighted = [*TALK[:1], {**TALK[1], "weight": 0}, TALK[2], {**TALK[3], "weight": 1}]
    (found,) = encoded({"messages": weighted}, template, ours)
    assert found.ids.tolist() == last.ids.tolist() and found.learned.tolist() == last.learned.tolist()


def test_tools_and_their_results_are_context(kinds: dict[str, Any]) -> None:
    theirs, ours = kinds["byte_level"]
    wanted = theirs.apply_chat_template(
        CALLS, tools=TOOLS, chat_template=marked(SIX["qwen3"]), return_assistant_tokens_mask=True, return_dict=True
    )
    for template in (marked(SIX["qwen3"]), unmarked(SIX["qwen3"])):
        for tools in (TOOLS, json.dumps(TOOLS)):
            (found,) = encoded({"messages": CALLS, "tools": tools}, template, ours)
            assert found.ids.tolist() == wanted["input_ids"]
            assert found.learned.tolist() == list(map(bool, wanted["assistant_masks"]))
    assert said(found, theirs) == [
        '<tool_call>{"name": "look", "arguments": {"at": "a\\"b"}}</tool_call><|im_end|>',
        "On the mat.<|im_end|>",
    ]


def test_arguments_of_tools_in_text_are_not_encoded_twice(kinds: dict[str, Any]) -> None:
    theirs, ours = kinds["byte_level"]
    call = {"type": "function", "function": {"name": "look", "arguments": json.dumps({"at": 'a"b'})}}
    talk = [CALLS[0], {"role": "assistant", "content": None, "tool_calls": [call]}, *CALLS[2:]]
    objects, text = (
        encoded({"messages": messages, "tools": TOOLS}, unmarked(SIX["qwen3"]), ours)[0] for messages in (CALLS, talk)
    )
    assert text.ids.tolist() == objects.ids.tolist() and text.learned.tolist() == objects.learned.tolist()
    raw = unmarked(SIX["qwen3"]).replace(
        "(call.function | default(call)) | tojson", "call.function.name ~ call.function.arguments"
    )
    (found,) = encoded({"messages": talk, "tools": TOOLS}, raw, ours)
    assert said(found, theirs)[0] == '<tool_call>look{"at": "a\\"b"}</tool_call><|im_end|>'


THOUGHT = [TALK[0], {**TALK[1], "reasoning_content": "cats like mats"}, TALK[2], {**TALK[3], "reasoning_content": "dogs run"}]


@pytest.mark.parametrize("template", [marked(SIX["qwen3"]), unmarked(SIX["qwen3"])], ids=["tags", "no tags"])
def test_reasoning_that_the_template_drops_is_refused_and_trained_by_a_row_per_answer(
    template: str, kinds: dict[str, Any]
) -> None:
    theirs, ours = kinds["byte_level"]
    with pytest.raises(DataError, match=r"turn 2 \(assistant\).*set train = 'each'"):
        encoded({"messages": THOUGHT}, template, ours)
    first, second = encoded({"messages": THOUGHT}, template, ours, train="each")
    assert said(first, theirs) == [f"<think>\ncats like mats\n</think>\n\n{ANSWERS[0]}"]
    assert said(second, theirs) == [f"<think>\ndogs run\n</think>\n\n{ANSWERS[1]}"]
    assert "cats like" not in theirs.decode(second.ids), "the model is asked without the earlier reasoning, as in generation"
    (last,) = encoded({"messages": THOUGHT}, template, ours, train="last")
    assert last.ids.tolist() == second.ids.tolist() and last.learned.tolist() == second.learned.tolist()


def test_reasoning_inside_the_content_is_recognized(kinds: dict[str, Any]) -> None:
    _, ours = kinds["byte_level"]
    drops = unmarked(SIX["deepseek"]).replace("m.content ~ eos_token", "m.content.split('</think>')[-1] ~ eos_token")
    talk = [TALK[0], {"role": "assistant", "content": "<think>cats like mats</think>On the mat."}]
    with pytest.raises(DataError, match=r"leaves out the reasoning of turn 2 \(assistant\)"):
        encoded({"messages": talk}, drops, ours, "</s>")
    (found,) = encoded({"messages": talk}, unmarked(SIX["deepseek"]), ours, "</s>")
    assert found.ended == 1


@pytest.mark.parametrize("name", ["mistral", "gemma", "deepseek"])
def test_a_role_that_the_template_does_not_know_is_refused(name: str, kinds: dict[str, Any]) -> None:
    _, ours = kinds["byte_level"]
    what = {"mistral": "after user comes assistant", "gemma": "no role system", "deepseek": "leaves out turn 5"}[name]
    odd = {"role": "system", "content": "Be kind."} if name == "gemma" else {"role": "critic", "content": "the mat"}
    talk = [odd, *TALK] if name == "gemma" else [*TALK, odd]
    with pytest.raises(DataError, match=what):
        encoded({"messages": talk}, marked(SIX[name]), ours, "</s>")


def test_tools_and_calls_that_the_template_leaves_out_are_refused(kinds: dict[str, Any]) -> None:
    _, ours = kinds["byte_level"]
    with pytest.raises(DataError, match="leaves out the tools"):
        encoded({"messages": TALK, "tools": TOOLS}, marked(SIX["chatml"]), ours)
    with pytest.raises(DataError, match=r"leaves out the tool call 'look' of turn 2 \(assistant\)"):
        encoded({"messages": CALLS}, marked(SIX["chatml"]), ours)


def test_tags_that_do_not_separate_the_answers_cannot_choose_between_them(kinds: dict[str, Any]) -> None:
    _, ours = kinds["byte_level"]
    split = marked(SIX["chatml"]).replace(
        "{{ message.content }}<|im_end|>{% endgen", "{{ message.content }}{% endgeneration %}!{% generation %}<|im_end|>{% endgen"
    )
    with pytest.raises(DataError, match="marks 4 stretches of text for 2 turns"):
        encoded({"messages": TALK}, split, ours, train="last")


def test_plain_text_needs_no_template(kinds: dict[str, Any]) -> None:
    for kind in ("byte_level", "split_bytes"):
        theirs, ours = kinds[kind]
        (example,) = examples_of({"prompt": "The cat sat", "completion": " on the mat </s>."}, "prompt_completion")
        found = ExampleEncoder(None, ours, [ours.eos]).encode(example)
        assert said(found, theirs) == [" on the mat </s>.</s>"] and found.ids[-1] == ours.eos
        assert found.ids.tolist()[:-1] == [*ours.prefix, *ours.encode("The cat sat on the mat </s>.").tolist()]
        assert (found.turns, found.ended) == (1, 1)
    with pytest.raises(DataError, match="a conversation needs a chat template"):
        ExampleEncoder(None, ours, []).encode(examples_of({"messages": TALK}, "messages")[0])


def test_a_stop_token_inside_an_answer_does_not_end_it(kinds: dict[str, Any]) -> None:
    theirs, ours = kinds["byte_level"]
    template = (
        "{% for m in messages %}<|im_start|>{% if m.role == 'assistant' %}!thought<|im_end|>{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>!{% endif %}"
    )
    (found,) = encoded({"messages": TALK}, template, ours)
    assert said(found, theirs) == [f"thought<|im_end|>{answer}" for answer in ANSWERS] and found.ended == 2


def test_a_marked_stretch_does_not_reach_over_another_one(kinds: dict[str, Any]) -> None:
    theirs, ours = kinds["byte_level"]
    apart = "{{ message.content }}{% endgeneration %}!{% generation %}<|im_end|>{% endgen"
    split = marked(SIX["chatml"]).replace("{{ message.content }}<|im_end|>{% endgen", apart)
    (found,) = encoded({"messages": TALK}, split, ours)
    assert said(found, theirs) == ["On the mat.", "<|im_end|>", "In the park, </s> said.", "<|im_end|>"]
    assert (found.turns, found.ended) == (4, 2)


def test_a_question_that_the_template_leaves_out_is_refused(kinds: dict[str, Any]) -> None:
    _, ours = kinds["byte_level"]
    late = unmarked(SIX["deepseek"]).replace("m.role == 'user'", "m.role == 'user' and not loop.first")
    with pytest.raises(DataError, match=r"leaves out turn 1 \(user\)"):
        encoded({"messages": TALK}, late, ours, "</s>")


def test_a_completion_has_what_the_tokenizer_adds_around_a_text() -> None:
    ours = BpeTokenizer(content(KINDS["word_piece"]()), "<|im_end|>")
    assert ours.prefix and ours.suffix
    (example,) = examples_of({"prompt": "the cat", "completion": " sat"}, "prompt_completion")
    found = ExampleEncoder(None, ours, [5]).encode(example)
    text = ours.encode("the cat sat").tolist()
    assert found.ids.tolist() == [*ours.prefix, *text, *ours.suffix, ours.eos] and found.ended == 0
    assert found.learned.tolist()[-2:] == [True, True] and not found.learned[0]
