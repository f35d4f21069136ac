"""The parser of raw records and the tables that it makes; statistics against numpy."""

import csv
import io
import json
import math
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_core.errors import ConfigError, ForgeError
from forge_lab.campaigns.campaign import Campaign
from forge_lab.campaigns.records import OUTPUT, Attempt, fingerprint_of, prepare_entry, write_attempt, write_campaign
from forge_lab.campaigns.results import EntryResult, Quartiles, read_result
from forge_lab.campaigns.tables import CALIBRATION, CSV, DERIVED, JSON, PLOT, TABLE, read_results, write_tables
from forge_train.trackers import METRICS, JsonlTracker
from lab.campaigns import LAYOUTS, campaign_of, lines, write_metrics, write_report

ONE, TWO, TENSOR = "layout=fsdp_world=1", "layout=fsdp_world=2", "layout=tp_world=2"


def prepared(tmp_path: Path, text: str = LAYOUTS) -> Campaign:
    campaign = campaign_of(tmp_path, text)
    write_campaign(campaign)
    for entry in campaign.entries:
        prepare_entry(campaign, entry, entry.world)
    return campaign


def ended(campaign: Campaign, name: str, code: int | None = 0, text: str = "", **more: Any) -> EntryResult:
    """The result of an entry that ended like this."""
    (entry,) = (one for one in campaign.entries if one.name == name)
    folder = campaign.folder(entry)
    (folder / OUTPUT).write_text(text)
    write_attempt(folder, Attempt(fingerprint_of(entry), code, 2.5, limit_seconds=120.0, **more))
    return read_result(folder, campaign.settings.skip)


def finish(
    campaign: Campaign, name: str, seconds: list[float], tokens: float = 128.0, device: str = "cpu", **more: float
) -> EntryResult:
    run = campaign.directory / "entries" / name / "run"
    write_metrics(run, lines(seconds, tokens, **more))
    write_report(run, device, ["recompute", "shard"])
    return ended(campaign, name)


def rows_of(campaign: Campaign) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((campaign.directory / CSV).read_text())))


def test_numbers_are_those_of_numpy_over_the_steps_after_the_first(tmp_path: Path) -> None:
    times = [50.0, 20.0, 0.5, 0.7, 0.4, 1.1]
    result = finish(prepared(tmp_path), TWO, times, peak_memory=1e9)
    low, middle, high = np.percentile(times[2:], [25, 50, 75])
    assert result.status == "finished" and result.measured == 4 and result.step_seconds is not None
    assert (result.step_seconds.low, result.step_seconds.median, result.step_seconds.high) == pytest.approx((low, middle, high))
    rates = [128 / time for time in times[2:]]
    assert result.tokens_per_second is not None and result.tokens_per_second.median == pytest.approx(np.median(rates))
    assert result.per_rank == pytest.approx(np.median(rates) / 2)
    assert (result.layout, result.world, result.micro_batch, result.micro_batches, result.length) == ("dp2", 2, 2, 2, 16)
    assert (result.memory, result.memory_of, result.loss, result.seconds) == (1_000_000_000, "host", 4.0, 2.5)
    assert (result.hardware, result.torch, result.parameters) == ("a processor", "2.13.0", 1234)


def test_a_line_over_several_steps_counts_if_all_of_them_come_after_the_first(tmp_path: Path) -> None:
    """Lines at 2, 4 and 6: the one at 4 covers step 3, which is among the first three."""
    campaign = prepared(tmp_path, LAYOUTS.replace("skip = 2", "skip = 3\nevery = 2"))
    run = campaign.directory / "entries" / ONE / "run"
    write_metrics(run, lines([5.0, 3.0, 1.0]), every=2)
    result = ended(campaign, ONE)
    assert result.measured == 1 and result.step_seconds == Quartiles(1.0, None, None)


@pytest.mark.parametrize(("steps", "skip", "every"), [(6, 5, 1), (6, 4, 4), (1, 0, 1), (1, 0, 3), (7, 6, 3), (5, 1, 9)])
def test_the_last_measurement_counts_where_the_file_is_accepted(tmp_path: Path, steps: int, skip: int, every: int) -> None:
    """Lines of hook `log`: the first step, multiples of `every`, and the last step. One more step to skip is refused."""
    text = LAYOUTS.replace("steps = 6", f"steps = {steps}").replace("skip = 2", f"skip = {skip}\nevery = {every}")
    campaign = prepared(tmp_path, text)
    run = campaign.directory / "entries" / ONE / "run"
    run.mkdir(parents=True, exist_ok=True)
    for step in range(1, steps + 1):
        if step in (1, steps) or step % every == 0:
            JsonlTracker(run / METRICS).write(step, lines([1.0])[0])
    assert ended(campaign, ONE).measured >= 1
    with pytest.raises(ConfigError, match=f"at most {skip}"):
        campaign_of(tmp_path, text.replace(f"skip = {skip}", f"skip = {skip + 1}"))


