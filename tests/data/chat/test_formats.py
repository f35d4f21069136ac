"""Records of conversations: what each format becomes, and what is refused."""

from typing import Any

import pytest

from forge_data.chat.conversation import Turn
from forge_data.chat.formats import Example, UnusableRecord, examples_of

ASK, ANSWER = {"role": "user", "content": "Where?"}, {"role": "assistant", "content": "There."}
TURNS = (Turn("user", "Where?"), Turn("assistant", "There."))
SHARED = {"system": "Be kind.", "tools": [{"name": "look"}]}


@pytest.mark.parametrize(
    ("form", "record"),
    [
        ("messages", {"messages": [ASK, ANSWER]}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "Where?"}, {"from": "gpt", "value": "There."}]}),
        ("alpaca", {"instruction": "Where?", "input": "", "output": "There."}),
        ("prompt_completion", {"prompt": [ASK], "completion": [ANSWER]}),
    ],
)
def test_every_format_is_the_same_conversation(form: str, record: dict[str, Any]) -> None:
    assert examples_of(record, form) == [Example(TURNS, None, frozenset({1}))]


def test_what_stands_beside_the_turns_becomes_part_of_the_conversation() -> None:
    talk = [{"from": "human", "value": "Where?"}, {"from": "function_call", "value": '{"name": "look", "arguments": {}}'}]
    talk += [{"from": "observation", "value": "there"}, {"from": "gpt", "value": "There."}]
    (found,) = examples_of({"conversations": talk, **SHARED}, "sharegpt")
    assert [turn.role for turn in found.turns] == ["system", "user", "assistant", "tool", "assistant"]
    assert found.turns[0].content == "Be kind." and found.tools == [{"name": "look"}] and found.trained == {2, 4}
    assert found.turns[2].more == {"tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {}}}]}
    record = {
        "instruction": "Where?",
        "input": "Look there.",
        "output": "There.",
        "history": [["Who?", "I."]],
        "system": "Be kind.",
    }
    (found,) = examples_of(record, "alpaca")
    assert [turn.content for turn in found.turns] == ["Be kind.", "Who?", "I.", "Where?\n\nLook there.", "There."]
    assert found.trained == {2, 4}
    (found,) = examples_of({"talk": [ASK, ANSWER], "messages": None}, "messages", field="talk")
    assert found.turns == TURNS


def test_a_completion_is_trained_and_its_prompt_is_not() -> None:
    record = {"prompt": [ASK, ANSWER, ASK], "completion": [ANSWER]}
    (found,) = examples_of(record, "prompt_completion")
    assert len(found.turns) == 4 and found.trained == {3}
    assert examples_of({"prompt": "a", "completion": "b"}, "prompt_completion") == [Example(prompt="a", completion="b")]


def test_a_preference_is_two_examples_whose_shared_turns_are_not_trained() -> None:
    other = {"role": "assistant", "content": "Nowhere."}
    first = [ASK, ANSWER, ASK]
    listed = examples_of({"prompt": first, "chosen": [ANSWER], "rejected": [other]}, "preference")
    implicit = examples_of({"chosen": [*first, ANSWER], "rejected": [*first, other]}, "preference")
    assert listed == implicit
    assert [example.turns[-1].content for example in listed] == ["There.", "Nowhere."]
    assert all(example.trained == {3} for example in listed)
    text = examples_of({"prompt": "Where? ", "chosen": "There.", "rejected": "Nowhere."}, "preference")
    assert text == [Example(prompt="Where? ", completion="There."), Example(prompt="Where? ", completion="Nowhere.")]


def test_examples_are_chosen_by_answer() -> None:
    record = {"messages": [ASK, ANSWER, ASK, {**ANSWER, "weight": 0}, ASK, ANSWER]}
    assert [example.trained for example in examples_of(record, "messages")] == [{1, 5}]
    assert [example.trained for example in examples_of(record, "messages", "last")] == [{5}]
    first, last = examples_of(record, "messages", "each")
    assert (len(first.turns), first.trained, len(last.turns), last.trained) == (2, {1}, 6, {5})
    assert all("weight" not in turn.more for turn in last.turns)


@pytest.mark.parametrize(
    ("form", "record", "why"),
    [
        ("messages", {"messages": []}, "empty conversation"),
        ("messages", {"messages": None, "text": "x"}, "has no 'messages'.*; it has 'messages', 'text'"),
        ("messages", {"conversations": [1]}, "it looks like format = 'sharegpt'"),
        ("messages", {"messages": "x"}, "has str instead of a list"),
        ("messages", {"messages": [{"from": "human", "value": "x"}]}, "set format = 'sharegpt'"),
        ("messages", {"messages": [{"content": "x"}]}, "has no 'role' in turn 1"),
        ("messages", {"messages": ["x"]}, "has no 'role' in turn 1"),
        ("messages", {"messages": [ASK]}, "has no turn of the assistant to train on; its turns are of user"),
        ("messages", {"messages": [ASK, {**ANSWER, "weight": 0}]}, "has no turn of the assistant"),
        ("messages", {"messages": [ASK, {**ANSWER, "weight": 0.5}]}, "has the weight 0.5 in turn 2"),
        ("messages", {"messages": [{"role": "user", "content": None}, ANSWER]}, r"has no content in turn 1 \(user\)"),
        ("messages", {"messages": [ASK, {"role": "assistant", "content": ""}]}, r"has nothing in turn 2 \(assistant\)"),
        ("messages", {"messages": [ASK, {"role": "assistant", "content": 7}]}, r"turn 2 \(assistant\) is a int, not text"),
        ("messages", {"messages": [ASK, {"role": "assistant", "content": "\ud800"}]}, "the lone surrogate U\\+D800"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]}, "use source 'image_jsonl'"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}, ANSWER]}, "a piece that is not text"),
        ("messages", {"messages": [ASK, ANSWER], "tools": "["}, "'tools' that are not valid JSON"),
        ("messages", {"messages": [ASK, ANSWER], "tools": {"a": 1}}, "has dict instead of a list in 'tools'"),
        ("messages", [ASK, ANSWER], "is not a JSON object"),
        ("sharegpt", {"conversations": [{"from": "bard", "value": "x"}]}, "has the speaker 'bard' in turn 1.*rename it"),
        ("sharegpt", {"conversations": [ASK]}, "set format = 'messages'"),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "look()"}]}, "a function call in turn 1"),
        ("alpaca", {"instruction": "x"}, "has no 'output'"),
        ("alpaca", {"instruction": "x", "output": "y", "history": ["z"]}, "a history that is not"),
        ("prompt_completion", {"prompt": "x", "completion": ""}, "an empty answer"),
        ("prompt_completion", {"prompt": [ASK], "completion": "x"}, "has a list in 'prompt', but text in 'completion'"),
        ("prompt_completion", {"prompt": "x", "completion": [ANSWER]}, "has text in 'prompt', but a list in 'completion'"),
        ("prompt_completion", {"prompt": [ASK], "completion": [ASK]}, "has no turn of the assistant"),
        ("preference", {"prompt": "x", "chosen": "y", "rejected": "y"}, "equal answers"),
        ("preference", {"chosen": [ASK, ANSWER], "rejected": [ASK, ANSWER]}, "equal answers"),
        ("preference", {"prompt": "x", "chosen": "y"}, "has no 'rejected'"),
    ],
)  # fmt: skip
def test_bad_records_are_refused_with_what_to_do(form: str, record: Any, why: str) -> None:
    with pytest.raises(UnusableRecord, match=why):
        examples_of(record, form)
