"""Model cards of runs and of exported folders; what an export carries of the folder that a run started from."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_ckpt.checkpoint.locate import locate
from forge_models.hf.reader import Folder
from forge_train.report.card import MARK
from forge_train.run.loop import fit
from models.hf.command_line import WORDS, run, with_tokenizer
from models.hf.zoo import CASES, random_model, saved
from train.runs import prepared

HELD_OUT = """
[[hooks]]
name = "evaluate"
every = 2

[data.evaluation.held_out]
name = "random"
vocab_size = 61
tokens = 400
document = 23
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with results of evaluations at steps 2, 4 and 6, and checkpoints at steps 3 and 6."""
    folder = tmp_path_factory.mktemp("card")
    (folder / "tiny.toml").write_text(WORDS + HELD_OUT)
    training, _ = prepared(folder / "tiny.toml", [f"--job.dir={folder / 'run'}", "--train.max_steps=6", "--checkpoint.keep=9"])
    fit(training)
    return folder / "run"


def card_of(run_: Path, out: Path, *more: str) -> str:
    assert run("card", run_, "--out", out, *more) == 0
    return out.read_text()


def cells(text: str) -> dict[str, str]:
    """First and second cell of each row of the tables."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in rows}


def test_a_card_has_what_the_checkpoint_and_the_metrics_have(finished: Path, tmp_path: Path) -> None:
    text = card_of(finished, tmp_path / "card.md")
    found = cells(text)
    meta = locate(finished).manifest().meta
    assert found["Steps"] == found["Training steps"] == "6"
    assert found["Tokens"] == str(6 * 8 * 16)
    assert found["Layout"] == "`1`" and found["Base model"] == "none: trained from random weights"
    assert found["Languages"] == "unknown" and found["License"] == "to be stated by the publisher of the model"
    assert found["random"] == "1/1"
    (source,) = meta["cursor"]["identity"]["sources"].values()
    assert f"| `{source['fingerprint']}` |" in text and meta["cursor"]["fingerprint"] in text and meta["tokenizer"] in text
    assert f"torch {torch.__version__}" in found["Versions"] and "forge-models " in found["Versions"]
    assert "python " in found["Versions"]
    recipe = tomllib.loads(re.findall(r"```toml\n(.*?)```", text, re.DOTALL)[0])
    assert recipe["model"]["dim"] == 16 and recipe["train"]["max_steps"] == 6 and recipe["optimizer"]["lr"] == 1e-2
    assert recipe == meta["config"]
    losses = {
        row["step"]: row["evaluation/held_out/loss"]
        for row in map(json.loads, (finished / "metrics.jsonl").read_text().splitlines())
        if "evaluation/held_out/loss" in row
    }
    assert list(losses) == [2, 4, 6]
    assert f"| evaluation/held_out/loss | {losses[6]:.6g} | 6 |" in text
    early = card_of(finished / "checkpoints" / "step-00000003", tmp_path / "early.md")
    assert cells(early)["Steps"] == "3"
    assert f"| evaluation/held_out/loss | {losses[2]:.6g} | 2 |" in early and f"{losses[4]:.6g}" not in early


def test_hubs_read_the_front_matter(finished: Path, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    data = hub.ModelCard(card_of(finished, tmp_path / "card.md")).data.to_dict()
    assert data == {"library_name": "pytorch", "pipeline_tag": "text-generation", "tags": ["forge"]}


def test_the_code_of_a_card_opens_the_weights(finished: Path, tmp_path: Path) -> None:
    text = card_of(finished, tmp_path / "card.md")
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], names)  # noqa: S102
    count = sum(parameter.numel() for parameter in names["model"].parameters())
    assert f"{count:,} parameters" in text


