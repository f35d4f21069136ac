"""`convert --to gguf` and `--from gguf` as a user calls them."""

import json
from pathlib import Path

import pytest
import torch

from forge_models.gguf.reader import GgufFile
from forge_models.hf.streamed_forward import logits_of
from forge_train.formats.forge import ForgeConverter
from forge_train.run.loop import fit
from models.hf.command_line import WORDS, run
from models.hf.zoo import tokens
from train.runs import prepared

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("gguf")
    (folder / "tiny.toml").write_text(WORDS.replace("dim = 16", "dim = 32").replace("ffn_dim = 24", "ffn_dim = 64"))
    training, _ = prepared(folder / "tiny.toml", [f"--job.dir={folder / 'run'}", "--train.max_steps=4", "--checkpoint.every=4"])
    fit(training)
    return folder / "run"


def converted(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, object]:
    """The document that `convert --json` prints."""
    assert run("convert", *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_becomes_a_file_and_a_folder_again(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = converted(capsys, trained, tmp_path / "m.gguf", "--to", "gguf")
    notes = " ".join(map(str, result["notes"]))  # type: ignore[call-overload]
    assert "m.gguf: largest difference from the format's own library" in notes and "rounding" not in notes
    weights = ForgeConverter().read(trained)
    file = GgufFile(tmp_path / "m.gguf")
    expected = logits_of(weights, tokens(length=32))
    assert torch.equal(logits_of(file, tokens(length=32)), expected)
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    texts = fields["tokenizer.ggml.tokens"].contents()
    assert texts[65] == "A" and texts[256] == "<|endoftext|>" and len(texts) == 300
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 256
    assert run("convert", tmp_path / "m.gguf", tmp_path / "back", "--to", "forge") == 0  # the format is detected
    assert torch.equal(logits_of(ForgeConverter().read(tmp_path / "back"), tokens(length=32)), expected)


def test_rounding_is_reported(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = converted(capsys, trained, tmp_path / "m.gguf", "--to", "gguf", "--quantization", "q8_0", "--pre-tokenizer", "none")
    expected = logits_of(ForgeConverter().read(trained), tokens(length=32))
    found = logits_of(GgufFile(tmp_path / "m.gguf"), tokens(length=32))
    assert not torch.equal(found, expected)
    notes = " ".join(map(str, result["notes"]))  # type: ignore[call-overload]
    assert "the format's rounding changes logits by up to " in notes
    assert gguf.GGUFReader(tmp_path / "m.gguf").fields["tokenizer.ggml.model"].contents() == "none"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--to", "hf", "--quantization", "q8_0"), "format 'hf' does not support --quantization"),
        (("--to", "gguf", "--quantization", "q4_k"), "quantization 'q4_k' is not implemented; choose one of none, q8_0"),
        (("--to", "gguf", "--max-shard-bytes", "9"), "format 'gguf' does not support --max-shard-bytes"),
        (("--to", "gguf", "--family", "olmo2"), "GGUF for 'olmo2' is not implemented"),
    ],
)
def test_wrong_options_are_refused(
    arguments: tuple[str, ...], reason: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("convert", trained, tmp_path / "m.gguf", *arguments) == 2
    assert reason in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
