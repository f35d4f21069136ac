"""The skills for coding agents: their form, their gates, and every command in them as it is written."""

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge_train import cli
from forge_train.commands.skills import FILE, FOLDER, GATE, Skill, shipped_skills
from forge_train.doctor.requirements import REQUIREMENTS
from harness.pages import calls, lines_of_shell, parse
from train.launch.cluster_programs import fake_slurm

ROOT = Path(__file__).parents[2]
SKILLS = {skill.name: skill for skill in shipped_skills()}
NAMES = (
    *("add-a-component", "cluster-config", "component-gaps", "debug-a-run", "explain-architecture", "fine-tune"),
    *("install-and-verify", "plan-a-run", "slurm-launch", "smoke-test"),
)
TINY = ("debug", "rsqrt.toml", "tune.toml")
"""Recipes that train in seconds on a CPU."""

NEEDS = {
    "slurm": r"^ *(sinfo|squeue|srun|sbatch|scancel|sacct|sacctmgr|scontrol)\b|--submit\b",
    "multi-node": r"^ *srun .*--nodes[= ]*[2-9]|--nodes[= ]*[2-9].*--submit\b|--machines\b",
    "gpu": rf"^ *nvidia-smi\b|--only [\w,]*\b(gpus|device|matmul|kernels|bandwidth)\b|--precision\.compute=(bf16|fp16)"
    rf"|--transforms\.float8|forge-train launch local (?!.*--processes)|forge-train run (?!({'|'.join(map(re.escape, TINY))})\b)",
    "hf": r"^ *hf (download|auth|upload)\b|huggingface[:.]",
    "wandb": r'name ?= ?"wandb"|^ *wandb ',
}
"""What a command needs, recognized by what it says. `torch` is what all need."""

INSTALLS = re.compile(r"^ *(sudo |uv )?(pip|apt|apt-get|conda|python3? -m (pip|venv)) ", re.MULTILINE)


@dataclass
class Block:
    """Commands of one code block, the gates before them in the skill and in their section, and the section's title."""

    text: str
    section: str
    gates: set[str] = field(default_factory=set)
    is_gate: bool = False


def blocks(skill: Skill) -> Iterator[Block]:
    """Every block of commands in its order. A gate at the top holds for the whole skill, others for their sections."""
    everywhere: set[str] = set()
    for number, section in enumerate(re.split(r"^(?=## )", skill.text, flags=re.MULTILINE)):
        gates = set(everywhere)
        for _, text in re.findall(r"^```(bash|console|sh|shell)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
            gate = GATE.fullmatch(text.strip())
            if gate:
                gates |= set(gate[1].split(","))
            yield Block(text, section.partition("\n")[0], set(gates), gate is not None)
        if number == 0:
            everywhere = gates


def needs(text: str) -> set[str]:
    return {name for name, pattern in NEEDS.items() for line in lines_of_shell(text) if re.search(pattern, line)}


@pytest.fixture(params=NAMES)
def skill(request: pytest.FixtureRequest) -> Skill:
    return SKILLS[request.param]


def test_the_skills_are_those_of_the_list() -> None:
    assert tuple(SKILLS) == NAMES


def test_the_folder_at_the_root_is_the_folder_of_the_package() -> None:
    """One true place: a link, no copy."""
    link = ROOT / "skills"
    assert link.is_symlink() and link.resolve() == FOLDER.resolve() and not link.readlink().is_absolute()


def test_the_front_matter_follows_the_convention(skill: Skill) -> None:
    """Names, lengths and keys of the open Agent Skills format, https://agentskills.io/specification."""
    front = yaml.safe_load(skill.text.split("---\n")[1])
    assert set(front) == {"name", "description", "metadata"}
    assert (
        front["name"] == skill.folder.name and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", front["name"]) and len(front["name"]) <= 64
    )
    assert 50 < len(front["description"]) <= 1024 and re.search(r"\bUse it\b", front["description"])
    assert all(isinstance(value, str) for value in front["metadata"].values())
    assert len(skill.text.splitlines()) < 500, "longer instructions belong into further files"


def test_a_skill_is_gated_by_what_it_requires(skill: Skill) -> None:
    known = {step.name for step in REQUIREMENTS}
    gates = [block for block in blocks(skill) if block.is_gate]
    assert gates[0].section.startswith("---") and gates[0].gates == set(skill.requires) != set(), "the gate is at the top"
    assert set(skill.requires) | set(skill.optional) <= known
    assert skill.optional == tuple(dict.fromkeys(name for gate in gates[1:] for name in GATE.findall(gate.text)[0].split(",")))


def test_a_command_stands_behind_the_gate_of_what_it_needs(skill: Skill) -> None:
    for block in blocks(skill):
        if not block.is_gate:
            assert needs(block.text) <= block.gates, block


def test_a_gate_has_a_command_behind_it_that_needs_it(skill: Skill) -> None:
    needed: dict[str, set[str]] = {}
    for block in blocks(skill):
        if not block.is_gate:
            needed.setdefault(block.section, set()).update(needs(block.text))
    everywhere = set(skill.requires) - {"torch"}
    assert everywhere <= set().union(*needed.values())
    for block in blocks(skill):
        if block.is_gate and not block.section.startswith("---"):
            assert block.gates - {"torch"} - everywhere <= needed[block.section], block


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("srun --nodes=2 hostname", {"slurm", "multi-node"}),
        ("forge-train launch slurm debug --nodes 2 --submit", {"slurm", "multi-node"}),
        ("forge-train launch slurm debug --nodes 2", set()),
        ("forge-train run 7b", {"gpu"}),
        ("forge-train run debug", set()),
        ("forge-train launch local debug", {"gpu"}),
        ("forge-train launch local debug --processes 2", set()),
        ("hf download OWNER/NAME", {"hf"}),
        ("forge-train run debug --trackers='[{name=\"wandb\"}]'", {"wandb"}),
        ("cat > x <<'END'\nsrun a\nEND\nforge-train check x", set()),
    ],
)
def test_what_a_command_needs_is_recognized(command: str, found: set[str]) -> None:
    assert needs(command) == found


