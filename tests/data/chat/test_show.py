"""`data show`: the tokens of a recipe's rows by their role."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from data.chat.templates import SIX, unmarked
from data.tokenizers.kinds import KINDS, fast
from forge_data.commands.cli import app

TOKENS = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
TALKS = [
    [{"role": "user", "content": "Where is the cat?"}, {"role": "assistant", "content": "On the mat."}],
    [{"role": "user", "content": "And the \x1b[31mdog?"}, {"role": "assistant", "content": "In the Größe."}],
]
TEXTS = [
    "<|im_start|>user\nWhere is the cat?<|im_end|>\n<|im_start|>assistant\n«On the mat.<|im_end|>»\n",
    "<|im_start|>user\nAnd the \\x1b[31mdog?<|im_end|>\n<|im_start|>assistant\n«In the Größe.<|im_end|>»\n",
]


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    tokenizer = fast(KINDS["byte_level"](), **TOKENS)
    tokenizer.chat_template = unmarked(SIX["chatml"])
    tokenizer.save_pretrained(tmp_path / "folder")
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    (tmp_path / "recipe.toml").write_text(
        f"""
        [train]
        global_batch = 1
        [data]
        sequence_length = 128
        packing = "best_fit"
        shuffle = "none"
        tokenizer = {{ name = "bpe", path = "{tmp_path}/folder/tokenizer.json", eos = "<|im_end|>" }}
        [[data.sources]]
        name = "chat"
        path = "{tmp_path}/talks.jsonl"
        """
    )
    return str(tmp_path / "recipe.toml")


def show(recipe: str, *arguments: str, workspace: str = "work", **environment: str) -> Any:
    place = ["--workspace", str(Path(recipe).with_name(workspace))]
    result = CliRunner().invoke(app, ["show", recipe, *place, *arguments], env=environment)
    assert result.exception is None, result.exception
    return result


def test_each_token_has_its_role(recipe: str) -> None:
    found = json.loads(show(recipe, "--rows", "1", "--json").stdout)
    (row,) = found["rows"]
    roles = [(piece["role"], piece["document"]) for piece in row["pieces"]]
    talk = [("context", 0), ("trained", 0), ("context", 0)]
    assert roles == [*talk, *((role, 1) for role, _ in talk), ("padding", -1)]
    trained = [piece["text"] for piece in row["pieces"] if piece["role"] == "trained"]
    assert trained == ["On the mat.<|im_end|>", "In the Größe.<|im_end|>"]
    sizes = {
        role: sum(len(piece["ids"]) for piece in row["pieces"] if piece["role"] == role)
        for role in ("trained", "context", "padding")
    }
    assert {role: row[role] for role in sizes} == sizes == {role: found[role] for role in sizes}
    assert sum(sizes.values()) == found["tokens"] == 128 and found["trained_share"] == sizes["trained"] / 128
    assert (row["documents"], row["source"], row["sample"], found["rows_without_training"]) == (2, "chat", 0, 0)


def test_without_colors_marks_stand_around_trained_text(recipe: str) -> None:
    lines = show(recipe, "--rows", "1").stdout
    padding = re.search(r"\n\.\.\. ([0-9]+) tokens of padding\n", lines)
    assert padding is not None and "\x1b" not in lines
    body = lines[lines.index("\n") + 1 : padding.start()]
    assert body == f"{TEXTS[0]}\n--- document 2 ---\n{TEXTS[1]}"
    counts = json.loads(show(recipe, "--rows", "1", "--json").stdout)
    roles = f"{counts['trained']} trained, {counts['context']} context, {padding[1]} padding"
    assert lines.splitlines()[0] == f"row 1: sample 0 of chat, 128 tokens: {roles}; 2 documents"
    assert f"128 tokens in 1 rows: {counts['trained_share']:.1%} trained" in lines and "warning" not in lines


def test_a_terminal_shows_roles_in_color(recipe: str) -> None:
    for arguments in (["--color"], []):
        lines = show(recipe, "--rows", "1", *arguments, FORCE_COLOR="1", TERM="xterm").stdout
        assert "\x1b[1;32mOn the mat.<|im_end|>\x1b[0m" in lines and "«" not in lines, arguments
        assert "\x1b[31m" not in lines, "a record cannot color the terminal"
    assert "\x1b" not in show(recipe, "--rows", "1", "--no-color", FORCE_COLOR="1", TERM="xterm").stdout
    assert "\x1b" not in show(recipe, "--rows", "1", FORCE_COLOR="1", NO_COLOR="1", TERM="xterm").stdout


def test_rows_that_train_nothing_are_counted(recipe: str, tmp_path: Path) -> None:
    """Text in rows of one token has no label inside the row."""
    (tmp_path / "one.txt").write_text("a")
    tokens = ["--data.tokenizer.path=null", "--data.sequence_length=2", "--data.packing=pad"]
    text = Path(recipe).read_text().replace('"chat"', '"text"').replace("talks.jsonl", "one.txt")
    text = re.sub(r"tokenizer = .*", 'tokenizer = { name = "bytes" }', text)
    (tmp_path / "text.toml").write_text(text)
    found = json.loads(show(str(tmp_path / "text.toml"), "--rows", "1", "--json", *tokens[1:]).stdout)
    assert found["rows_without_training"] == 0 and found["rows"][0]["pieces"][1]["text"] == "<end of document>"
    lines = show(
        str(tmp_path / "text.toml"), "--rows", "2", "--data.sequence_length=1", "--data.packing=pad", workspace="w"
    ).stdout
    assert "warning: 1 of these rows train nothing" in lines and "1 trained" not in lines.splitlines()[0].partition(", and")[0]
    plain = json.loads(
        show(
            str(tmp_path / "text.toml"), "--rows", "1", "--json", "--data.packing=pad", "--data.documents=ignore", workspace="x"
        ).stdout
    )
    assert [piece["role"] for piece in plain["rows"][0]["pieces"]] == ["context", "trained", "padding"]


def test_the_trainer_has_the_command() -> None:
    from forge_train.cli import main

    with pytest.raises(SystemExit) as end:
        main(["data", "show", "--help"])
    assert end.value.code in (0, None)
