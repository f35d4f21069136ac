"""Everything that is run on this repository: `nox -l` lists it, `nox -s NAME -- arguments` runs one.

Sessions that use the distributions share one environment, `.nox/workshop`: torch is large, and installing it once
is most of the time of a first run. It is brought up to date only when a requirement changed. `lint` needs no torch;
`isolation` makes an environment per wheel.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PROJECTS = (*sorted((ROOT / "packages").iterdir()), *sorted((ROOT / "apps").iterdir()))
EXAMPLES = tuple(sorted(path.parent for path in (ROOT / "examples").glob("*/tests")))
"""Small repositories: a wheel has a `pyproject.toml`, a program a `requirements.txt`."""
CONSTRAINTS = ROOT / "constraints.txt"
TOOLS = ("hatchling", "hypothesis", "pyright", "pytest", "pytest-xdist")
LIBRARIES = (
    *("lion-pytorch", "lm-eval[hf]", "safetensors", "schedulefree", "tensorboard", "torchao", "transformers", "wandb"),
    *("accelerate", "gguf", "peft", "trl"),
    *("av", "datasets", "fsspec", "pyarrow", "scikit-learn", "sentencepiece", "tiktoken", "torchdata", "zstandard"),
    *("flask", "flask-cors", "moto[s3]", "s3fs"),
    *("h5py", "ipykernel", "matplotlib", "nbclient", "scikit-learn", "scipy", "xarray", "zarr"),
)
TRITON = "triton==3.7.1"
"""The version that torch of `constraints.txt` requires where it is built for CUDA. Only the rehearsal has one."""
FLA = ("fla-core==0.6.0", "einops==0.8.2")
"""Kernels of recurrent layers, which the rehearsal runs in Triton's interpreter."""
DOCUMENTATION = ("furo", "myst-nb", "sphinx")
WORKSHOP = ROOT / ".nox" / "workshop"
EVERY = "slow or not slow"
FAST = "not gpu and not slow and not slurm and not rehearsal"
CLUSTER = {
    **dict.fromkeys(("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue"), "slurm-wlm"),
    **dict.fromkeys(("munged", "munge"), "munge"),
    **dict.fromkeys(("unshare", "nsenter", "setpriv"), "util-linux"),
    "ip": "iproute2",
    "nft": "nftables",
}
"""Programs of `nox -s slurm`, and the packages of Debian that have them."""
SUPPORTED = ((3, 11), (3, 12), (3, 13), (3, 14))
TORCHES = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""Releases of torch that Forge supports. The first one is what the distributions require at least."""
TRANSFORMERS = "5.20"
"""The oldest release of transformers that the distributions admit. `constraints.txt` has the newest one that was tried."""

nox.options.sessions = ["lint", "types", "tests"]
nox.needs_version = ">=2024.4"


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Train a small model on real text: corpus, tokenizer, training, report. Run again, it resumes; `-- --fresh` starts over."""
    _workshop(session, tools=False)
    session.run(_tool("forge-train"), "run", "demo", *session.posargs, external=True)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Everything that needs no accelerator and no patience, two at a time; `-- -n 0` runs one by one."""
    with _files_in_memory() as variables:
        _pytest(session, FAST, "-n", "2", "--dist", "worksteal", environment=variables)


@nox.session(venv_backend="none")
def slow(session: nox.Session) -> None:
    """The tests that take minutes; then, without arguments, `examples`, `oldest`, and each pair of the `matrix` whose Python is
    there."""
    none_collected = 5
    _pytest(session, "slow and not gpu", success=(0, none_collected))
    if not session.posargs:
        session.notify("examples")
        session.notify("oldest")
        session.notify("matrix")


@nox.session(venv_backend="none")
def slurm(session: nox.Session) -> None:
    """Jobs on a real SLURM of two nodes, runs on two hosts; needs root. `-- tests/train/launch/test_real_slurm.py` is short."""
    programs = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"
    missing = {package for program, package in CLUSTER.items() if shutil.which(program, path=programs) is None}
    if missing:
        session.error(f"apt-get install {' '.join(sorted(missing))}, for a SLURM and network namespaces on this machine")
    if os.geteuid() != 0:
        session.error("start it as root: daemons of SLURM and network namespaces need that")
    place = () if any(argument.startswith("tests/") for argument in session.posargs) else ("tests/train/launch",)
    _pytest(session, "slurm and not gpu", "-n", "2", "--dist", "loadfile", *place)


@nox.session(venv_backend="none")
def rehearsal(session: nox.Session) -> None:
    """What runs on GPUs only, on CUDA devices made of host memory; what is compiled for them. The first time g++ builds them."""
    _workshop(session)
    triton, fla = ROOT / ".nox" / TRITON, ROOT / ".nox" / FLA[0]
    for place, wanted in (
        (triton, (TRITON,)),
        (fla, FLA),
    ):  # not in the workshop: torch behaves differently where it finds Triton
        if sys.platform == "linux" and not place.exists():
            with tempfile.TemporaryDirectory(dir=place.parent) as fresh:
                _install(session, _tool("python"), "--no-deps", "--target", f"{fresh}/whole", *wanted)
                Path(fresh, "whole").rename(place)
    kernels = {"FORGE_REHEARSAL_TRITON": str(triton), "FORGE_REHEARSAL_FLA": str(fla)}
    with tempfile.TemporaryDirectory() as reached:  # a part of the rehearsal says nothing of the lines that the whole runs
        whole = {} if session.posargs else {"FORGE_REHEARSAL_REACHED": reached}
        _pytest(session, "rehearsal and not gpu and not slow", environment={**kernels, **whole})


@nox.session(venv_backend="none")
def machines(session: nox.Session) -> None:
    """What compares numbers, as on other machines: instruction sets, threads, load. `-- --only avx2 tests/models` is a part."""
    _workshop(session)
    command = (_tool("python"), "-m", "harness.machines", *session.posargs)
    session.run(*command, external=True, env={"PYTHONPATH": "tests"})


@nox.session(venv_backend="none")
def storm(session: nox.Session) -> None:
    """A run of four ranks in half an hour of random faults, against the bits of a clean one; `-- --minutes 5 --seed 1`."""
    _workshop(session)
    variables = {"PYTHONPATH": "tests", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    session.run(_tool("python"), "-m", "train.storm.storm", *session.posargs, external=True, env=variables)


@nox.session(venv_backend="none")
def newest(session: nox.Session) -> None:
    """Tests and isolation with the newest Python on the path and the newest torch, as users get them; downloads gigabytes."""
    interpreter, any_torch = _interpreter(session, newest=True), _constraints("")
    _fast_tests_with(session, ROOT / ".nox" / "newest", interpreter, any_torch, "--upgrade")
    _isolated(session, PROJECTS, [EXAMPLES], interpreter, any_torch)


@nox.session(venv_backend="none")
def oldest(session: nox.Session) -> None:
    """Tests with the oldest Python, the oldest torch and the oldest transformers that Forge supports; downloads gigabytes."""
    interpreter, constraints = _named_interpreter(session, SUPPORTED[0]), _constraints(TORCHES[0], TRANSFORMERS)
    _fast_tests_with(session, ROOT / ".nox" / "oldest", interpreter, constraints)


@nox.session(venv_backend="none")
@nox.parametrize("torch", TORCHES)
@nox.parametrize("version", [".".join(map(str, version)) for version in SUPPORTED])
def matrix(session: nox.Session, version: str, torch: str) -> None:
    """Isolation with every pair of Python and torch; gigabytes for each. `-s "matrix(version='3.11', torch='2.11')"` is one."""
    interpreter = _named_interpreter(session, tuple(map(int, version.split("."))))
    _isolated(session, PROJECTS, [EXAMPLES], interpreter, _constraints(torch))


@nox.session(venv_backend="none")
def install(session: nox.Session) -> None:
    """What the README tells users to install, unpinned, in a fresh environment; then the page that they read first."""
    readme, page = (ROOT / "README.md").read_text(), (ROOT / "docs" / "getting-started.md").read_text()
    line = re.search(r"^pip install (\./packages/.*)$", readme, re.MULTILINE)
    if line is None or line[0] not in page:
        session.error("README.md and docs/getting-started.md do not install Forge with the same line")
    with tempfile.TemporaryDirectory(prefix="forge-install-") as directory:
        place = Path(directory)
        python = _new_environment(session, place / "env", _interpreter(session))
        projects = [str(path) for pattern in line[1].split() for path in sorted(ROOT.glob(pattern.removeprefix("./")))]
        session.run(python, "-m", "pip", "install", "-qq", *projects, external=True)
        session.run(python, "-m", "pip", "check", external=True, silent=True)
        variables = {"PATH": f"{place / 'env' / 'bin'}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        blocks = [
            *re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL),
            "forge-train parity debug --layouts dp2,tp2\n",
            "torchrun --nproc-per-node 2 -m forge_train run debug --job.name=debug-2 --train.max_steps=20\n",
        ]
        with session.chdir(place):
            session.run(python, ROOT / "tests" / "repository" / "isolation" / "newest.py", *TORCHES, external=True)
            session.run("bash", "-euc", "\n".join(blocks), external=True, env=variables)


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Ruff's rules and its formatting."""
    session.install("-q", "-c", str(CONSTRAINTS), "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Pyright over the sources."""
    _workshop(session)
    session.run(_tool("pyright"), "--pythonpath", _tool("python"), *session.posargs, external=True)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """The pages as HTML in `docs/_build/html`, a warning being an error; then links, search and code blocks, slow ones too."""
    _workshop(session)
    _install(session, _tool("python"), *DOCUMENTATION)
    pages = ("-W", "--keep-going", "-q", "-b", "html", "docs", "docs/_build/html")
    session.run(_tool("python"), "-m", "sphinx", *pages, external=True)
    tests = (
        "tests/repository/test_docs.py",
        "tests/repository/test_search.py",
        "tests/repository/test_site.py",
        "tests/train/test_pages.py",
        "tests/train/test_howto.py",
    )
    session.run(_tool("python"), "-m", "pytest", "-q", *tests, *session.posargs, external=True, env={"OMP_NUM_THREADS": "1"})


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """The scripts of `benchmarks/` given as arguments; without any, their names."""
    if not session.posargs:
        for script in sorted((ROOT / "benchmarks").rglob("*.py")):
            session.log(str(script.relative_to(ROOT)))
        return
    _workshop(session)
    for script in session.posargs:
        session.run(_tool("python"), script, external=True)


@nox.session(venv_backend="none")
def build(session: nox.Session) -> None:
    """Wheels and sdists of all distributions into `dist/`, the same bytes for the same commit."""
    _workshop(session)
    dist = ROOT / "dist"
    for old in dist.glob("forge_*"):
        old.unlink()
    date = subprocess.run(("git", "log", "-1", "--format=%ct"), cwd=ROOT, capture_output=True, text=True, check=True)
    variables = {"SOURCE_DATE_EPOCH": date.stdout.strip()}
    for project in PROJECTS:
        with session.chdir(project):
            session.run(_tool("python"), "-m", "hatchling", "build", "-d", dist, external=True, env=variables)


@nox.session(reuse_venv=True)
def sbom(session: nox.Session) -> None:
    """What installing all distributions brings, with versions and licenses, as CycloneDX JSON: `dist/forge.cdx.json`; minutes."""
    session.install("-q", "cyclonedx-bom>=7")
    bill = ROOT / "dist" / "forge.cdx.json"
    bill.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="forge-sbom-") as directory:
        python = _new_environment(session, Path(directory) / "env", _interpreter(session))
        _install(session, python, *PROJECTS)
        session.run(python, "-m", "pip", "uninstall", "-qq", "-y", "pip", external=True)  # it came with the environment
        session.run("cyclonedx-py", "environment", "--output-reproducible", "-o", str(bill), python)
    content = json.loads(bill.read_text())
    for component in content["components"]:
        references = component.pop("externalReferences", [])
        if kept := [item for item in references if not item["url"].startswith("file:")]:  # folders of this machine
            component["externalReferences"] = kept
    bill.write_text(json.dumps(content, indent=2) + "\n")
    session.log(f"{len(content['components'])} distributions in {bill.relative_to(ROOT)}")