def test_only_the_line_of_the_readme_installs_something(skill: Skill) -> None:
    """`nox -s install` runs that line in a fresh environment, so it does not run here."""
    found = [block for block in blocks(skill) if INSTALLS.search(block.text)]
    assert len(found) == (skill.name == "install-and-verify")
    for block in found:
        assert block.text in (ROOT / "docs/getting-started.md").read_text() and not block.gates


def test_options_of_every_command_exist(skill: Skill) -> None:
    found = [call for block in blocks(skill) for call in calls(block.text)]
    assert len(found) >= 4
    for call in found:
        parse(call)


@cache
def has(requirement: str, path: str) -> bool:
    """Whether `forge-train doctor --requires` ends with 0; where it does not, it says how to get what is missing."""
    done = bash(f"forge-train doctor --requires {requirement}", Path("/"), {**os.environ, "PATH": path})
    assert done.returncode in (0, 2), done.stderr
    assert done.returncode == 0 or "\n           -> " in done.stdout, done.stdout
    return done.returncode == 0


def bash(script: str, folder: Path, environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def run_commands(
    skill: Skill, folder: Path, environment: Mapping[str, str], chosen: Callable[[Block], Any] = lambda _: True
) -> list[Block]:
    """Runs all chosen blocks in one shell as an agent would; returns those that were left out because of a gate."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    script, left = [], []
    for block in filter(chosen, blocks(skill)):
        if all(has(name, path) for name in block.gates):
            if not INSTALLS.search(block.text):
                script.append(block.text)
        else:
            left.append(block)
    variables = {"PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": environment.get("HF_HUB_OFFLINE", "1"), "NO_COLOR": "1"}
    done = bash("\n".join(script), folder, {**environment, **variables})
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return left


@pytest.mark.slow
def test_every_command_of_a_skill_runs_in_an_empty_directory(skill: Skill, tmp_path: Path) -> None:
    left = run_commands(skill, tmp_path, os.environ)
    assert all(block.gates - {"torch"} for block in left), "what needs nothing special runs everywhere"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slurm-launch", "cluster-config", "smoke-test"])
def test_commands_for_slurm_run_with_stand_ins_of_its_programs(name: str, tmp_path: Path) -> None:
    fake = fake_slurm(tmp_path / "slurm")
    (fake.folder / "bin/sinfo").write_text("#!/bin/sh\nprintf 'gpu|up|idle|3\\ngpu|up|down*|5\\n'\n")
    (fake.folder / "bin/scancel").write_text(f'#!/bin/sh\necho "$@" >> {fake.folder}/scancel\n')
    for program in ("sinfo", "scancel"):
        (fake.folder / "bin" / program).chmod(0o755)
    (tmp_path / "work").mkdir()
    environment = {name: value for name, value in fake.environment.items() if name != "SLURM_JOB_ID"}
    slow = name == "smoke-test"  # the test above has run what needs no SLURM, and nothing of it is needed here
    left = run_commands(SKILLS[name], tmp_path / "work", environment, lambda block: not slow or "slurm" in block.gates)
    assert left == []
    if name == "slurm-launch":
        assert fake.calls("sbatch") == ["--parsable"] * 2 and fake.calls("scancel") == ["41"]


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """Exit code and JSON document of `forge-train skills ...`, run in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, Any]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["skills", *arguments, "--json"])
        return int(ended.value.code or 0), json.loads(capsys.readouterr().out)

    return run


Said = Callable[..., tuple[int, Any]]


def test_the_list_says_what_each_skill_requires(said: Said) -> None:
    code, found = said()
    listed = {one["name"]: one for one in found}
    assert code == 0 and tuple(listed) == NAMES
    assert (listed["slurm-launch"]["requires"], listed["slurm-launch"]["optional"]) == (["slurm"], ["multi-node"])
    assert listed["fine-tune"]["optional"] == ["hf", "gpu"] and Path(listed["fine-tune"]["file"]).name == FILE
    assert said("list") == (0, found)
    assert (
        said("show", "fine-tune")
        == said("fine-tune")
        == (0, {**listed["fine-tune"], "text": (FOLDER / "fine-tune" / FILE).read_text()})
    )


