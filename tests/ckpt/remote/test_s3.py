"""A server that speaks S3, and s3fs: parts, conditions, ranges, and checkpoints by their URL on the command line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ckpt.ranks import blank, equal, sample, whole
from forge_ckpt import BackgroundSaves, SaveRequest
from forge_ckpt.checkpoint.locate import locate
from forge_ckpt.checkpoint.read import load, newest
from forge_ckpt.checkpoint.save import save
from forge_ckpt.commands import app
from forge_ckpt.components import Remote
from forge_ckpt.format.names import point
from forge_ckpt.store import objects as layer
from forge_ckpt.store.remote import RemoteStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.conformance import checks_in
from forge_core.errors import CheckpointError
from forge_testing.checks.stores import StoreChecks
from harness.s3 import BUCKET, Server, s3_server
from harness.siblings import fast

ALONE = SingleProcessWorld()
MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as made:
        yield made


@pytest.fixture
def url(server: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    yield f"s3://{BUCKET}/{request.node.name.partition('[')[0]}/checkpoints"
    server.before = lambda method, path: None


@pytest.fixture
def client(server: Server) -> Any:
    import boto3

    return boto3.client("s3")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("check", checks_in(StoreChecks).values(), ids=checks_in(StoreChecks))
def test_it_does_what_every_store_has_to_do(server: Server, check: Any) -> None:
    check(Remote(url=f"s3://{BUCKET}/conformance"))


def test_save_and_load_through_a_saver_process(url: str) -> None:
    store = RemoteStore(url)
    state = sample(1)
    background = BackgroundSaves(store, ALONE, ALONE)
    background.save(whole(state), SaveRequest(3, {"seed": 1}, keep=2))
    for tensor in state.values():
        tensor.zero_()
    (outcome,) = background.settled(wait=True)
    background.close()
    assert outcome.error is None and outcome.name == "step-00000003"
    live = blank(sample())
    found = newest(store, ALONE)
    assert found is not None and load(store, found, whole(live), ALONE) == {"seed": 1} and equal(live, sample(1))


def test_a_large_file_is_sent_in_parts_and_read_by_ranges(
    url: str, server: Server, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "PART_BYTES", 5 * MIB)
    store, most = RemoteStore(url), [0]
    asked: list[str] = []
    server.before = lambda method, path: asked.append(method) if path.endswith("big") else None
    sent = bytes(range(256)) * (4 * MIB // 256)

    def chunks() -> Iterator[memoryview]:
        for _ in range(4):
            most[0] = asked.count("PUT")
            yield memoryview(sent)

    store.write("draft/big", chunks())
    key = f"{url.partition(BUCKET + '/')[2]}/data/draft/big"
    assert client.head_object(Bucket=BUCKET, Key=key)["ETag"].strip('"').endswith("-2"), "two parts of 8 MiB"
    assert most == [1], "the first one was sent before the last chunk was asked for"
    buffer = bytearray(MIB)
    store.read_into("draft/big", 7 * MIB + 3, memoryview(buffer))
    assert bytes(buffer) == (sent * 4)[7 * MIB + 3 : 8 * MIB + 3]


def test_an_upload_that_ends_early_leaves_nothing(url: str, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "PART_BYTES", 5 * MIB)

    def chunks() -> Iterator[bytes]:
        yield bytes(6 * MIB)
        raise RuntimeError("the device is gone")

    with pytest.raises(CheckpointError, match="RuntimeError: the device is gone"):
        RemoteStore(url).write("draft/big", chunks())
    assert RemoteStore(url).list("draft") == []
    assert "Uploads" not in client.list_multipart_uploads(Bucket=BUCKET)


def test_the_server_refuses_a_name_that_is_taken(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The condition is the server's: nothing here looks first."""
    from s3fs import S3FileSystem

    monkeypatch.setattr(S3FileSystem, "exists", None)
    objects = layer.Objects(url, 0.0)
    objects.put("name", b"one\n", new=True)
    objects.put("name", b"one\n", new=True)  # the same, as after an answer that was lost
    with pytest.raises(FileExistsError):
        objects.put("name", b"two\n", new=True)
    assert objects.get("name") == b"one\n"


