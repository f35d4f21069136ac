"""Commands of all pages: their options exist, and each one runs as written, unless `LEFT_OUT` says why it does not run here.

`test_howto.py` runs how-to pages and tutorials from top to bottom, `test_skills.py` the skills, `test_pages.py` the pages whose
`bash` blocks are made for it, and `nox -s examples` the pages of examples. All other blocks of commands run here.
"""

import re
import tomllib
from pathlib import Path

import pytest
from typer import BadParameter

from forge_core.errors import ForgeError
from harness.pages import NAMED, ROOT, calls, lines_of_shell, parse, run_shell
from lab.fake_runs import write_ladder
from train.launch.cluster_programs import fake_slurm

PLACES = ("*.md", "packages/*/*.md", "apps/*/*.md", "docs/**/*.md", "examples/**/*.md", "skills/*/*.md")
PAGES = {str(page.relative_to(ROOT)): page for place in PLACES for page in sorted(ROOT.glob(place)) if "_build" not in page.parts}
BLOCKS = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

LEFT_OUT = {
    r"\bpip install |-m pip |-m venv ": "`nox -s install` runs it in a fresh environment",
    r"\bnox -s |^\.nox/|^export PYTHONPATH=tests": "tools of a clone, which run this test",
    r"PYTHONPATH=tests |benchmarks/": "programs of a clone; a test of their folder runs them on less",
    r"\brun demo\b": "`recipes/test_demo.py` runs it, which takes minutes",
    r"\brun dpo-demo\b": "`recipes/test_tuning_demos.py` runs it",
    r"--watch\b": "it does not end",
    r"runs log runs/large": "the output of a job that a stand-in of SLURM does not run",
    r"--tasks |--lmms ": "its questions are downloaded; `whole_runs` has tasks with files",
    r"--nproc-per-node 8\b|^forge-train launch local recipe\.toml": "needs eight GPUs, or two machines",
    r"--checkpoint\.resume=1500": "a run of so many steps; `checkpoints` and `whole_runs` resume from a step that they name",
    r"doctor --acceptance": "it takes minutes, and needs the whole machine",
    r"bench mfu_scaling (--cluster|--dry-run)": "hours, or minutes of estimates; `lab/test_real_campaign.py` has a short one",
    r"--names (kempnerforge|torchtitan|nanogpt)\b": "`formats/test_frameworks.py` converts such checkpoints",
    r"/scratch/|--rank 3": "folders and ranks of a cluster",
    r"\bmodels/[A-Z]|runs/(mine|vlm)\b|recipe\.toml --world 8": "weights that are downloaded; `models/hf` and `vlm/hf`",
}
"""Patterns of lines that do not run here, and why."""

RECIPE = "printf 'base = \"debug\"\\n' > recipe.toml\n"
RUN = "forge-train run debug --train.max_steps=2 --schedule.warmup=1 --checkpoint.every=1"
SWEEP = "printf 'recipe = \"debug\"\\n[vary]\\noptimizer.lr = [1e-3, 3e-3]\\n[search]\\n' > lr.toml\n"
CLUSTER = """cat > cluster.toml <<'END'
[slurm]
nodes = 2
ranks_per_node = 1
[kubernetes]
nodes = 2
ranks_per_node = 1
volume = "runs"
[container]
image = "lab/forge"
mounts = ["/"]
END
"""
TALK = "".join(
    f"cat > {name} <<'FORGE_PAGE'\n{text}FORGE_PAGE\n{after}"
    for (_, text), name, after in zip(
        BLOCKS.findall(PAGES["docs/howto/fine-tune-on-conversations.md"].read_text())[1:3],
        ("talk.py", "talk.toml"),
        ("python talk.py\n", "cp -r small model\n"),
        strict=True,
    )
)
RECORDING = """cat > recording.py <<'END'
import numpy as np
rng = np.random.default_rng(0)
words = np.array([f"word{n % 7}" for n in range(80)])
seconds = 0.5 * np.arange(84)  # the recording ends 2 s after the last word
np.savez("story.npz", data=rng.normal(size=(84, 3)), words=words, onsets=seconds[:80], times=seconds)
np.savez("sentences.npz", data=rng.normal(size=(8, 3)), stimuli=np.array([f"sentence {n}" for n in range(8)]))
END
python recording.py
"""
KEMPNERFORGE = "[model]\\ndim = 64\\nn_layers = 2\\nn_heads = 4\\n[train]\\nmax_steps = 10\\n[scheduler]\\nwarmup_steps = 1\\n"
TITAN = (
    '[model]\\nname = "llama3"\\nflavor = "8B"\\n[training]\\nlocal_batch_size = 1\\nseq_len = 128\\nsteps = 10\\n'
    "[parallelism]\\ntensor_parallel_degree = 2\\n"
)
TITAN_CODE = """from torchtitan.trainer import Trainer


def llama3_8b() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=128, num_tokens_per_train_step=64 * 128, max_context_length=128, steps=10
        ),
    )
"""
NANOGPT = "n_layer = 2\\nn_head = 4\\nn_embd = 64\\nblock_size = 64\\nbatch_size = 1\\nmax_iters = 10\\n"
MEGATRON = (
    "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 300 --lr 1e-3 "
    "--train-iters 10 --micro-batch-size 1 --global-batch-size 64\\n"
)
TRAINER = '{"max_steps": 10, "per_device_train_batch_size": 2, "block_size": 64, "learning_rate": 1e-3}'

