"""D7: an installed wheel that claims names of others changes nothing for those who do not ask for it.

The wheel is on the path as pip leaves one.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.test_registry import GOOD
from forge_core.conformance import checks_of
from forge_core.errors import ConfigError, PluginConflict
from forge_core.plugins import diagnose
from forge_core.registry import GROUPS, Registry
from forge_train.cli import root
from forge_train.recipe.load import Recipe, load_recipe


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