@pytest.mark.parametrize("status", [500, 503])
def test_fault_3_errors_of_the_server_pass(url: str, server: Server, status: int) -> None:
    store = RemoteStore(url, pause=0.0)
    store.prepare()
    failures = [1]

    def once(method: str, path: str) -> int | None:
        if method == "PUT" and "rank-00000" in path and failures.pop(0) if failures else 0:
            return status
        return None

    server.before = once
    save(store, whole(sample(1)), {}, 1, ALONE)
    live = blank(sample())
    load(store, 1, whole(live), ALONE)
    assert equal(live, sample(1)) and not failures


def test_fault_15_a_bucket_that_does_not_exist_or_may_not_be_written_is_named(server: Server) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be written to s3://nowhere/x: .*check that the bucket exists"):
        RemoteStore("s3://nowhere/x", pause=0.0).prepare()
    server.before = lambda method, path: 403 if method == "PUT" else None
    with pytest.raises(CheckpointError, match=rf"cannot be written to s3://{BUCKET}/forbidden: .*you may write to it"):
        RemoteStore(f"s3://{BUCKET}/forbidden", pause=0.0).prepare()
    server.before = lambda method, path: None


def test_what_the_server_does_not_delete_is_said(url: str, server: Server) -> None:
    store = RemoteStore(url, pause=0.0)
    store.write("draft/a", [b"1"])
    store.write("draft/b", [b"2"])
    server.before = lambda method, path: 403 if method in ("POST", "DELETE") else None
    with pytest.raises(OSError, match=r"403|Forbidden|could not be deleted"):
        store.remove("draft")


@pytest.mark.parametrize("kind", fast("memory", of=["memory", "s3"]))
def test_m8_commands_take_urls(url: str, tmp_path: Path, kind: str) -> None:
    url = url.replace("s3", kind, 1)
    store = RemoteStore(url)
    for step in (1, 2, 3):
        save(store, whole(sample(step)), {"config": {"model": {"dim": 4}}}, step, ALONE)
    point(store, "best", "step-00000001")
    of_run = url.removesuffix("/checkpoints")
    assert [row["step"] for row in json.loads(run("ls", of_run, "--json").stdout)] == [3, 2, 1]
    assert json.loads(run("show", url, "2", "--json").stdout)["step"] == 2
    assert json.loads(run("verify", f"{url}/step-00000001", "--json").stdout)["name"] == "step-00000001"
    assert json.loads(run("verify", f"{url}/best", "--json").stdout)["name"] == "step-00000001"
    assert locate(of_run).name == "step-00000003" and locate(of_run).run is None
    assert run("diff", f"{url}/best", f"{url}/step-00000001").exit_code == 0
    differs = run("diff", url, f"{url}/best", "--json")
    assert differs.exit_code == 1 and json.loads(differs.stdout)["a"] == f"{url}/step-00000003"
    for output in (f"{url}-averaged", tmp_path / "averaged"):
        done = run("average", of_run, "1", "2", "--output", output)
        assert done.exit_code == 0, done.output
        place = locate(output)
        live = {"model/embed.weight": torch.zeros(40, 12)}
        load(place.store, place.name, whole(live), ALONE, strict=False)
        expected = (sample(1)["model/embed.weight"].double() + sample(2)["model/embed.weight"].double()) / 2
        assert torch.equal(live["model/embed.weight"], expected.float())
    assert run("average", of_run, "1", "2", "--output", f"{url}-averaged").exit_code == 2, "it is taken"
    assert "step-00000002            goes" in run("prune", of_run, "--last", "1").output
    done = run("prune", of_run, "--last", "1", "--yes")
    assert done.exit_code == 0 and [name for name in store.list() if "step" in name] == ["step-00000001", "step-00000003"]


def test_commands_refuse_a_url_without_checkpoints(url: str) -> None:
    for given in (url, f"{url}/step-00000001", "s3://nowhere/x"):
        done = run("ls", given)
        assert done.exit_code == 2 and f"{given} has no checkpoints; use the URL of a run" in done.output