SETUP = {
    "AGENTS.md": "",
    "CONTRIBUTING.md": "",
    "README.md": SWEEP,
    "apps/forge-lab/README.md": "",
    "apps/forge-train/README.md": "",
    **{f"docs/api/{page.name}": "" for page in sorted((ROOT / "docs/api").glob("*.md"))},
    "docs/architecture.md": "",
    "docs/comparison.md": "",
    "docs/concepts/clusters.md": RECIPE + CLUSTER,
    "docs/concepts/configuration.md": "",
    "docs/concepts/conversations.md": TALK,
    "docs/concepts/data-loading.md": "",
    "docs/concepts/doctor.md": "",
    "docs/concepts/experts.md": f"{RUN}\nforge-train convert --from forge --to hf runs/debug exported\n"
    "printf 'base = \"debug\"\\n[model.moe]\\nexperts = 4\\ntop_k = 2\\n' > sparse.toml\n",
    "docs/concepts/fusions.md": "",
    "docs/concepts/images.md": "",
    "docs/concepts/large-worlds.md": "",
    "docs/concepts/planning.md": "",
    "docs/concepts/reliability.md": "",
    "docs/concepts/report.md": f"{RUN} --job.name=small\n{RUN} --job.name=wide --model.dim=32\n",
    "docs/concepts/runs.md": f"{RUN} --job.name=small\n{RUN} --job.name=wide --model.dim=32\n",
    "docs/concepts/training.md": "",
    "docs/exit-codes.md": "",
    "docs/faq.md": "",
    "docs/glossary.md": "",
    "docs/index.md": "",
    "docs/migration/kempnerforge.md": f"mkdir -p configs/train\nprintf '{KEMPNERFORGE}' > configs/train/7b.toml\n",
    "docs/migration/megatron.md": f"printf '%b' '{MEGATRON}' > pretrain_gpt.sh\n",
    "docs/migration/nanogpt.md": f"mkdir config\nprintf '{NANOGPT}' > config/train_gpt2.py\n",
    "docs/migration/overview.md": f"printf '{NANOGPT}' > train_gpt2.py\nprintf '%b' '{MEGATRON}' > pretrain.sh\n",
    "docs/migration/torchtitan.md": "mkdir -p train_configs torchtitan/models/llama3\n"
    f"printf '{TITAN}' > train_configs/llama3_8b.toml\n"
    f"cat > torchtitan/models/llama3/config_registry.py <<'END'\n{TITAN_CODE}END\n",
    "docs/migration/trainer.md": f"printf '{TRAINER}' > arguments.json\n",
    "docs/models/image-text.md": "",
    "docs/models/llama.md": "",
    "docs/models/transformers.md": "",
    "docs/reference/components.md": "",
    "docs/reference/json.md": "",
    "docs/reference/keys.md": "",
    "docs/reference/presets.md": f"{TALK}mkdir texts\nprintf 'A text.' > texts/one.txt\n"
    "sed 's/<|im_end|>/<|endoftext|>/' small/tokenizer.json > tokenizer.json\n",
    "docs/rehearsal.md": "",
    "docs/writing-a-plugin.md": RECIPE.replace("recipe", "mine"),
}
"""Pages that run here -> shell that makes what the commands of the page find."""

BESIDE = {
    "docs/concepts/campaigns.md": "",
    "docs/concepts/checkpoints.md": "",
    "docs/concepts/data-formats.md": "",
    "docs/concepts/interpretability.md": f"{RUN} --job.name=large\n{RUN} --job.name=demo\n{RECORDING}"
    "printf 'A book of words.' > book.txt\n",
    "docs/concepts/sweeps.md": SWEEP,
    "docs/getting-started.md": "mkdir texts\nprintf 'A text.' > texts/one.txt\n",
    "docs/skills.md": "",
}
"""Pages whose `bash` blocks `test_pages.py` runs, and whose `console` blocks run here."""

ELSEWHERE = ("docs/howto/", "docs/tutorials/", "skills/", "examples/")
"""Folders of pages that other tests run."""

MAY_FIND = re.compile(r"^forge-train (doctor\b|check 7b --world 12|\w+ diff )")
"""Lines that end with code 1 or 2 because of what they find: faults of a machine or a recipe, or differences."""