@nox.session(venv_backend="none")
def isolation(session: nox.Session) -> None:
    """Each wheel alone with what it declares, in a clean environment; then the examples, in one. Arguments name some of them."""
    chosen, examples = (
        [path for path in paths if not session.posargs or path.name in session.posargs] for paths in (PROJECTS, EXAMPLES)
    )
    _isolated(session, chosen, [examples] if examples else [], _interpreter(session))


@nox.session(venv_backend="none")
def examples(session: nox.Session) -> None:
    """Each folder of `examples/` alone with what it declares, and its tests, slow ones too; `-- forge-fasta` is one."""
    chosen = [path for path in EXAMPLES if not session.posargs or path.name in session.posargs]
    _isolated(session, (), [[path] for path in chosen], _interpreter(session), which=EVERY)


def _isolated(
    session: nox.Session,
    chosen: Sequence[Path],
    examples: Sequence[Sequence[Path]],
    interpreter: str,
    constraints: Path = CONSTRAINTS,
    which: str = "not slow",
) -> None:
    """Tries each project alone, and each group of examples in one environment; `which` selects the tests of examples."""
    spent = {}
    with tempfile.TemporaryDirectory(prefix="forge-isolation-") as directory:
        place, wheels = Path(directory), Path(directory) / "wheels"
        _build(session, wheels, *PROJECTS, *(path for group in examples for path in group if (path / "pyproject.toml").exists()))
        with_torch = place / "with-torch"
        _install(session, _new_environment(session, with_torch, interpreter), "torch", constraints=constraints)
        for project in chosen:
            start = time.monotonic()
            here = place / project.name
            if project.name == "forge-core":
                _new_environment(session, here, interpreter)
            else:  # closure.py shows that the wheel would have brought everything that is in the copy
                shutil.copytree(with_torch, here, symlinks=True, copy_function=os.link)
            _try_alone(session, here, wheels, project.name, constraints)
            shutil.rmtree(here)
            spent[project.name] = time.monotonic() - start
        for group in examples:
            start = time.monotonic()
            name = group[0].name if len(group) == 1 else "examples"
            shutil.copytree(with_torch, place / name, symlinks=True, copy_function=os.link)
            _try_examples(session, place / name, wheels, group, constraints, which)
            shutil.rmtree(place / name)
            spent[name] = time.monotonic() - start
    for name, seconds in spent.items():
        session.log(f"{name:20} {seconds:5.0f} s")


