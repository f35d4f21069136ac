"""The file of a campaign: which entries it has, which recipes they get, and what is refused."""

from pathlib import Path

import pytest

from forge_core.errors import ConfigError
from forge_lab.campaigns.campaign import Campaign, find_campaign, read_campaign
from forge_lab.campaigns.records import fingerprint_of
from lab.campaigns import LAYOUTS, campaign_of


def names(campaign: Campaign) -> list[str]:
    return [entry.name for entry in campaign.entries]


def test_the_matrix_has_every_combination_but_the_excluded_ones(tmp_path: Path) -> None:
    campaign = campaign_of(tmp_path)
    assert names(campaign) == ["layout=fsdp_world=1", "layout=fsdp_world=2", "layout=tp_world=2"]
    assert [str(entry.recipe.layout) for entry in campaign.entries if entry.recipe] == ["1", "dp2", "tp2"]
    assert campaign.series == ("layout",) and campaign.folder(campaign.entries[0]) == tmp_path / "out/entries/layout=fsdp_world=1"


def test_all_items_of_exclude_count(tmp_path: Path) -> None:
    text = LAYOUTS.replace("world = [1, 2]", "world = [1, 2, 4]") + '[[exclude]]\nlayout = "fsdp"\nworld = [2, 4]\n'
    assert names(campaign_of(tmp_path, text)) == ["layout=fsdp_world=1", "layout=tp_world=2", "layout=tp_world=4"]


def test_listed_entries_follow_and_their_own_keys_come_last(tmp_path: Path) -> None:
    text = (
        LAYOUTS.replace("[sets.layout.tp]\n", "[sets.layout.tp]\ntrain.micro_batch = 2\n")
        + '[[entries]]\nworld = 2\nlayout = "tp"\ntrain.micro_batch = 1\nmodel = {layers = 1}\n'
    )
    campaign = campaign_of(tmp_path, text, ["--model.layers=3"])
    last = campaign.entries[-1]
    assert last.name.startswith("world=2_layout=tp_") and dict(last.values)["train.micro_batch"] == 1
    assert last.recipe and last.recipe.job.train.micro_batch == 1 and last.recipe.job.model.layers == 3
    assert campaign.entries[-2].recipe and campaign.entries[-2].recipe.job.train.micro_batch == 2


def test_a_run_has_the_length_of_the_campaign_and_measures_each_step(tmp_path: Path) -> None:
    """The schedule is that of the recipe; what costs time and is not measured is left out."""
    campaign = campaign_of(tmp_path, LAYOUTS.replace("steps = 6", "steps = 6\nevery = 2"))
    recipe = campaign.entries[0].recipe
    assert recipe is not None
    job = recipe.job
    assert (job.train.stop_at, job.train.max_steps) == (6, 8)  # max_steps of TINY
    assert [(type(hook).__name__, getattr(hook, "every", None)) for hook in job.hooks] == [("Log", 2)]
    assert job.trackers == [] and Path(str(job.job.dir)) == tmp_path / "out/entries/layout=fsdp_world=1/run"
    longer = campaign_of(tmp_path, LAYOUTS.replace("steps = 6", "steps = 60")).entries[0].recipe
    assert longer is not None and longer.job.train.max_steps == longer.job.train.stop_at == 60


def test_hooks_of_a_campaign_stay(tmp_path: Path) -> None:
    text = LAYOUTS.replace(
        "[sets.layout.fsdp]", 'hooks = [{name = "log", every = 7}, {name = "profile", at = [2]}]\n[sets.layout.fsdp]'
    )
    recipe = campaign_of(tmp_path, text).entries[0].recipe
    assert recipe is not None
    assert [type(hook).__name__ for hook in recipe.job.hooks] == ["Profile", "Log"] and recipe.job.hooks[1].every == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(("layout", "world", "expected"), [("fsdp", 1, 6), ("fsdp", 2, 12), ("tp", 2, 6)])
