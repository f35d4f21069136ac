"""Runs commands in this process, for tests of what they say."""

import json
from typing import Any

import pytest

from forge_train.cli import main
from train.runs import TINY

BYTES = TINY.replace("vocab_size = 61", "vocab_size = 257") + '\n[data.tokenizer]\nname = "bytes"\n'
TEXT = "Some words that a model reads,\nand a second line of them.\n" * 4


def said(capsys: pytest.CaptureFixture[str], *arguments: Any) -> Any:
    """The JSON document of a command."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments), "--json"])
    captured = capsys.readouterr()
    assert not ended.value.code, captured
    return json.loads(captured.out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    captured = capsys.readouterr()
    assert ended.value.code == 2
    return captured.err + captured.out