def _try_alone(session: nox.Session, place: Path, wheels: Path, name: str, constraints: Path) -> None:
    """Installs one wheel and runs its script, away from the sources."""
    python, module = str(place / "bin" / "python"), name.replace("-", "_")
    scripts = ROOT / "tests" / "repository" / "isolation"
    wheel = next(wheels.glob(f"{module}-*.whl"))
    _install(session, python, "--find-links", wheels, wheel, constraints=constraints)
    session.run(python, "-m", "pip", "check", external=True, silent=True)
    with session.chdir(place):
        session.run(python, "-I", scripts / "closure.py", name, external=True)
        # forge-models needs no numpy; torch mentions that it is absent
        strict = ("-W", "error", "-W", "ignore:Failed to initialize NumPy")
        session.run(python, "-I", *strict, scripts / f"{module}.py", external=True)


def _try_examples(
    session: nox.Session, place: Path, wheels: Path, examples: Sequence[Path], constraints: Path, which: str
) -> None:
    """Installs examples with what they declare for their tests, and runs their tests, away from the sources of the wheels; with
    slow tests also the commands of their pages."""
    python, wanted = str(place / "bin" / "python"), list[str | Path]()
    for example in examples:
        if (example / "pyproject.toml").exists():
            wheel = next(wheels.glob(f"{example.name.replace('-', '_')}-*.whl"))
            wanted.append(f"{example.name}[test] @ {wheel.as_uri()}")
        else:
            wanted += ["-r", example / "requirements.txt"]
    _install(session, python, "--find-links", wheels, *wanted, constraints=constraints)
    session.run(python, "-m", "pip", "check", external=True, silent=True)
    settings = ("-q", "-c", ROOT / "examples" / "pytest.ini", "-p", "no:cacheprovider", "-m", which)
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with session.chdir(place):
        tests = [example / "tests" for example in examples]
        session.run(python, "-I", "-m", "pytest", *settings, *tests, external=True, env=variables)
        if which == EVERY:
            page = ROOT / "tests" / "repository" / "isolation" / "example_page.py"
            for example in examples:
                session.run(python, "-I", page, example, external=True, env=variables)


