"""What `check` refuses until a GPU has shown it, as far as numbers go: shards on the host, and asynchronous tensor parallelism.

Copies between host and device that are used before they are there are errors here. Products that exchange while they multiply are
not rehearsed: without a compiler, `asynchronous` leaves exchanges and products apart.
"""

import pytest

from forge_parallel.verify.proofs import proven_rows
from harness.pool import World
from parallel.compositions.test_compositions import equals_one_process
from rehearsal.test_parity import measured_where_it_runs

pytestmark = pytest.mark.rehearsal
ON_THE_HOST = [row for row in proven_rows()["gpu"] if "offload" in row and "compile" not in row]
OVERLAPPED = [frozenset({"tp", "tp_asynchronous", "accumulate"}), frozenset({"dp_shard", "tp", "tp_asynchronous", "recompute"})]


@pytest.mark.parametrize("row", ON_THE_HOST, ids=lambda row: "+".join(sorted(row)))
def test_shards_on_the_host_leave_the_numbers_alone(devices: World, row: frozenset[str]) -> None:
    equals_one_process(devices, row, measured_where_it_runs, group=False)


@pytest.mark.parametrize("row", OVERLAPPED, ids=lambda row: "+".join(sorted(row)))
def test_asynchronous_tensor_parallelism_leaves_the_numbers_alone(devices: World, row: frozenset[str]) -> None:
    equals_one_process(devices, row, measured_where_it_runs, group=False)