def shell_of(page: Path, languages: str = "bash|console") -> list[str]:
    text = page.read_text()
    return [text for _, _, text in re.findall(rf"^( *)```({languages})\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)]


def left_out(line: str) -> bool:
    return any(re.search(pattern, line) for pattern in LEFT_OUT)


def script(page: Path, languages: str) -> str:
    """The blocks of a page in their order, and its named files, without lines that are left out."""
    parts = []
    for language, text in BLOCKS.findall(page.read_text()):
        if named := NAMED.match(text):
            parts.append(f"cat > {named[1]} <<'FORGE_PAGE'\n{text}FORGE_PAGE\n")
        elif re.fullmatch(languages, language):
            joined = text.replace("\\\n", " ")
            kept = [line for line in joined.splitlines() if line not in lines_of_shell(joined) or not left_out(line)]
            parts += [f"{line} || test $? -le 2\n" if MAY_FIND.match(line) else f"{line}\n" for line in kept]
    return "".join(parts)


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if shell_of(page)])
def test_options_of_every_command_exist(name: str) -> None:
    own: set[str] = set()
    if name.startswith("examples/") and (project := PAGES[name].with_name("pyproject.toml")).exists():
        own = set(tomllib.loads(project.read_text())["project"]["entry-points"].get("forge.commands", {}))
    for block in shell_of(PAGES[name]):
        for call in calls(block):
            if call[0] not in own:
                parse(call)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("forge-train check debug --world 2   # a remark", [["check", "debug", "--world", "2"]]),
        ("A=1 torchrun --nproc-per-node 2 -m forge_train run x.toml > log", [["run", "x.toml"]]),
        ("python -m forge_data inspect 'a | b' && forge-train runs | head", [["data", "inspect", "a | b"], ["runs"]]),
        ("forge-train run a || echo 'forge-train run b'", [["run", "a"]]),
        ("cat > file <<'END'\nforge-train run a\nEND\n! forge-train check c 2> refused", [["check", "c"]]),
        ("forge-train sweep a.toml > job.sh; sbatch job.sh", [["sweep", "a.toml"]]),
    ],
)
def test_calls_are_found(line: str, found: list[list[str]]) -> None:
    assert list(calls(line)) == found


@pytest.mark.parametrize(
    "line",
    [
        "forge-train run debug --train.max_stepz=3",
        "forge-train check debug --wrld 2",
        "forge-train chek debug",
        "forge-train card",
    ],
)
def test_a_call_that_cannot_be_parsed_is_found(line: str) -> None:
    usage = BadParameter.__base__  # UsageError, in the copy of click that typer has
    with pytest.raises((usage or BadParameter, ForgeError)):
        parse(next(calls(line)))


def test_every_page_with_commands_is_run_by_a_test() -> None:
    with_commands = {name for name, page in PAGES.items() if shell_of(page) and not name.startswith(ELSEWHERE)}
    in_test_pages = {"docs/concepts/data.md", "docs/concepts/models.md", "docs/concepts/parallelism.md", "docs/concepts/scale.md"}
    assert with_commands == {*SETUP, *BESIDE, *in_test_pages}
    assert not any(shell_of(PAGES[name], "console") for name in in_test_pages)


def test_what_is_left_out_is_on_a_page_and_exists() -> None:
    lines = [line for page in PAGES.values() for block in shell_of(page) for line in lines_of_shell(block)]
    assert [pattern for pattern in LEFT_OUT if not any(re.search(pattern, line) for line in lines)] == []
    sessions = re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    for line in lines:
        assert set(re.findall(r"\bnox -s (\w+)", line)) <= set(sessions), line
        assert all((ROOT / file).exists() for file in re.findall(r"\bbenchmarks/[\w/]+\.py", line)), line
    for reason in LEFT_OUT.values():
        assert all(list((ROOT / "tests").rglob(file)) for file in re.findall(r"(test_\w+\.py)", reason)), reason
    for line in lines:
        for module in re.findall(r"PYTHONPATH=tests python -m ([\w.]+)", line):
            assert (ROOT / "tests" / f"{module.replace('.', '/')}.py").exists(), line


def run_with_stand_ins(commands: str, work: Path, folder: Path) -> None:
    """Runs commands where programs of SLURM and Kubernetes are found that only record their calls in `folder`."""
    slurm = fake_slurm(folder)
    programs = slurm.folder / "bin"
    (programs / "kubectl").write_text("#!/bin/sh\ncat > /dev/null\n")
    (programs / "kubectl").chmod(0o755)
    variables = f"export RECORDS={slurm.folder} JOBS={slurm.folder}/jobs\nunset SLURM_JOB_ID\n"
    run_shell(variables + commands, work, programs)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SETUP, *BESIDE])
def test_commands_of_a_page_run_as_written(name: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    commands = script(PAGES[name], "console" if name in BESIDE else "bash|console")
    if "sweeps/ladder" in commands:
        write_ladder(work, "sweeps/ladder")
    run_with_stand_ins({**SETUP, **BESIDE}[name] + commands, work, tmp_path / "slurm")