def test_a_processor_has_no_mfu_and_a_device_has_that_of_its_peak(tmp_path: Path) -> None:
    """Hook `log` reports the fraction of a measured peak on processors, which no table shows as MFU."""
    campaign = prepared(tmp_path)
    assert finish(campaign, ONE, [1.0] * 6, mfu=0.7, model_tflops=0.1).mfu is None
    result = finish(campaign, TWO, [1.0] * 6, device="A GPU", mfu=0.4, device_memory=7e9, peak_memory=2e9)
    assert (result.mfu, result.memory, result.memory_of, result.hardware) == (0.4, 7_000_000_000, "device", "A GPU")
    assert finish(campaign, TENSOR, [1.0] * 6, device="Unknown GPU", device_memory=7e9).mfu is None


def test_the_peak_of_memory_is_that_of_all_steps(tmp_path: Path) -> None:
    """A line has the peak since the line before; the largest may be among the first steps, when blocks are compiled."""
    campaign = prepared(tmp_path)
    rows = lines([1.0] * 6)
    for row, memory in zip(rows, (5e9, 9e9, 3e9, 4e9, 3e9, 2e9), strict=True):
        row |= {"device_memory": memory, "peak_memory": 20e9}
    write_metrics(campaign.directory / "entries" / ONE / "run", rows)
    result = ended(campaign, ONE)
    assert (result.memory, result.memory_of) == (9_000_000_000, "device")


@pytest.mark.parametrize(
    ("code", "text", "more", "status", "words"),
    [
        (8, "rank 1 on h ran out of memory in step 3\nmore", {}, "out of memory", "rank 1 on h ran out"),
        (8, "", {}, "out of memory", "a rank"),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", {}, "out of memory", "Tried to allocate"),
        (3, "error: rank 0 ran out of memory in step 1 with micro-batches of 1", {}, "out of memory", "micro-batches of 1"),
        (1, "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried", {}, "out of memory", "allocate"),
        (1, "Traceback\nMemoryError", {}, "out of memory", "MemoryError"),
        (-9, "", {"oom_kills": 1}, "out of memory", "killed 1"),
        (137, "", {}, "out of memory", "SIGKILL"),
        (5, "rank 1 was ended by SIGKILL; no restarts left (maximum 0)", {"oom_kills": 2}, "out of memory", "killed 2"),
        (-9, "", {"oom_kills": 0}, "failed", "killed none"),
        (
            5,
            "rank 0: ERROR: rank 1 ended without a message: killed, out of memory or stopped.\nrank 1 was ended by SIGKILL",
            {"oom_kills": 0},
            "failed",
            "killed none",
        ),
        (5, "rank 1 ended without a message: killed, out of memory or stopped", {}, "failed", "exit code 5"),
        (-9, "", {"timed_out": True}, "time limit", "after 120 s"),
        (2, "warning: x\nerror: train.micro_batch: no\n\n", {}, "refused", "error: train.micro_batch: no"),
        (None, "", {"refusal": "parallel.tp: no"}, "refused", "parallel.tp: no"),
        (1, "Traceback\n  ...\nRuntimeError: as meant\n", {}, "failed", "RuntimeError: as meant"),
        (-11, "", {}, "failed", "exit code -11"),
        (75, "", {"job": "41"}, "time limit", "job 41"),
        (75, "", {}, "failed", "exit code 75"),
        (
            None,
            "slurmstepd: error: *** JOB 41 CANCELLED AT 12:00:00 DUE TO TIME LIMIT ***",
            {"job": "41"},
            "time limit",
            "job 41",
        ),
        (None, "", {"job": "41", "note": "job 41 is not in the queue"}, "failed", "is not in the queue"),
    ],
)
def test_how_an_entry_ended(tmp_path: Path, code: int | None, text: str, more: dict[str, Any], status: str, words: str) -> None:
    result = ended(prepared(tmp_path), ONE, code, text, **more)
    assert result.status == status and words in result.message, result
    assert result.step_seconds is None and result.mfu is None


