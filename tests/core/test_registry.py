"""Registry rules: lazy, explicit about conflicts, strict about what it loads; rivals for a name change nothing unasked."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from core import sample
from forge_core.config.fields import shapes_in
from forge_core.conformance import checks_of
from forge_core.errors import BrokenPlugin, ConfigError, PluginConflict, UnknownComponent
from forge_core.plugins import describe_plugin, diagnose, find_everywhere
from forge_core.registry import GROUPS, HOMES, MOVED, Entry, Registry, home_of
from forge_core.trust import trust_file
from forge_train.cli import root
from forge_train.recipe.load import Recipe, load_recipe
from harness.tables import parts_of

GOOD = """
from dataclasses import dataclass
from forge_core.component import Component

@dataclass(frozen=True, kw_only=True)
class Mine(Component):
    '''Mine.'''
    rate: float = 1.0
    '''Rate.'''
    def build(self, model):
        return model
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path; what was imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name, module in list(sys.modules.items()):  # no others: a library that is imported twice may not work
        if str(getattr(module, "__file__", None)).startswith(f"{tmp_path}/"):
            del sys.modules[name]


def plugin(modules: Path, name: str, source: str, attribute: str = "Mine", group: str = "optimizers") -> Registry:
    (modules / f"{name}.py").write_text(source)
    return Registry([sample.entry(group, "mine", f"{name}:{attribute}", "stranger", "3.1")])


def test_names_come_without_importing_anything(modules: Path) -> None:
    registry = plugin(modules, "lazy_one", "raise RuntimeError")
    assert registry.names("forge.optimizers") == ["mine"]
    assert registry.find("forge.optimizers", "mine").version == "3.1"
    assert "lazy_one" not in sys.modules


def test_fault_50_a_conflict_names_both_and_a_distribution_chooses() -> None:
    registry = sample.registry(sample.entry("optimizers", "adam", "Muon", "rival_dist", "7"))
    with pytest.raises(PluginConflict) as caught:
        registry.load("forge.optimizers", "adam")
    for word in ("sample 1.0", "rival_dist 7", "'sample:adam'", "'rival_dist:adam'"):
        assert word in str(caught.value)
    assert registry.load("forge.optimizers", "sample:adam") is sample.Adam
    assert registry.load("forge.optimizers", "rival_dist:adam") is sample.Muon
    assert registry.load("forge.optimizers", "Rival-Dist:adam") is sample.Muon  # as packaging compares names
    assert registry.load("forge.optimizers", "muon") is sample.Muon
    assert registry.names("forge.optimizers") == ["muon", "rival_dist:adam", "sample:adam"]


def test_an_unknown_name_gets_the_closest_ones() -> None:
    with pytest.raises(UnknownComponent, match=r"unknown optimizer 'adma'; did you mean 'adam'\?"):
        sample.registry().find("forge.optimizers", "adma")
    with pytest.raises(UnknownComponent, match=r"did you mean 'forge\.optimizers'"):
        sample.registry().of("forge.optimisers")


def test_an_unknown_name_of_a_sibling_says_what_to_install() -> None:
    with pytest.raises(UnknownComponent, match=r"unknown optimizer 'adamw'; .* pip install forge-parallel$"):
        sample.registry().find("forge.optimizers", "adamw")


def test_a_part_that_moved_is_found_under_its_former_distribution() -> None:
    part = Entry("forge.hooks", "inside", "forge-interp", "2.0.0", "anywhere:Inside")
    registry = Registry([part, Entry("forge.hooks", "log", "forge-train", "2.0.0", "anywhere:Log")])
    assert registry.find("forge.hooks", "forge-train:inside") == registry.find("forge.hooks", "Forge_Train:inside") == part
    assert registry.find("forge.hooks", "forge-interp:inside") == registry.find("forge.hooks", "inside") == part
    assert home_of("forge.hooks", "inside", "forge-train") == "forge-interp"
    for others in (("forge.hooks", "log", "forge-train"), ("forge.trackers", "inside", "forge-train")):
        assert home_of(*others) == "forge-train"
    assert home_of("forge.hooks", "inside", "stranger") == "stranger"
    with pytest.raises(UnknownComponent):
        registry.find("forge.hooks", "stranger:inside")


def test_a_part_that_moved_names_its_package_where_that_is_absent() -> None:
    with pytest.raises(UnknownComponent) as caught:
        sample.registry().find("forge.commands", "similarity")
    assert str(caught.value) == "command 'similarity' is part of forge-interp, which is not installed: pip install forge-interp"
    with pytest.raises(UnknownComponent, match="hook 'inside' is part of forge-interp, which is not installed"):
        sample.registry().find("forge.hooks", "forge-train:inside")