def _install(session: nox.Session, python: str, *arguments: str | Path, constraints: Path = CONSTRAINTS) -> None:
    session.run(python, "-m", "pip", "install", "-qq", "-c", constraints, *arguments, external=True)


def _constraints(torch: str, transformers: str = "") -> Path:
    """Writes the constraints with another release of torch, such as 2.11, or with any if it is empty; returns the file.

    A release of `transformers` replaces that of `constraints.txt`.
    """
    releases = {"torch": torch, **({"transformers": transformers} if transformers else {})}
    names = "-".join(f"{name}-{release or 'any'}" for name, release in releases.items())
    place = ROOT / ".nox" / f"constraints-{names}.txt"
    lines = [line for line in CONSTRAINTS.open() if line.partition("==")[0] not in releases]
    place.parent.mkdir(exist_ok=True)
    place.write_text("".join([*lines, *(f"{name}=={release}.*\n" for name, release in releases.items() if release)]))
    return place


def _fast_tests_with(session: nox.Session, place: Path, interpreter: str, constraints: Path, *options: str) -> None:
    """Runs the fast tests in an environment of another Python and torch."""
    there = (place / "bin" / "python").exists()
    python = str(place / "bin" / "python") if there else _new_environment(session, place, interpreter)
    _install(session, python, *options, "torch", *_editable(), *TOOLS, *LIBRARIES, constraints=constraints)
    versions = "print('Python', sys.version, 'torch', torch.__version__, 'transformers', transformers.__version__)"
    session.run(python, "-c", f"import sys, torch, transformers; {versions}", external=True)
    _pytest(session, FAST, "-n", "2", "--dist", "worksteal", python=python)