def test_a_run_that_ended_early_or_measured_nothing_is_no_result(tmp_path: Path) -> None:
    campaign = prepared(tmp_path)
    run = campaign.directory / "entries" / ONE / "run"
    write_metrics(run, lines([1.0] * 4))
    assert (result := ended(campaign, ONE)).status == "failed" and "step 4 of 6" in result.message
    run = campaign.directory / "entries" / TWO / "run"
    write_metrics(run, [{"loss": 1.0}] * 6)
    assert (result := ended(campaign, TWO)).status == "failed" and "no step was measured" in result.message


def test_a_record_of_another_entry_or_a_damaged_one_is_no_result(tmp_path: Path) -> None:
    campaign = prepared(tmp_path)
    folder = campaign.directory / "entries" / ONE
    assert read_result(folder, 2).status == "waiting"
    write_attempt(folder, Attempt("another", 0))
    assert read_result(folder, 2).status == "waiting"
    (folder / "attempt.json").write_text('{"fingerprint": ')
    assert (result := read_result(folder, 2)).status == "waiting" and "damaged" in result.message
    (folder / "attempt.json").write_text('{"of_another_version": 1}')
    assert read_result(folder, 2).status == "waiting"


def test_efficiency_is_relative_to_the_smallest_world_with_a_result_of_the_series(tmp_path: Path) -> None:
    text = LAYOUTS.replace("[sets.layout.tp]", "[sets.layout.eager]\nmodel.layers = 1\n[sets.layout.tp]")
    text = text.replace('["fsdp", "tp"]', '["fsdp", "tp", "eager"]').replace("world = [1, 2]", "world = [1, 2, 4]")
    campaign = prepared(tmp_path, text)
    finish(campaign, ONE, [1.0] * 6, 100.0)
    finish(campaign, TWO, [1.0] * 6, 180.0)
    finish(campaign, "layout=fsdp_world=4", [1.0] * 6, 300.0)
    ended(campaign, "layout=eager_world=1", 8)
    finish(campaign, "layout=eager_world=2", [1.0] * 6, 50.0)
    finish(campaign, "layout=eager_world=4", [1.0] * 6, 80.0)
    finish(campaign, TENSOR, [1.0] * 6, 10.0)
    found = read_results(campaign.directory)
    assert found.efficiency == pytest.approx(
        {
            ONE: 1.0,
            TWO: 0.9,
            "layout=fsdp_world=4": 0.75,
            "layout=eager_world=2": 1.0,
            "layout=eager_world=4": 0.8,
        }
    )
    assert found.base["layout=eager_world=4"] == "layout=eager_world=2" and TENSOR not in found.base
    write_tables(campaign.directory)
    drawn = ElementTree.parse(campaign.directory / PLOT).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert drawn.tag == f"{space}svg" and len(drawn.findall(f"{space}polyline")) == 2
    assert len(drawn.findall(f"{space}circle")) == 5 + 2  # of the legend


def test_tables_have_what_was_measured_and_leave_the_rest_empty(tmp_path: Path) -> None:
    campaign = prepared(tmp_path)
    shutil.rmtree(campaign.directory / "entries" / TENSOR)  # it has not been prepared yet
    finish(campaign, ONE, [0.25] * 6, 100.0, peak_memory=2.0**30, mfu=0.5)
    ended(campaign, TWO, 1, "Traceback\nValueError: a | b\n")
    write_tables(campaign.directory)
    rows = rows_of(campaign)
    assert [row["entry"] for row in rows] == [ONE, TWO, TENSOR]
    assert [row["status"] for row in rows] == ["finished", "failed", "waiting"]
    first = rows[0]
    assert (first["values.layout"], first["ranks"], first["axes"], first["mfu"]) == ("fsdp", "1", "1", "")
    assert float(first["step_seconds"]) == 0.25 and float(first["tokens_per_second_per_rank"]) == 400.0
    assert int(first["peak_memory_bytes"]) == 2**30 and first["memory_of"] == "host"
    assert rows[1]["step_seconds"] == rows[1]["tokens_per_second"] == rows[2]["loss"] == ""
    page = (campaign.directory / TABLE).read_text()
    assert "| fsdp | 1 | 1 | 2 x 4 | 400 | 400 | 0.25 s | 0.25 to 0.25 s | 1.00 GiB | 4.0000 | finished |" in page
    assert "| tp | 2 |  |  |  |  |  |  |  |  | waiting |" in page
    assert "ValueError: a \\| b" in page and "MFU |" not in page and "| efficiency" not in page
    assert "1 finished, 1 failed, 1 waiting" in page and "no MFU" in page
    assert not (campaign.directory / PLOT).exists()
    document = json.loads((campaign.directory / JSON).read_text())
    assert [entry["status"] for entry in document["entries"]] == ["finished", "failed", "waiting"]