def test_parts_moved_to_where_they_are_today() -> None:
    present = {(entry.group, entry.name, entry.distribution) for entry in Registry().entries}
    for part, (former, today) in MOVED.items():
        assert (*part, today) in present and (*part, former) not in present


def test_the_hints_of_pip_install_are_those_of_the_tables() -> None:
    found: dict[str, set[str]] = {}
    for path in Path(__file__).parents[2].glob("*/*/pyproject.toml"):
        if path.parent.name in HOMES:
            found[path.parent.name] = set(parts_of(path.parent))
    every = {"forge.checks", "forge.commands", "forge.conformance"}
    said = {home: set(groups) | every for home, groups in HOMES.items()}
    assert {home: groups | every for home, groups in found.items()} == said


def test_fault_50_a_broken_plugin_hurts_only_who_asks_for_it(modules: Path) -> None:
    registry = plugin(modules, "broken_one", "import a_module_that_is_nowhere")
    registry.entries += sample.registry().entries
    assert registry.load("forge.optimizers", "adam") is sample.Adam
    with pytest.raises(BrokenPlugin) as caught:
        registry.load("forge.optimizers", "mine")
    for word in ("'mine'", "stranger 3.1", "broken_one:Mine", "ModuleNotFoundError", "a_module_that_is_nowhere"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise SystemExit(3)", "SystemExit"),
        ("def (", "SyntaxError"),
        ("class Other: pass", "AttributeError"),
        ("class Mine: pass", "is not a forge_core.component.Component"),
        ("Mine = 3", "is not a forge_core.component.Component"),
        (GOOD.replace("@dataclass(frozen=True, kw_only=True)\n", ""), "is not a dataclass"),
        (GOOD.replace("def build(self, model)", "def make(self, model)"), "has no build method; define build(self, model)"),
        (GOOD.replace("self, model", "self, params, lr"), "has build(self, params, lr); its group calls build(self, model)"),
        (GOOD.replace("self, model", "self"), "has build(self); its group calls build(self, model)"),
        (GOOD.replace("self, model", "self, *, model"), "has build(self, *, model); its group calls build(self, model)"),
        (GOOD.replace("self, model", "self, model, *, lr"), "its group calls build(self, model)"),
        (GOOD.replace("rate: float", "rate: 'Nowhere'"), "Nowhere"),
        (GOOD.replace("def build(self, model)", "implementation = 'mine.Adam'\n    def make(self)"), "write it as 'module:name'"),
    ],
)
def test_fault_50_what_does_not_keep_its_groups_promise_is_refused(source: str, words: str, modules: Path) -> None:
    name = f"bad_{abs(hash(source))}"
    with pytest.raises(BrokenPlugin, match=r"stranger 3\.1") as caught:
        plugin(modules, name, source).load("forge.optimizers", "mine")
    assert words in str(caught.value)


def test_build_may_take_more_with_defaults(modules: Path) -> None:
    for number, parameters in enumerate(["self, model, extra=1, *rest, **more", "self, model=None", "self, model, *, extra=1"]):
        source = GOOD.replace("self, model", parameters)
        assert plugin(modules, f"generous{number}", source).load("forge.optimizers", "mine").__name__ == "Mine"


def test_a_file_is_a_plugin_of_every_group_with_build(tmp_path: Path) -> None:
    for number, group in enumerate(group for group in GROUPS.values() if group.build is not None):
        path = tmp_path / f"mine{number}.py"
        path.write_text(GOOD.replace("self, model", ", ".join(("self", *(group.build or ())))))
        trust_file(path)
        registry = Registry([])
        cls = registry.load(group.name, f"{path}:Mine")
        assert cls(rate=2.0).rate == 2.0
        assert registry.load(group.name, f"{path}:Mine") is cls
        entry = registry.used([(group.name, f"{path}:Mine")])[0]
        assert entry["version"].startswith("sha256:")
        assert shapes_in(cls)["rate"][0].doc == "Rate."