def _pytest(
    session: nox.Session,
    which: str,
    *options: str,
    success: tuple[int, ...] = (0,),
    python: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    if python is None:
        _workshop(session)
    variables = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(environment or {})}
    arguments = ("-m", which, *options, *session.posargs)
    session.run(python or _tool("python"), "-m", "pytest", *arguments, external=True, env=variables, success_codes=list(success))


@contextmanager
def _files_in_memory() -> Iterator[dict[str, str]]:
    """Yields the variables with which temporary files are in memory, if 8 GiB are free there: each `fsync` waits for a disk."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < 8 << 30:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="forge-tests-", dir=memory) as folder:
        yield {"TMPDIR": folder}


def _workshop(session: nox.Session, tools: bool = True) -> None:
    """The shared environment with every distribution, editable, and with `tools` what tests and checks need."""
    wanted = sha256(sys.version.encode())
    for file in (CONSTRAINTS, *(project / "pyproject.toml" for project in PROJECTS), Path(__file__)):
        wanted.update(file.read_bytes())
    complete, plain = WORKSHOP / "installed", WORKSHOP / "installed-without-tools"
    if any(stamp.exists() and stamp.read_text() == wanted.hexdigest() for stamp in ([complete] if tools else [complete, plain])):
        return
    for stamp in (complete, plain):
        stamp.unlink(missing_ok=True)
    there = Path(_tool("python")).exists()
    python = _tool("python") if there else _new_environment(session, WORKSHOP, _interpreter(session))
    session.log(f"installing the distributions{' and the test tools' if tools else ''}; the first time takes minutes")
    _install(session, python, *_editable(), *((*TOOLS, *LIBRARIES) if tools else ()))
    (complete if tools else plain).write_text(wanted.hexdigest())


def _editable() -> list[str]:
    return [argument for project in PROJECTS for argument in ("-e", str(project))]


def _build(session: nox.Session, into: Path, *projects: Path) -> None:
    _workshop(session)
    for old in into.glob("forge_*.whl"):
        old.unlink()
    without = ("--no-deps", "--no-build-isolation")  # hatchling is in the workshop
    session.run(_tool("python"), "-m", "pip", "wheel", "-qq", *without, "-w", into, *map(str, projects), external=True)


def _new_environment(session: nox.Session, place: Path, interpreter: str) -> str:
    """Makes an environment and returns its interpreter."""
    # nox brings virtualenv, and the venv module of some systems comes without pip
    session.run(sys.executable, "-m", "virtualenv", "-q", "--clear", "-p", interpreter, place, external=True)
    return str(place / "bin" / "python")


def _interpreter(session: nox.Session, newest: bool = False) -> str:
    """A supported Python: the one that runs nox, else the oldest on the path; or the newest of all of them."""
    if sys.version_info[:2] in SUPPORTED and not newest:
        return sys.executable
    found = _interpreters()
    if not found:
        names = ", ".join(f"python{version[0]}.{version[1]}" for version in SUPPORTED)
        session.error(f"Forge runs on {names}; this is Python {sys.version.split()[0]} and none is on the path")
    return found[max(found) if newest else min(found)]


def _named_interpreter(session: nox.Session, version: tuple[int, ...]) -> str:
    """The interpreter of a version; a session without it is skipped, and says what is missing."""
    if (path := _interpreters().get(version)) is None:
        session.skip(f"python{'.'.join(map(str, version))} is neither on the path nor a version of pyenv; install it")
    return path


def _interpreters() -> dict[tuple[int, ...], str]:
    """The supported versions of Python that are on the path or in pyenv: (3, 12) -> path."""
    found: dict[tuple[int, ...], str] = {}
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in SUPPORTED:
        name = f"python{version[0]}.{version[1]}"
        paths = (shutil.which(name), *sorted(map(str, versions.glob(f"{version[0]}.{version[1]}.*/bin/{name}"))))
        if path := next((path for path in paths if path and _runs(path)), None):
            found[version] = path
    if sys.version_info[:2] in SUPPORTED:
        found[sys.version_info[:2]] = sys.executable
    return found


def _runs(python: str) -> bool:
    """Some systems put a name on the path before the Python is chosen that it stands for."""
    return subprocess.run((python, "-c", "import venv"), capture_output=True, check=False).returncode == 0


def _tool(name: str) -> str:
    return str(WORKSHOP / "bin" / name)