def test_a_card_of_somebody_else_is_not_replaced(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "README.md"
    first = card_of(finished, path)
    assert first == card_of(finished, path)  # its own card is replaced
    mark = MARK.partition("{")[0]
    for content in ("# Mine\n", "", first + "\nMore.\n", first.replace("unknown", "English"), f"# Mine\n{mark}0 -->\n"):
        path.write_text(content)
        assert run("card", finished, "--out", path) == 2
        assert "was not written by this command, or was edited since; choose another file with --out" in capsys.readouterr().err
        assert path.read_text() == content
    path.unlink()
    path.mkdir()
    assert run("card", finished, "--out", path) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_default_is_a_file_in_the_directory_of_the_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("card", finished, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"card": str(finished / "README.md"), "step": 6}
    assert (finished / "README.md").read_text().startswith("---\n")
    (finished / "README.md").unlink()


def test_an_export_has_the_same_sections(finished: Path, tmp_path: Path) -> None:
    assert run("convert", finished, tmp_path / "hf", "--to", "hf") == 0
    card, export = card_of(finished, tmp_path / "card.md"), (tmp_path / "hf" / "README.md").read_text()
    sections = card.partition("## Training")[2].partition("<!--")[0]
    assert len(sections) > 1000 and sections == export.partition("## Training")[2]
    assert "tags: [llama, forge]" in export and "LlamaForCausalLM" in export
    assert run("convert", tmp_path / "hf", tmp_path / "again", "--to", "hf") == 0
    again = (tmp_path / "again" / "README.md").read_text()
    assert "Data, evaluation, recipe and versions of the training are unknown." in again
    assert cells(again)["Base model"] == "unknown" and cells(again)["Training steps"] == "not recorded"


def test_weights_without_a_run_have_no_card_of_one(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", finished, tmp_path / "forge", "--to", "forge") == 0
    capsys.readouterr()
    assert run("card", tmp_path / "forge", "--out", tmp_path / "card.md") == 2
    assert "is not of a run" in capsys.readouterr().err
    assert not (tmp_path / "card.md").exists()


def test_without_metrics_the_evaluation_is_unknown(finished: Path, tmp_path: Path) -> None:
    from shutil import copytree

    copytree(finished, tmp_path / "copy")
    for name in ("metrics.jsonl", "report.json"):
        (tmp_path / "copy" / name).unlink(missing_ok=True)
    assert "Unknown: " in card_of(tmp_path / "copy", tmp_path / "card.md").partition("## Evaluation")[2].partition("##")[0]


def test_an_export_carries_what_the_start_folder_had(tmp_path: Path) -> None:
    """Tokenizer, chat template and generation settings of a folder that a run started from."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    start = with_tokenizer(saved(random_model(*CASES["qwen2"]), tmp_path / "start"))
    (start / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    (start / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5], "temperature": 0.7, "do_sample": True}))
    head, _, rest = WORDS.partition("[model]")
    recipe = f'{head}[model]\nname = "decoder"\nfrom_hf = "{start}"\n\n[data]{rest.partition("[data]")[2]}'
    recipe = re.sub(
        r"\[data\.tokenizer\].*",
        f'[data.tokenizer]\nname = "bpe"\npath = "{start}/tokenizer.json"\neos = "</s>"\n',
        recipe,
        flags=re.DOTALL,
    )
    (tmp_path / "tiny.toml").write_text(recipe.replace("vocab_size = 300", "vocab_size = 97"))
    training, _ = prepared(tmp_path / "tiny.toml", [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=3"])
    fit(training)
    out = tmp_path / "out"
    assert run("convert", tmp_path / "run", out, "--to", "hf") == 0
    theirs, ours = (AutoTokenizer.from_pretrained(folder) for folder in (start, out))
    message = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(message, tokenize=False) == theirs.apply_chat_template(message, tokenize=False) == "hi!"
    assert ours("Hello 1").input_ids == theirs("Hello 1").input_ids
    settings = [GenerationConfig.from_pretrained(folder).to_diff_dict() for folder in (start, out)]
    assert settings[0] == settings[1] and settings[1]["temperature"] == 0.7
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(out).eval()(ids).logits
    weights = Folder(out)
    assert logits.shape == (1, 3, 97) and weights.facts.ends == (2, 5)
    text = (out / "README.md").read_text()
    assert cells(text)["Base model"] == str(start)
    hub = pytest.importorskip("huggingface_hub")
    assert hub.ModelCard(text).data.base_model == str(start)