@pytest.mark.parametrize(("agent", "folder"), [(None, ".agents/skills"), (".claude", ".claude/skills")])
def test_skills_are_installed_where_an_agent_looks(agent: str | None, folder: str, said: Said, tmp_path: Path) -> None:
    if agent:
        (tmp_path / agent).mkdir()
    code, found = said("install")
    assert code == 0 and found["directory"] == folder
    assert found["files"] == [{"file": f"{folder}/{name}/{FILE}", "state": "written"} for name in NAMES]
    written = {
        str(path.relative_to(tmp_path / folder)): path.read_bytes() for path in (tmp_path / folder).rglob("*") if path.is_file()
    }
    assert written == {f"{name}/{FILE}": (FOLDER / name / FILE).read_bytes() for name in NAMES}
    assert {one["state"] for one in said("install")[1]["files"]} == {"unchanged"}


def test_a_changed_file_is_replaced_by_force_only(said: Said, tmp_path: Path) -> None:
    assert said("install", "mine", "--only", "smoke-test, fine-tune")[1]["files"][0]["file"] == f"mine/fine-tune/{FILE}"
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["fine-tune", "smoke-test"]
    changed, own = tmp_path / "mine/smoke-test" / FILE, tmp_path / "mine/smoke-test/notes.md"
    changed.write_text("changed")
    own.write_text("of the user")
    code, refusal = said("install", "mine")
    assert code == 2 and f"mine/smoke-test/{FILE}" in refusal["message"] and "--force" in refusal["message"]
    assert "fine-tune" not in refusal["message"]
    assert changed.read_text() == "changed" and len(list((tmp_path / "mine").iterdir())) == 2, "nothing was written"
    code, found = said("install", "mine", "--force")
    states = {one["file"].split("/")[1]: one["state"] for one in found["files"]}
    assert code == 0 and states == {**dict.fromkeys(NAMES, "written"), "smoke-test": "replaced", "fine-tune": "unchanged"}
    assert changed.read_bytes() == (FOLDER / "smoke-test" / FILE).read_bytes() and own.read_text() == "of the user"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "smoke-tset"], ["did you mean 'smoke-test'"]),
        (["show", "xyzzy"], ["known: add-a-component", ", smoke-test"]),
        (["smoke-tset"], ["did you mean 'smoke-test'"]),
        (["instal"], ["did you mean 'install'"]),
        (["install", "--only", "smoke-test,fine-tuning"], ["fine-tuning", "did you mean 'fine-tune'"]),
        (["install", "file"], ["file is a file", "name another folder"]),
        (["install", "file/below"], ["file is a file"]),
        (["install", "holds-a-file"], ["holds-a-file/smoke-test is a file"]),
        (["install", "holds-a-folder"], [f"holds-a-folder/smoke-test/{FILE} is a folder"]),
        (["install", "/proc/skills"], ["cannot be written", "name another folder"]),
    ],
)
def test_bad_input_of_skills_is_refused(arguments: list[str], words: list[str], said: Said, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "holds-a-file").mkdir()
    (tmp_path / "holds-a-file/smoke-test").write_text("")
    (tmp_path / "holds-a-folder/smoke-test" / FILE).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    code, refusal = said(*arguments)
    assert code == 2 and refusal["ok"] is False and all(word in refusal["message"] for word in words), refusal
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("text", ["no front matter", "---\nname: x\n---\n", "---\n: [\n---\n", None])
def test_a_broken_installation_is_told(text: str | None, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_train.commands.skills.FOLDER", tmp_path / "broken")
    if text is not None:
        (tmp_path / "broken/x").mkdir(parents=True)
        (tmp_path / "broken/x" / FILE).write_text(text)
    code, refusal = said()
    assert code == 2 and "install forge-train again" in refusal["message"]


def test_the_pages_name_every_skill() -> None:
    page, agents = (ROOT / "docs/skills.md").read_text(), (ROOT / "AGENTS.md").read_text()
    assert all(f"| `{name}` |" in page and f"[{name}](skills/{name}/{FILE})" in agents for name in NAMES)


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    page = (ROOT / "docs/skills.md").read_text()
    script = "\n".join(re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = bash(script, tmp_path, {**os.environ, "PATH": path})
    assert done.returncode == 0, done.stderr
    assert sorted(folder.name for folder in (tmp_path / ".agents/skills").iterdir()) == list(NAMES)


def test_a_wheel_has_the_skills_and_finds_them(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT / "apps/forge-train", check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if "/skills/" in name} == {
            f"forge_train/skills/{name}/{FILE}" for name in NAMES
        }
        archive.extractall(tmp_path / "installed")
    code = (
        "from forge_train.commands.skills import FOLDER, shipped_skills; print(FOLDER, *(one.name for one in shipped_skills()))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "installed"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == [str(tmp_path / "installed/forge_train/skills"), *NAMES]