def test_a_loss_that_is_not_a_number_is_shown_and_json_stays_json(tmp_path: Path) -> None:
    campaign = prepared(tmp_path)
    run = campaign.directory / "entries" / ONE / "run"
    write_metrics(run, [{**line, "loss": math.nan} for line in lines([1.0] * 6)])
    assert ended(campaign, ONE).status == "finished"
    write_tables(campaign.directory)
    text = (campaign.directory / JSON).read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name))["entries"][0]["loss"] == "nan"


def test_the_file_for_a_planner_has_the_resolved_recipe_and_what_was_measured(tmp_path: Path) -> None:
    campaign = prepared(tmp_path)
    finish(campaign, TENSOR, [1.0, 1.0, 0.2, 0.4, 0.6, 0.8], 10.0, device="A GPU", device_memory=5e9, mfu=0.3, model_tflops=2.0)
    ended(campaign, ONE, 8)
    write_tables(campaign.directory)
    found = json.loads((campaign.directory / CALIBRATION).read_text())
    assert found["format"] == 1 and found["campaign"] == "layouts"
    (row,) = found["rows"]
    recipe = campaign.entries[2].recipe
    assert recipe is not None
    assert row["recipe"] == {key: value for key, value in recipe.as_json().items() if key != "job"}
    assert row["layout"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2, "ep": 1, "etp": 1}
    assert row["step_seconds"] == pytest.approx(
        dict(zip(("q1", "median", "q3"), np.percentile([0.2, 0.4, 0.6, 0.8], [25, 50, 75]), strict=True))
    )
    expected = {
        "entry": TENSOR,
        "hardware": "A GPU",
        "device": "device",
        "torch": "2.13.0",
        "world": 2,
        "ranks_per_node": 2,
        "transforms": ["recompute", "shard"],
        "compute": "fp32",
        "state": "fp32",
        "micro_batch": 2,
        "micro_batches": 4,
        "length": 16,
        "parameters": 1234,
        "measured": 4,
        "mfu": 0.3,
        "model_tflops": 2.0,
        "peak_memory_bytes": 5_000_000_000,
    }
    assert {key: row[key] for key in expected} == expected
    assert row["tokens_per_second_per_rank"] == pytest.approx(np.median([10 / time for time in (0.2, 0.4, 0.6, 0.8)]) / 2)
    assert set(row) == {*expected, "recipe", "layout", "step_seconds", "tokens_per_second_per_rank"}
    page = (Path(__file__).parents[2] / "docs/concepts/campaigns.md").read_text()
    assert [key for key in row if f"| `{key}`" not in page] == []


def test_a_profiled_step_has_a_table_of_its_parts(tmp_path: Path) -> None:
    campaign = prepared(tmp_path)
    run = campaign.directory / "entries" / TWO / "run"
    rows = lines([1.0] * 6)
    rows[1] |= {"split/forward": 0.25, "split/exposed communication": 0.75}
    write_metrics(run, rows)
    ended(campaign, TWO)
    write_tables(campaign.directory)
    page = (campaign.directory / TABLE).read_text()
    assert f"| {TWO} | 0.25 s, 25.0% | 0.75 s, 75.0% |" in page
    (row,) = (row for row in rows_of(campaign) if row["entry"] == TWO)
    assert float(row["seconds_exposed communication"]) == 0.75


def test_tables_come_back_byte_for_byte_from_the_raw_records(tmp_path: Path) -> None:
    """Also in another place, and without what was derived."""
    campaign = prepared(tmp_path)
    finish(campaign, ONE, [0.3, 0.2, 0.25, 0.31, 0.27, 0.3])
    finish(campaign, TWO, [0.4, 0.3, 0.35, 0.41, 0.37, 0.4])
    ended(campaign, TENSOR, 8, "rank 0 ran out of memory")
    write_tables(campaign.directory)
    before = {name: (campaign.directory / name).read_bytes() for name in DERIVED}
    moved = shutil.copytree(campaign.directory, tmp_path / "moved", symlinks=True)
    for name in DERIVED:
        (moved / name).unlink()
    write_tables(moved)
    assert {name: (moved / name).read_bytes() for name in DERIVED} == before
    shutil.rmtree(moved / "entries" / TWO)
    write_tables(moved)
    assert not (moved / PLOT).exists(), "it is of an earlier state"


def test_a_directory_without_a_campaign_and_a_damaged_record_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=r"campaign\.json cannot be read"):
        write_tables(tmp_path)
    (tmp_path / "campaign.json").write_text('{"campaign": "x"}')
    with pytest.raises(ForgeError, match="is damaged"):
        write_tables(tmp_path)
