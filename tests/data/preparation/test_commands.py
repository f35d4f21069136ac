"""`data prepare | inspect | verify` as a user calls them, and descriptions without torch."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_core.component import fields_of
from forge_core.registry import GROUPS, Registry
from forge_data.__main__ import main
from forge_data.section import Data

GROUPS_HERE = ("forge.sources", "forge.tokenizers")


def data(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "forge_data", *(str(argument) for argument in arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_prepare_inspect_and_verify(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text("the quick brown fox " * (number + 1))
    made = data("prepare", "--path", tmp_path / "*.txt", "--out", tmp_path / "store", "--tokenizer", "bytes", "--json")
    assert made.returncode == 0, made.stderr
    answer = json.loads(made.stdout)
    assert answer["documents"] == 8 and answer["tokens"] == 20 * 36 + 8

    looked = json.loads(data("inspect", tmp_path / "store", "--json").stdout)
    assert (
        looked["dtype"] == "uint16" and looked["lengths"]["longest"] == 161 and looked["sample"]["text"].startswith("the quick")
    )
    assert sum(bin_["documents"] for bin_ in looked["histogram"]) == 8
    drawn = data("inspect", tmp_path / "store").stdout
    assert "█" in drawn and "728 tokens in 8 documents" in drawn

    assert data("verify", tmp_path / "store").returncode == 0
    shard = tmp_path / "store" / "shard-00000.bin"
    shard.write_bytes(b"\x01" + shard.read_bytes()[1:])
    damaged = data("verify", tmp_path / "store")
    assert damaged.returncode == 2 and "shard-00000.bin" in damaged.stderr and "Traceback" not in damaged.stderr


def test_convert_diff_and_decontaminate(tmp_path: Path) -> None:
    """Text to a store to Megatron's format; equal until a byte is changed, which diff and verify both name."""
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"body": f"document {n} " * 8}) for n in range(5)))
    made = ask("prepare", "--path", tmp_path / "texts.jsonl", "--text", "body", "--out", tmp_path / "s", "--tokenizer", "bytes")
    assert made["documents"] == 5
    assert ask("convert", tmp_path / "s", "--to", "megatron", "--out", tmp_path / "m")["tokens"] == made["tokens"] == 445
    assert ask("verify", tmp_path / "m")["faults"] == []
    looked = ask("inspect", tmp_path / "m")
    assert (looked["format"], looked["documents"], looked["sequences"], looked["max_id"]) == ("megatron", 5, 5, 256)
    assert ask("diff", tmp_path / "s", tmp_path / "m")["equal"]
    content = (tmp_path / "m.bin").read_bytes()
    (tmp_path / "m.bin").write_bytes(content[:200] + b"\x7a\x00" + content[202:])
    other = data("diff", tmp_path / "s", tmp_path / "m")
    assert other.returncode == 1 and f"{tmp_path}/m.bin at byte 200: id 122" in other.stdout, other.stderr
    damaged = data("verify", tmp_path / "m", "--vocab-size", "256")
    assert damaged.returncode == 2 and "m.bin at byte 176 (token 88): id 256 is not in a vocabulary of 256" in damaged.stderr
    (tmp_path / "eval.jsonl").write_text(json.dumps({"question": "document 3 document 3 document 3"}))
    found = ask(
        "decontaminate", tmp_path / "s", "--against", tmp_path / "eval.jsonl", "--words", "6", "--out", tmp_path / "clean"
    )
    assert (found["documents"], found["overlapping_documents"]) == (5, 1)
    assert ask("inspect", tmp_path / "clean")["documents"] == 4


def ask(*arguments: str | Path) -> dict[str, Any]:
    """The answer of a command in this process."""
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.suppress(SystemExit):
        assert main([*(str(argument) for argument in arguments), "--json"]) == 0
    return json.loads(written.getvalue())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "nowhere"], "nowhere does not exist"),
        (["inspect", "raw.bin"], "dtype is unknown"),
        (["inspect", "raw.bin", "--dtype", "int7"], "unknown dtype 'int7'"),
        (["prepare", "--path", "nowhere", "--out", "out"], "nowhere does not exist"),
        (["prepare", "--path", "text.txt", "--out", "."], "not empty"),
        (["prepare", "--path", "text.txt"], "--out"),
        (["prepare", "--path", "text.txt", "--out", "out", "--ids", "x"], "source 'text' has no ids; remove --ids"),
        (["prepare", "--path", ".", "--out", "out"], "holds files of several kinds"),
        (["convert", "text.txt", "--out", "out"], "is text, not tokens"),
        (
            ["convert", "raw.bin", "--dtype", "uint16", "--out", "raw.npy", "--to", "npy", "--to-dtype", "float32"],
            "cannot be written as 'float32'",
        ),
        (["verify", "nowhere"], "nowhere does not exist"),
        (["diff", "raw.bin", "nowhere", "--dtype", "uint16"], "nowhere does not exist"),
        (["decontaminate", "raw.bin", "--against", "x"], "dtype is unknown"),
        (["prepare", "--out", "out"], "--path"),
        (["prepare", "--path", "text.txt", "--out", "out", "--unknown=1"], "--unknown"),
        (["prepare", "--path", "text.txt", "--out", "/proc/none/out", "--tokenizer", "bytes"], "cannot be written"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    tmp_path: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    np.arange(6, dtype="<u2").tofile(tmp_path / "raw.bin")
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "text.jsonl").write_text('{"text": "text"}')
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    assert exit_code(arguments) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before  # nothing half-written


def exit_code(arguments: list[str]) -> int | str | None:
    try:
        return main(arguments)
    except SystemExit as end:  # how the command line library refuses options
        return end.code


def registered() -> list[Any]:
    registry = Registry()
    entries = [entry for group in GROUPS_HERE for entry in registry.of(group) if entry.distribution == "forge-data"]
    assert len(entries) >= 7
    return [pytest.param(registry.load_entry(entry), entry.group, id=entry.name) for entry in entries]


@pytest.mark.parametrize(("component", "group"), registered())
def test_components_load_and_every_key_has_a_docstring(component: Any, group: str) -> None:
    assert GROUPS[group].build == ("context",)
    assert component.__doc__
    for field in fields_of(component):
        assert field.doc, f"{component.__name__}.{field.name} has no docstring"


def test_the_section_is_documented_and_has_defaults() -> None:
    assert Data() == Data(sequence_length=1024)
    assert all(field.doc for field in fields_of(Data))


def test_libraries_of_extras_are_imported_on_use() -> None:
    script = (
        "import sys, forge_data.loading.stream, forge_data.sources.formats\n"
        "import forge_data.preparation.streaming, forge_data.preparation.job\n"
        "import forge_data.commands.convert, forge_data.commands.decontaminate, forge_data.sources.formats\n"
        "import forge_data.commands.diff, forge_data.commands.inspect, forge_data.commands.prepare, forge_data.commands.inspect\n"
        "names = ('pyarrow', 'datasets', 'fsspec', 'tiktoken', 'sentencepiece', 'zstandard')\n"
        "print([name for name in names if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_descriptions_import_no_heavy_library() -> None:
    names = ["forge_data.components", "forge_data.components", "forge_data.section", "forge_data.commands.cli"]
    script = f"import sys\nfor name in {names}: __import__(name)\n"
    script += "print([name for name in ('torch', 'numpy', 'tokenizers', 'xxhash') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
