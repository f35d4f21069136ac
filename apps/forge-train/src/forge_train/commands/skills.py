"""`forge-train skills`: lists, shows and installs instructions for coding agents. No torch.

A skill is a folder with a file SKILL.md: YAML front matter with `name`, `description` and `metadata.requires`, then steps in
Markdown. The folders are data of this package. `skills/` at the root of the repository is a link to them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from forge_core.errors import ForgeError, did_you_mean
from forge_core.terminal import Console
from forge_train.commands.options import ListingGroup

FOLDER = Path(__file__).parents[1] / "skills"
"""The folder of the skills that ship with Forge."""

FILE = "SKILL.md"
GATE = re.compile(r"^forge-train doctor --requires (\S+)$", re.MULTILINE)
"""A gate: a command that fails where the steps after it cannot work."""

_FRONT = re.compile(r"---\n(.*?)\n---\n(.*)", re.DOTALL)
_COMMANDS = ("list", "show", "install")
_CLAUDE, _AGENTS = Path(".claude"), Path(".agents")


class _Skills(ListingGroup):
    """The command without a subcommand lists the skills; with the name of a skill it shows that one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses arguments as typer does, after `show` where the first word is no subcommand."""
        named = args and not args[0].startswith("-") and args[0] not in self.commands
        return super().parse_args(ctx, ["show", *args] if named and not ctx.resilient_parsing else args)


skills = typer.Typer(
    cls=_Skills,
    add_completion=False,
    rich_markup_mode=None,
    help="List the skills for coding agents, show one, and install them into a project. `skills NAME` is `skills show NAME`.",
)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


@dataclass(frozen=True)
class Skill:
    """A skill.

    Attributes:
        description: what it does and when to use it.
        requires: names of `forge-train doctor --requires` that the whole skill needs.
        optional: names that only some of its sections need; without them, these sections are left out.
        text: the whole file.
        folder: folder of the skill, which may have further files.
    """

    name: str
    description: str
    requires: tuple[str, ...]
    optional: tuple[str, ...]
    text: str
    folder: Path

    def as_json(self) -> dict[str, Any]:
        """Returns the skill as plain data, without its text."""
        return {
            "name": self.name,
            "description": self.description,
            "requires": list(self.requires),
            "optional": list(self.optional),
            "file": str(self.folder / FILE),
        }


def read_skill(folder: Path) -> Skill:
    """Reads the skill in a folder.

    Raises:
        ForgeError: the file is missing, or its front matter lacks a key.
    """
    import yaml

    path = folder / FILE
    try:
        text = path.read_text(encoding="utf-8")
        parts = _FRONT.fullmatch(text)
        front = yaml.safe_load(parts[1]) if parts else None
        requires = _names(front["metadata"]["requires"])  # pyright: ignore[reportOptionalSubscript]
        gates = dict.fromkeys(name for names in GATE.findall(text) for name in _names(names))
        optional = tuple(name for name in gates if name not in requires)
        return Skill(front["name"], front["description"].strip(), requires, optional, text, folder)  # pyright: ignore[reportOptionalSubscript]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError) as cause:
        raise ForgeError(
            f"{path} is no skill ({type(cause).__name__}: {cause}): it begins with YAML front matter that has name, description "
            "and metadata.requires; install forge-train again if you did not change it"
        ) from cause


def shipped_skills() -> list[Skill]:
    """Returns the skills that ship with Forge, by name.

    Raises:
        ForgeError: the installation has none.
    """
    found = [read_skill(folder) for folder in sorted(FOLDER.glob("*/")) if (folder / FILE).is_file()]
    if not found:
        raise ForgeError(f"{FOLDER} has no skills: this installation is incomplete; install forge-train again")
    return found


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _chosen(names: Sequence[str]) -> list[Skill]:
    """Returns the named skills; all if there is no name.

    Raises:
        ForgeError: a name is unknown.
    """
    found = shipped_skills()
    known = [skill.name for skill in found]
    for name in names:
        if name not in known:
            near = did_you_mean(name, [*known, *_COMMANDS])
            listed = f"known: {', '.join(known)}"
            raise ForgeError(f"no skill is called {name!r}; {near if near.startswith('did') else listed}")
    return [skill for skill in found if not names or skill.name in names]


@skills.command(name="list")
def list_(as_json: _Json = False) -> None:
    """List the skills with what they require.

    "requires" is what the whole skill needs; "for some steps" is what sections need that are left out without it. The names are
    those of `forge-train doctor --requires`.
    """
    console = Console(as_json=as_json)
    found = shipped_skills()
    if as_json:
        console.document([skill.as_json() for skill in found])
    rows = ((one.name, ", ".join(one.requires), ", ".join(one.optional), one.description.partition(". ")[0]) for one in found)
    console.table(("skill", "requires", "for some steps", "what it does"), rows)


@skills.command()
def show(
    name: Annotated[str, typer.Argument(help="Name of a skill, such as smoke-test.", show_default=False)], as_json: _Json = False
) -> None:
    """Print a skill."""
    console = Console(as_json=as_json)
    (skill,) = _chosen([name])
    if as_json:
        console.document({**skill.as_json(), "text": skill.text})
    console.text(skill.text.rstrip("\n"))


@skills.command()
def install(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]",
            help="Folder for the skills. Default: .claude/skills if this directory has a folder .claude, else .agents/skills.",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        str, typer.Option("--only", help="Skills, separated by commas: smoke-test,debug-a-run.", show_default=False)
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace files that differ from those of this version.")] = False,
    as_json: _Json = False,
) -> None:
    """Copy the skills to where a coding agent looks for them.

    A file that is there with other content is never replaced without --force: then nothing is written, and all such files are
    listed. Files of the folder that are no skills of Forge stay as they are.
    """
    console = Console(as_json=as_json)
    chosen = _chosen(_names(only))
    if directory is None:
        directory = (_CLAUDE if _CLAUDE.is_dir() else _AGENTS) / "skills"
    wanted = {
        directory / skill.name / file.relative_to(skill.folder): file.read_bytes()
        for skill in chosen
        for file in sorted(skill.folder.rglob("*"))
        if file.is_file()
    }
    states = {path: _state(path, content) for path, content in wanted.items()}
    changed = [path for path, state in states.items() if state == "replaced"]
    if changed and not force:
        raise ForgeError(
            f"these files in {directory} differ from the skills of this version of Forge: {', '.join(map(str, changed))}. "
            "Nothing was written; save what you changed and add --force to replace them, choose another folder, or name other "
            "skills with --only"
        )
    _write({path: content for path, content in wanted.items() if states[path] != "unchanged"})
    if as_json:
        files = [{"file": str(path), "state": state} for path, state in states.items()]
        console.document({"directory": str(directory), "files": files})
    for path, state in states.items():
        console.text(f"{state:9}  {path}")


def _state(path: Path, content: bytes) -> str:
    """Returns what an installation does with a file: `written`, `replaced` or `unchanged`.

    Raises:
        ForgeError: a file is where a folder has to be, or the other way round, or it cannot be read.
    """
    try:
        there = next(folder for folder in path.parents if folder.exists())
        if not there.is_dir():
            raise ForgeError(f"{there} is a file, but the skills need a folder there; name another folder, or move the file away")
        if path.is_dir():
            raise ForgeError(f"{path} is a folder, but a skill has a file of this name; move the folder away")
        if not path.exists():
            return "written"
        return "unchanged" if path.read_bytes() == content else "replaced"
    except OSError as cause:
        raise ForgeError(f"{path} cannot be read: {cause.strerror}; name another folder, or change its permissions") from cause


def _write(files: dict[Path, bytes]) -> None:
    from forge_core.files import replace_file

    for path, content in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
        except OSError as cause:
            raise ForgeError(
                f"{path} cannot be written: {cause.strerror}; name another folder, or change its permissions"
            ) from cause
