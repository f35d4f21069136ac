"""`forge-train migrate`: files that it refuses, what it prints, what it writes, and what it never overwrites."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from forge_train.cli import main
from forge_train.migration.formats import FRAMEWORKS

ROOT = Path(__file__).parents[3]
Say = Callable[..., tuple[int, str, str]]
NANOGPT = (
    "batch_size = 4\nn_head = 4\nn_embd = 64\nmax_iters = 50\nwarmup_iters = 5\nlr_decay_iters = 50\nmy_own = 3\ndropout = 0.1\n"
)


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Exit code, output and errors of the command, run in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["migrate", *arguments])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def test_the_recipe_goes_to_standard_output_and_the_report_to_standard_error(say: Say, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NANOGPT)
    code, out, err = say("train.py")
    assert code == 0 and tomllib.loads(out)["model"]["dim"] == 64
    assert "Unknown keys (1)" in err and "my_own = 3 (line 7)" in err
    assert "Not written: Forge has no such value (1)" in err and "dropout = 0.1" in err
    assert "batch_size = 4 -> train.global_batch = 160" in err and "forge-train check finds no fault" in err


def test_the_written_recipe_passes_check_and_is_never_overwritten(say: Say, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NANOGPT)
    code, out, _ = say("train.py", "--out", "new/recipe.toml")
    assert code == 0 and "written to new/recipe.toml" in out
    with pytest.raises(SystemExit) as ended:
        main(["check", "new/recipe.toml"])
    assert not ended.value.code
    before = (tmp_path / "new/recipe.toml").read_text()
    (tmp_path / "new/recipe.toml").write_text("mine")
    code, _, err = say("train.py", "--out", "new/recipe.toml")
    assert code == 2 and "exists; choose another name, or add --force" in err
    assert (tmp_path / "new/recipe.toml").read_text() == "mine"
    assert say("train.py", "--out", "new/recipe.toml", "--force")[0] == 0
    assert (tmp_path / "new/recipe.toml").read_text() == before


def test_json_has_all_keys(say: Say, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NANOGPT + "wandb_run_name = now()\n")
    code, out, _ = say("train.py", "--json")
    document = json.loads(out)
    assert code == 0 and document["framework"] == "nanogpt" and document["faults"] == []
    kinds = {(item["key"], item["kind"]) for item in document["keys"]}
    assert {("my_own", "unknown"), ("dropout", "cannot"), ("n_embd", "translated"), ("batch_size", "converted")} <= kinds
    assert ("wandb_run_name = now()", "unread") in kinds
    assert tomllib.loads(document["recipe"])["train"]["global_batch"] == 160


def test_what_is_to_be_filled_in_is_no_fault_of_the_translation(say: Say, tmp_path: Path) -> None:
    (tmp_path / "arguments.json").write_text('{"max_steps": 10, "per_device_train_batch_size": 2, "block_size": 64}')
    document = json.loads(say("arguments.json", "--json")[1])
    assert document["faults"] == [] and "model.dim" in {blank["key"] for blank in document["fill_in"]}
    assert "but keys are to be filled in" in say("arguments.json")[2]


def test_a_table_begins_with_its_name_and_long_comments_stand_above(say: Say, tmp_path: Path) -> None:
    folder = "/data/" + "very/" * 12
    (tmp_path / "run.toml").write_text(f'[data]\ndataset_path = "{folder}"\n[optimizer]\nlr = 1e-3\nname = "lion"\n')
    out = say("run.toml", "--from", "kempnerforge")[1]
    assert '[optimizer]\nname = "lion"  # optimizer.name = "lion"\n' in out
    assert '\n# data.dataset_path = "/data/very' in out and max(map(len, out.splitlines())) < 200


def test_faults_of_the_recipe_are_listed(say: Say, tmp_path: Path) -> None:
    text = "[model]\ndim = 64\nn_heads = 4\nn_kv_heads = 3\n[train]\nmax_steps = 100\n[scheduler]\nwarmup_steps = 1\n"
    (tmp_path / "run.toml").write_text(text)
    code, out, _ = say("run.toml", "--out", "recipe.toml")
    assert code == 0 and "forge-train check finds 1 fault in the recipe" in out and "kv_heads" in out


@pytest.mark.parametrize(
    ("name", "content", "arguments", "message"),
    [
        ("a.toml", b"", (), "a.toml is empty; name a file with settings"),
        ("a.toml", b"  \n\n", (), "is empty"),
        ("a.bin", b"\x80\x02}q\x00.", (), "is not a text file (byte 0 is not UTF-8); name the configuration, not weights"),
        ("a.txt", b"x\x00y", (), "zero bytes"),
        ("a.json", b"[1, 2]", (), "holds a list, but a configuration is a table of keys"),
        ("a.json", b'{"a": ', (), "is not valid JSON"),
        ("a.yaml", b"a: [1", (), "is not valid YAML"),
        ("a.py", b"def (", (), "is not valid Python"),
        ("a.md", b"# A page\n\nSome words.\n", (), "is not a configuration of a known framework"),
        ("a.toml", b'[package]\nname = "x"\n', (), "KempnerForge (--from kempnerforge): a TOML file"),
        ("a.toml", b'base = "debug"\n[optimizer]\nlr = 1e-3\n', (), "is a recipe of Forge already; check it with"),
        (
            "a.toml",
            b"[model]\ndim = 64\nlayers = 2\n[data]\nsequence_length = 8\n[optimizer]\nlr = 1e-3\n",
            (),
            "recipe of Forge",
        ),
        ("a.toml", b"[model]\ndim = 64\n", ("--from", "other"), "--from other: choose one of kempnerforge, torchtitan, megatron"),
        ("a.toml", b"[model]\ndim = 64\n", ("--from", "trainer"), "is not a configuration of transformers' Trainer"),
        ("a.toml", b"[optimizer]\nlr = 1e-3\n", (), "may be a configuration of KempnerForge and torchtitan; name the framework"),
        ("a.toml", b"[train]\nbatch_size = 'x'\n", (), 'train.batch_size = "x" (line 2): KempnerForge expects an integer'),
        ("a.toml", b"[train]\nbatch_size = 0\n", (), "an integer above 0"),
        ("a.toml", b"[train]\nseq_len = 8\n", ("--function", "f"), "--function f names a function of a torchtitan Python file"),
        ("a.py", b"n_layer = 2\nblock_size = 8\n", ("--function", "f"), "torchtitan Python file, which a.py is not; remove it"),
        ("a.toml", b"[train]\nseq_len = 8\n", ("--force",), "--force replaces the file of --out"),
        ("a.toml", b"[train]\nseq_len = 8\n", ("--out", "."), "--out . is a directory; name a file"),
        ("a.toml", b"[train]\nseq_len = 8\n[distributed]\ntp = 4\n", ("--world", "6"), "a multiple of 4 processes"),
    ],
)
def test_wrong_input_is_refused_with_a_remedy(
    say: Say, tmp_path: Path, name: str, content: bytes, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    code, out, err = say(name, *arguments)
    assert code == 2 and out == "" and message in err
    assert "Traceback" not in err and {path.name for path in tmp_path.iterdir()} == {name}


def test_a_missing_file_and_a_directory_are_refused(say: Say) -> None:
    assert "cannot be read: No such file" in say("missing.toml")[2]
    assert "is a directory; name the configuration file in it" in say(".")[2]


def test_a_preset_of_forge_is_refused(say: Say, tmp_path: Path) -> None:
    from forge_core.registry import Registry

    registry = Registry()
    for entry in registry.of("forge.presets"):
        (tmp_path / "preset.toml").write_text(registry.load_entry(entry).read_text())
        code, _, err = say("preset.toml")
        assert code == 2 and "is a recipe of Forge already" in err, entry.name


def test_neither_help_nor_a_migration_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NANOGPT)
    code = (
        "import sys\nfrom forge_train.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit as ended:\n"
        "    assert not ended.code\nassert 'torch' not in sys.modules"
    )
    for arguments in (("migrate", "--help"), ("migrate", "train.py")):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr


def test_the_pages_have_the_tables_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    tables = import_module("migration_tables")
    for name, framework in FRAMEWORKS.items():
        text = (ROOT / f"docs/migration/{name}.md").read_text()
        assert text == tables.page(framework), "run `python docs/_ext/migration_tables.py`"
        for key in framework.keys:
            assert f"`{key.name}`" in text


def test_the_overview_names_every_framework_and_outcome() -> None:
    page = (ROOT / "docs/migration/overview.md").read_text()
    assert all(f"]({name}.md)" in page and framework.title in page for name, framework in FRAMEWORKS.items())
    assert "--force" in page and "--function" in page and "--world" in page