def test_files_that_hold_no_plugin(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    trust_file(path)
    registry = Registry([])
    with pytest.raises(BrokenPlugin, match=r"has no 'Mein'; did you mean 'Mine'\?"):
        registry.load("forge.optimizers", f"{path}:Mein")
    with pytest.raises(UnknownComponent, match=r"nowhere.py:Mine': the file does not exist"):
        registry.load("forge.optimizers", f"{tmp_path}/nowhere.py:Mine")
    with pytest.raises(UnknownComponent, match=r"write it as file\.py:ClassName"):
        registry.load("forge.optimizers", f"{path}:")


def test_damaged_metadata_of_a_stranger_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, points in [
        ("bad", "[forge.optimizers]\nno equals sign\n"),
        ("good", "[forge.optimizers]\nnice = core.sample:Adam\n"),
    ]:
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(points)
    (tmp_path / "empty-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry()
    assert registry.load("forge.optimizers", "nice") is sample.Adam
    assert registry.find("forge.optimizers", "nice") == Entry("forge.optimizers", "nice", "good", "1.0", "core.sample:Adam")


TABLE = """
PARTS = {"forge.optimizers": {"nice": "core.sample:Adam", "absent": "no_module_here:X"}, "forge.norms": {"flat": "nowhere:Flat"}}
"""


def test_a_distribution_of_forge_lists_its_parts_in_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version is that of the installed distribution. A stranger's table is not imported: its entry points count."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, module in (("forge_ckpt", "ckpt_table"), ("stranger", "stranger_table")):
        (tmp_path / f"{module}.py").write_text(TABLE if name == "forge_ckpt" else "raise RuntimeError")
        info = tmp_path / f"{name}-7.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 7.1\n")
        (info / "entry_points.txt").write_text(f"[forge.parts]\nall = {module}:PARTS\n[forge.norms]\n{module} = nowhere:Own\n")
    registry = Registry()
    found = [entry for entry in registry.entries if entry.distribution in ("forge_ckpt", "stranger")]
    assert {(entry.group, entry.name, entry.distribution, entry.version, entry.target) for entry in found} == {
        ("forge.optimizers", "nice", "forge_ckpt", "7.1", "core.sample:Adam"),
        ("forge.optimizers", "absent", "forge_ckpt", "7.1", "no_module_here:X"),
        ("forge.norms", "flat", "forge_ckpt", "7.1", "nowhere:Flat"),
        ("forge.norms", "ckpt_table", "forge_ckpt", "7.1", "nowhere:Own"),
        ("forge.norms", "stranger_table", "stranger", "7.1", "nowhere:Own"),
    }
    assert registry.load("forge.optimizers", "nice") is sample.Adam
    (tmp_path / "ckpt_table.py").write_text("PARTS = lost")
    del sys.modules["ckpt_table"]
    with pytest.raises(BrokenPlugin, match=r"forge_ckpt 7\.1 is damaged: .*ckpt_table:PARTS.*NameError.*install forge_ckpt"):
        Registry()


def test_used_names_distribution_and_version() -> None:
    assert sample.registry().used([("forge.optimizers", "muon")]) == [
        {"group": "forge.optimizers", "name": "muon", "distribution": "sample", "version": "1.0"}
    ]


def test_doctor_finds_what_is_wrong_and_nothing_else(modules: Path) -> None:
    assert not [report for report in diagnose(sample.registry(), conform=True) if report.problems]
    careless = """
from dataclasses import dataclass
from typing import Annotated
from annotated_types import Gt
from forge_core.component import Component


@dataclass(frozen=True)
class Mine(Component):
    rate: Annotated[float, Gt(0)] = 0.0
    '''Rate.'''
    kind: str = None
    def build(self, model): ...
"""
    registry = plugin(modules, "careless", careless)
    registry.entries += [sample.entry("optimizers", "mine", "Adam"), sample.entry("optimizers", "gone", "no_module_here:X")]
    reports = {report.entry.qualified: " ".join(report.problems) for report in diagnose(registry, conform=True)}
    for words in (
        "also claimed by sample 1.0",
        "has no docstring",
        "'kind' has no docstring below",
        "'rate' is not keyword-only",
    ):
        assert words in reports["stranger:mine"]
    assert "default of 'rate': expected a number greater than 0" in reports["stranger:mine"]
    assert "default of 'kind'" in reports["stranger:mine"]
    assert "no_module_here" in reports["sample:gone"]


def test_a_description_shows_keys_with_types_defaults_and_docs() -> None:
    registry = sample.registry()
    keys = {key.name: key for key in describe_plugin(registry.find("forge.optimizers", "adam"), registry).keys}
    assert (keys["lr"].expected, keys["lr"].default, keys["lr"].doc) == ("a number greater than 0", "0.001", "Learning rate.")
    assert keys["betas"].default == "[0.9, 0.95]"
    source = describe_plugin(find_everywhere(registry, "text")[0], registry)
    assert source.keys[0].default is None
    with pytest.raises(UnknownComponent, match="did you mean 'recompute'"):
        find_everywhere(registry, "recompte")


NESTED = """
from dataclasses import dataclass, field
from typing import Annotated
from forge_core.component import Component, Slot

@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 1.0
    name_of: str | None = None
    deeper: 'list[Inner]' = field(default_factory=list)

@dataclass(frozen=True, kw_only=True)
class Mine(Component):
    always: Inner = Inner(rate=2.5)
    perhaps: Inner | None = None
    many: list[Inner] = field(default_factory=list)
    some: tuple[Inner, ...] = (Inner(rate=4.0),)
    part: Annotated[Component, Slot('forge.optimizers', default='adam')] = Slot.unset()
    def build(self, model):
        return model
"""


def test_a_description_opens_the_tables_inside(modules: Path) -> None:
    registry = plugin(modules, "nested", NESTED)
    found = {key.name: key for key in describe_plugin(registry.find("forge.optimizers", "mine"), registry).keys}
    assert {name: key.default for name, key in found.items()} == {
        "always": None,
        "perhaps": "none",
        "many": "[]",
        "some": '[{rate = 4.0, name_of = "none", deeper = []}]',
        "part": "adam",
    }
    rates = {name: {below.name: below.default for below in key.keys}.get("rate") for name, key in found.items()}
    assert rates == {"always": "2.5", "perhaps": "1.0", "many": "1.0", "some": "1.0", "part": None}
    assert [(key.name, key.default, key.keys) for key in found["always"].keys][1:] == [
        ("name_of", "none", ()),
        ("deeper", "[]", ()),  # of its own kind: shown once
    ]


def test_every_installed_plugin_is_sound() -> None:
    reports = diagnose(Registry(), conform=True)
    assert len(reports) > 20
    assert {report.entry.qualified: report.problems for report in reports if report.problems} == {}


def install(site: Path, name: str, points: dict[str, dict[str, str]]) -> None:
    """A distribution in a folder of the path."""
    folder = site / f"{name.replace('-', '_')}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    sections = (f"[{group}]\n" + "".join(f"{key} = {target}\n" for key, target in own.items()) for group, own in points.items())
    (folder / "entry_points.txt").write_text("\n".join(sections))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(("rival", "other")):
            del sys.modules[name]


def test_trials_d7_a_wheel_that_claims_every_name_of_every_group_changes_nothing(site: Path) -> None:
    before = Registry()
    own = {group: {entry.name: "rival:Thing" for entry in before.of(group) if entry.is_forge} for group in GROUPS}
    offered = {group: before.names(group) for group in GROUPS}
    presets = {name: load_recipe(name, (), 2, before) for name in ("debug", "debug-moe", "debug-cross")}
    (site / "rival.py").write_text("raise ImportError('never asked for')\n")
    install(site, "rival", own)
    after = Registry()
    assert len(after.entries) == len(before.entries) + sum(map(len, own.values()))
    for group in GROUPS:
        names = after.names(group)
        assert set(offered[group]) <= set(names) and {f"rival:{name}" for name in own[group]} <= set(names), group
        for name in own[group]:
            assert after.find(group, name).is_forge, (group, name)
            assert after.find(group, f"rival:{name}").distribution == "rival"
    for name, resolved in presets.items():
        again = load_recipe(name, (), 2, after)
        assert again.job == resolved.job and again.as_toml() == resolved.as_toml() and again.used == resolved.used
        assert all("rival" in warning for warning in set(again.warnings) - set(resolved.warnings)), "its checks cannot run"
    assert set(root(after).commands) >= set(root(before).commands)
    for group in GROUPS:
        assert checks_of(after, group) == checks_of(before, group)
    problems = {report.entry.qualified for report in diagnose(after) if report.problems}
    assert problems and all(name.startswith("rival:") for name in problems)
    assert "rival" not in sys.modules


PART = GOOD.replace("class Mine", "class {name}").replace("self, model", "self, {parameters}")
HOLDER = """
from typing import Annotated
from forge_core.component import Slot

@dataclass(frozen=True, kw_only=True)
class Holder(Component):
    '''Has a part by default.'''
    norm: Annotated[Component, Slot("forge.norms", default="rmsnorm")] = Slot.unset()
    '''Its norm.'''
    def build(self, context):
        return None
"""


def parts(*wanted: tuple[str, str]) -> str:
    """Classes by name with the parameters that their group's build has."""
    text = "".join(PART.format(name=name, parameters=", ".join(GROUPS[group].build or ())) for name, group in wanted)
    return text.replace("self, )", "self)")


@pytest.fixture
def rival(site: Path) -> Registry:
    """A wheel with an optimizer, a norm, a hook, a transform and a preset under names of Forge, and others of its own."""
    wanted = [("Opt", "forge.optimizers"), ("Norm", "forge.norms"), ("Save", "forge.hooks"), ("Re", "forge.transforms")]
    presets = "PRESET = __import__('pathlib').Path(__file__).parent / 'rival.toml'\nOTHER = PRESET.with_name('rival2.toml')\n"
    (site / "rival.py").write_text(parts(*wanted) + HOLDER + presets)
    (site / "rival.toml").write_text(
        'base = "debug"\n[optimizer]\nname = "adamw"\nrate = 2.0\n[[hooks]]\nname = "save"\nrate = 3.0\n[[hooks]]\nname = "log"\n'
        '[model]\nattention = { name = "holder" }\n[transforms.recompute]\nrate = 4.0\n'
    )
    (site / "rival2.toml").write_text('base = "rival.toml"\n[optimizer]\nname = "adamw"\nrate = 5.0\n')
    install(
        site,
        "rival",
        {
            "forge.optimizers": {"adamw": "rival:Opt"},
            "forge.norms": {"rmsnorm": "rival:Norm"},
            "forge.hooks": {"save": "rival:Save", "shared": "rival:Save"},
            "forge.transforms": {"recompute": "rival:Re"},
            "forge.attentions": {"holder": "rival:Holder"},
            "forge.presets": {"debug": "rival:PRESET", "mine": "rival:OTHER"},
        },
    )
    return Registry()


def chosen(resolved: Recipe, key: str, registry: Registry) -> str:
    return registry.find(*resolved.outcome.chosen[key]).qualified


def test_trials_d7_in_its_own_presets_and_defaults_a_distribution_means_its_own(rival: Registry, tmp_path: Path) -> None:
    found = load_recipe("rival:debug", (), None, rival)  # its base is Forge's `debug`, and not itself
    expected = {
        "optimizer": "rival:adamw",
        "hooks.0": "rival:save",
        "hooks.1": "forge-train:log",
        "model.attention": "rival:holder",
        "model.attention.norm": "rival:rmsnorm",
        "model.norm": "forge-models:rmsnorm",
        "transforms.recompute": "rival:recompute",
    }
    assert {key: chosen(found, key, rival) for key in expected} == expected
    assert found.job.optimizer.rate == 2.0 and found.job.transforms["recompute"].rate == 4.0
    (tmp_path / "again.toml").write_text(found.as_toml())
    again = load_recipe(str(tmp_path / "again.toml"), (), None, rival)
    assert again.job == found.job and again.as_toml() == found.as_toml(), "in a user's file, the whole names say the same"
    assert load_recipe("mine", (), None, rival).job.optimizer.rate == 5.0, "a file that a preset names belongs to it"


def test_trials_d7_in_a_users_recipe_a_name_is_forges(rival: Registry, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('base = "rival:debug"\n[optimizer]\nname = "adamw"\nlr = 0.5\n[[hooks]]\nname = "save"\n')
    found = load_recipe(str(recipe), (), None, rival)
    assert chosen(found, "optimizer", rival) == "forge-parallel:adamw" and found.job.optimizer.lr == 0.5
    assert chosen(found, "hooks.0", rival) == "forge-train:save"
    recipe.write_text('base = "debug"\n[model]\nattention = { name = "holder", norm = { name = "rmsnorm" } }\n')
    found = load_recipe(str(recipe), ["--hooks=[{name='shared'}]"], None, rival)
    assert chosen(found, "model.attention.norm", rival) == "forge-models:rmsnorm", "written by the user, not a default"
    assert found.tree.items["optimizer"].items["name"].value == "adamw" and chosen(found, "hooks.0", rival) == "rival:shared"  # type: ignore[union-attr]


def test_trials_d7_only_what_two_others_claim_is_a_conflict(rival: Registry, site: Path) -> None:
    install(site, "other", {"forge.hooks": {"shared": "rival:Save", "save": "rival:Save"}})
    registry = Registry()
    assert registry.find("forge.hooks", "save").is_forge
    with pytest.raises(PluginConflict, match="'other:shared' or 'rival:shared'"):
        registry.find("forge.hooks", "shared")
    assert registry.find("forge.hooks", "shared", owner="rival").distribution == "rival"
    with pytest.raises(ConfigError, match="claimed by other"):
        load_recipe("debug", ["--hooks=[{name='shared'}]"], None, registry)