def test_accumulation_sets_the_batch_of_the_layout(tmp_path: Path, layout: str, world: int, expected: int) -> None:
    """Two sequences times three micro-batches times the ranks that read data of their own."""
    campaign = campaign_of(tmp_path, LAYOUTS.replace("[common]", "[common]\naccumulation = 3"))
    (entry,) = (one for one in campaign.entries if one.name == f"layout={layout}_world={world}")
    assert entry.recipe is not None and entry.recipe.job.train.global_batch == expected


def test_what_only_a_number_of_ranks_refuses_is_a_refused_entry(tmp_path: Path) -> None:
    """Three ranks do not fit a batch of eight; four do not fit tensor parallelism over two heads of keys, and so on."""
    campaign = campaign_of(tmp_path, LAYOUTS.replace("world = [1, 2]", "world = [1, 2, 3]"))
    refused = [entry for entry in campaign.entries if entry.recipe is None]
    assert [entry.name for entry in refused] == ["layout=fsdp_world=3", "layout=tp_world=3"]
    assert "train.global_batch" in refused[0].refusal or "micro_batch" in refused[0].refusal
    assert "not a multiple of" in refused[1].refusal
    with_accumulation = campaign_of(
        tmp_path, LAYOUTS.replace("world = [1, 2]", "world = [1, 3]").replace("[common]", "[common]\naccumulation = 1")
    )
    assert [entry.recipe is None for entry in with_accumulation.entries] == [False, False, True]


@pytest.mark.parametrize(
    ("old", "new", "key", "words"),
    [
        ("skip = 2", "skp = 2", "skp", "skip"),
        ("skip = 2", "skip = 6", "skip", "none is measured"),
        ("skip = 2", "skip = 5\nevery = 4", "skip", "at most 4"),
        ("steps = 6", "steps = 0", "steps", ""),
        ("limit_minutes = 2", "limit_minutes = 0", "limit_minutes", ""),
        ("parallel.tp = 2", "parallel.tpp = 2", "parallel.tpp", "tp"),
        ("parallel.tp = 2", "parralel.tp = 2", "parralel", "parallel"),
        ('layout = ["fsdp", "tp"]', "layout = []", "matrix.layout", "empty"),
        ('layout = ["fsdp", "tp"]', 'layout = "tp"', "matrix.layout", "list"),
        ('layout = ["fsdp", "tp"]', 'layout = ["fsdp", "tq"]', "matrix.layout", "tp"),
        ('layout = ["fsdp", "tp"]', 'layout = ["fsdp", "tp", "tp"]', "matrix.layout", "twice"),
        ('layout = ["fsdp", "tp"]', 'layot = ["fsdp"]', "matrix.layot", "layout"),
        ("world = [1, 2]", "world = [0, 2]", "matrix.world", "positive"),
        ("world = [1, 2]", "world = [true]", "matrix.world", "positive"),
        ("world = [1, 2]", "wrld = [1]", "matrix.wrld", "world"),
        ("world = [1, 2]\n\n[[ex", "world = [1, 2]\ntrain.stop_at = [3]\n\n[[ex", "train.stop_at", "steps"),
        ('recipe = "tiny.toml"', 'recipe = "tny.toml"', "recipe", "tiny.toml"),
        ('recipe = "tiny.toml"', "train.micro_batch = 1", "recipe", "missing"),
        ('recipe = "tiny.toml"', 'recipe = "tiny.toml"\njob.name = "x"', "job.name", "set by the campaign"),
        (
            'recipe = "tiny.toml"',
            'recipe = "tiny.toml"\naccumulation = 2\ntrain.global_batch = 4',
            "train.global_batch",
            "accumulation",
        ),
        ('recipe = "tiny.toml"', 'recipe = "tiny.toml"\noptimizer.lr = "fast"', "optimizer.lr", ""),
        ('layout = "tp"\nworld = 1', 'layout = "tp"\nworld = 4', "exclude.0.world", "not a value"),
        ('layout = "tp"\nworld = 1', 'layout = "tp"\nworlds = 1', "exclude.0.worlds", "world"),
        ('layout = "tp"\nworld = 1', 'layout = ["fsdp", "tp"]', "exclude", "every entry"),
        ("[[exclude]]", '[[exclude]]\nlayout = "tp"\n[[exclude]]', "exclude.1", "nothing"),
        ("[[exclude]]", "[[exclude]]\n[[exclude]]", "exclude.0", "empty"),
        ('title = "Layouts"', 'title = "Layouts"\nseries = ["lay"]', "series", "layout"),
        ('title = "Layouts"', 'title = "Layouts"\nseries = []', "series", "tells them apart"),
        ("[sets.layout.fsdp]", "[sets.world.a]\n[sets.layout.fsdp]", "sets.world", "rename"),
    ],
)
def test_faults_name_their_key_and_their_line(tmp_path: Path, old: str, new: str, key: str, words: str) -> None:
    assert LAYOUTS.count(old) == 1
    with pytest.raises(ConfigError) as refusal:
        campaign_of(tmp_path, LAYOUTS.replace(old, new))
    faults = {fault.key: fault for fault in refusal.value.faults}
    assert key in faults and words in f"{faults[key].message} {faults[key].hint}", refusal.value
    assert "layouts.toml:" in faults[key].origin


