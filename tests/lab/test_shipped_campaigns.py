"""The campaigns that ship: every entry passes `check` as it is, and each campaign runs with tiny models on this machine."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from forge_core.config.toml import read_toml, to_toml
from forge_core.config.tree import plain
from forge_lab.campaigns.campaign import Campaign, CampaignEntry, read_campaign, shipped_campaigns
from forge_lab.campaigns.execution import BoundedEnd, LocalRunner, run_bounded
from forge_lab.campaigns.records import write_campaign
from forge_lab.campaigns.tables import write_tables
from forge_lab.sweep.execution import StopRequests
from forge_models.flops import counts_of
from harness import commands

ROOT = Path(__file__).parents[2]
NAMES = list(shipped_campaigns())
TINY = {
    "model.dim": 32,
    "model.layers": 4,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.ffn_dim": 48,
    "model.vocab_size": 61,
    "model.max_length": 16,
    "data.sequence_length": 16,
    "train.threads": 1,
    "data.sources": '[{name = "random", vocab_size = 61, tokens = 100000}]',
}
OVERRIDES = [f"--{key}={value}" for key, value in TINY.items()]
AXES = ("ep", "pp", "tp")


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_passes_the_check_at_its_full_size(name: str) -> None:
    campaign = read_campaign(name)
    assert [(entry.name, entry.refusal) for entry in campaign.entries if entry.recipe is None] == []
    assert campaign.warnings == () and campaign.settings.description and max(entry.world for entry in campaign.entries) >= 8


def entry_of(campaign: Campaign, **values: Any) -> CampaignEntry:
    (entry,) = (
        one
        for one in campaign.entries
        if all((one.world if key == "world" else one.values.get(key)) == value for key, value in values.items())
    )
    return entry


def facts(entry: CampaignEntry) -> tuple[float, str, int]:
    """Parameters in billions, layout, and tokens per step."""
    recipe = entry.recipe
    assert recipe is not None
    counts = counts_of(recipe.job.model)
    assert counts is not None
    return round(counts.parameters / 1e9, 2), str(recipe.layout), recipe.job.train.global_batch * recipe.job.data.sequence_length


def test_models_layouts_and_batches_are_those_of_the_published_campaigns() -> None:
    """Parameters as published; tokens of a step from published tokens per second times seconds per step, within 1 %."""
    scaling, validation = read_campaign("mfu_scaling"), read_campaign("config_validation")
    weak = read_campaign("weak_scaling")
    published = [
        (entry_of(scaling, model="8b", world=1), 8.03, "1", 10_471 * 3.13),
        (entry_of(scaling, model="8b", layout="tp4", world=32), 8.03, "dp8tp4", 155_917 * 1.68),
        (entry_of(scaling, model="13b", layout="fsdp"), 14.84, "dp8", 35_405 * 14.81),
        (entry_of(scaling, model="70b"), 70.55, "dp8tp4", 17_657 * 14.85),
        (entry_of(validation, model="8b", world=12), 8.03, "dp3tp4", 67_045 * 5.86),
        (entry_of(validation, model="8b", world=32), 8.03, "dp32", 297_384 * 7.05),
        (entry_of(validation, model="29b"), 28.7, "pp2dp4tp4", 22_631 * 5.79),
        (entry_of(validation, model="70b", layout="tp4pp4"), 70.55, "pp4dp2tp4", 8_212 * 3.99),
        (entry_of(weak, model="13b", world=160), 14.84, "dp40tp4", 534_644 * 4.91),
        (entry_of(weak, model="70b", world=96), 70.55, "dp24tp4", 52_190 * 15.07),
    ]
    for entry, parameters, layout, tokens in published:
        found = facts(entry)
        assert found[0] == pytest.approx(parameters, abs=0.02) and found[1] == layout, entry.name
        assert found[2] == pytest.approx(tokens, rel=0.01), entry.name
    experts = read_campaign("packed_experts")
    assert facts(entry_of(experts, experts="8", kernel="loop"))[2] == pytest.approx(48_521 * 2.70, rel=0.01)
    assert entry_of(experts, experts="64", kernel="grouped", **{"train.micro_batch": 1}).recipe is not None
    assert [entry.world for entry in scaling.entries] == [1, 2, 4, 2, 4, 4, 8, 16, 32, 8, 8, 16, 32, 32]


def smaller(value: Any, most: int) -> Any:
    """Keys of a set for at most two ranks: without the compiler, and with the last of its axes only."""
    if not isinstance(value, dict):
        return value
    kept = {key: smaller(item, most) for key, item in value.items()}
    if "transforms" in kept:
        kept["transforms"].pop("compile", None)
    if "parallel" in kept:
        axis = next(axis for axis in AXES if axis in kept["parallel"])
        kept["parallel"] = {axis: most}
    return kept


def shrunken(name: str, folder: Path, world: int, steps: int = 4) -> Campaign:
    """A shipped campaign with tiny models on one or two ranks: an entry for each combination of what is not the world."""
    tree = plain(read_toml(shipped_campaigns()[name]))
    rows: dict[str, dict[str, Any]] = {}
    for entry in read_campaign(name).entries:
        values = {key: value for key, value in entry.values.items() if key != "world"}
        rows.setdefault(json.dumps(values), values | {"world": world})
    for values in rows.values():
        if "train.micro_batch" in values:
            values["train.micro_batch"] = min(2, values["train.micro_batch"])
    unique = {json.dumps(values): values for values in rows.values()}
    small = smaller({"common": tree["common"], "sets": tree["sets"]}, world)
    small["common"].pop("world", None)
    kept = {key: tree[key] for key in ("title", "description", "series") if key in tree}
    nested = [
        {key: value for key, value in row.items() if "." not in key} | {"train": {"micro_batch": row["train.micro_batch"]}}
        if "train.micro_batch" in row
        else row
        for row in unique.values()
    ]
    head = {**kept, "steps": steps, "skip": 1, "limit_minutes": 5.0}
    if "hooks" in small["common"]:
        small["common"]["hooks"][0] |= {"at": [2], "steps": 1}
        head["skip"] = 2
    (folder / f"{name}.toml").write_text(to_toml({**head, **small, "entries": nested}))
    return read_campaign(folder / f"{name}.toml", OVERRIDES, folder / "out")


def in_a_fork(command: Sequence[str], output: Path, limit: float, asked: StopRequests, look: Callable[[], None]) -> BoundedEnd:
    """The command in a fork of a process that has imported torch."""
    done = commands.run(*command[1:], timeout=limit, env={**os.environ, "OMP_NUM_THREADS": "1"})
    output.write_text(done.stdout + done.stderr)
    return BoundedEnd(done.returncode, 1.0)


def measured(campaign: Campaign, entries: Sequence[CampaignEntry], begin: Any) -> Mapping[str, Any]:
    """The results of some entries."""
    write_campaign(campaign)
    LocalRunner(campaign, lambda line: None, 0, None, begin=begin).run(entries)
    found = write_tables(campaign.directory)
    chosen = {entry.name for entry in entries}
    return {result.name: result for result in found.results if result.name in chosen}


@pytest.mark.parametrize("name", NAMES)
def test_a_campaign_runs_with_a_tiny_model(name: str, tmp_path: Path) -> None:
    """The first entry on one rank, from its recipe to the tables."""
    campaign = shrunken(name, tmp_path, 1)
    assert {entry.refusal for entry in campaign.entries} == {""}
    ((entry, result),) = measured(campaign, campaign.entries[:1], in_a_fork).items()
    assert result.status == "finished", result.message
    assert result.measured == (2 if name == "profile" else 3) and result.mfu is None and result.tokens_per_second.median > 0
    assert 3.0 < result.loss < 5.5  # ln(61) = 4.11
    page = (tmp_path / "out/table.md").read_text()
    assert page.startswith(f"# {campaign.settings.title}\n") and "1 finished" in page
    assert len(json.loads((tmp_path / "out/calibration.json").read_text())["rows"]) == 1
    if name == "profile":
        assert sum(result.split.values()) > 0 and f"| {entry} | " in page and "Where the time of a step goes" in page


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_entry_runs_on_two_ranks(name: str, tmp_path: Path) -> None:
    """Each layout with two ranks, in processes of their own; the kinds of a campaign have the same loss as on one rank."""
    campaign = shrunken(name, tmp_path, 2)
    found = measured(campaign, campaign.entries, run_bounded)
    assert {name: result.message for name, result in found.items() if result.status != "finished"} == {}
    assert {result.world for result in found.values()} == {2} and all(3.0 < result.loss < 5.5 for result in found.values())


def test_the_page_lists_the_campaigns() -> None:
    page = (ROOT / "docs/concepts/campaigns.md").read_text()
    section = page[page.index("## Campaigns that ship") :].partition("\n## `")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == NAMES