def test_all_faults_of_recipes_are_reported_once_with_an_entry(tmp_path: Path) -> None:
    text = LAYOUTS.replace("parallel.tp = 2", "parallel.tp = 2\nmodel.dimm = 3").replace(
        "[common]", "[common]\noptimizer.lrr = 1"
    )
    with pytest.raises(ConfigError) as refusal:
        campaign_of(tmp_path, text)
    told = {fault.key: fault.message for fault in refusal.value.faults}
    assert set(told) == {"optimizer.lrr", "model.dimm"}
    assert "entry" not in told["optimizer.lrr"] and told["model.dimm"].endswith("(entry layout=tp_world=2)")


def test_a_campaign_without_entries_and_one_with_an_entry_twice(tmp_path: Path) -> None:
    head = LAYOUTS.partition("[matrix]")[0]
    with pytest.raises(ConfigError, match="has no entry"):
        campaign_of(tmp_path, head)
    entry = '[[entries]]\nlayout = "tp"\nworld = 2\n'
    with pytest.raises(ConfigError, match="is there twice"):
        campaign_of(tmp_path, head + entry + entry)
    with pytest.raises(ConfigError, match=r"world: is missing"):
        campaign_of(tmp_path, head + '[[entries]]\nlayout = "tp"\n')
    with pytest.raises(ConfigError, match="exceed the maximum"):
        campaign_of(tmp_path, head + f"[matrix]\nworld = {list(range(1, 1002))}\n")


def test_names_of_shipped_campaigns_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_campaign("mfu_scaling").name == "mfu_scaling.toml"
    with pytest.raises(ConfigError, match="mfu_scaling"):
        find_campaign("mfu_scalling")
    with pytest.raises(ConfigError, match="does not exist"):
        find_campaign("none/there.toml")
    monkeypatch.chdir(tmp_path)
    campaign_of(tmp_path)
    assert read_campaign("layouts.toml").directory == Path("benches/layouts")


def test_a_fingerprint_is_that_of_the_recipe_and_the_ranks(tmp_path: Path) -> None:
    """Neither the directory nor the title belongs to it."""
    prints = [fingerprint_of(entry) for entry in campaign_of(tmp_path).entries]
    assert len(set(prints)) == 3
    (tmp_path / "other").mkdir()
    again = campaign_of(tmp_path / "other", LAYOUTS.replace("Layouts", "Another title").replace("skip = 2", "skip = 3"))
    assert [fingerprint_of(entry) for entry in again.entries] == prints
    changed = campaign_of(tmp_path, LAYOUTS, ["--optimizer.lr=2e-2"])
    assert not {fingerprint_of(entry) for entry in changed.entries} & set(prints)
    only_tp = campaign_of(tmp_path, LAYOUTS.replace("parallel.tp = 2", "parallel.tp = 2\nmodel.ffn_dim = 32"))
    assert [fingerprint_of(entry) == old for entry, old in zip(only_tp.entries, prints, strict=True)] == [True, True, False]


def test_reading_a_campaign_imports_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    campaign_of(tmp_path)
    code = (
        "import sys\nfrom forge_lab.campaigns.campaign import read_campaign\nread_campaign('layouts.toml')\n"
        "read_campaign('packed_experts')\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=120)
