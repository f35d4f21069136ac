"""A rank that raises takes the others down at once, under the launcher that users have, and its cause is what one reads."""

import os
import subprocess
import sys
import time
from pathlib import Path

from train.runs import TINY

HOOK = '''
import os
import time
from dataclasses import dataclass
from pathlib import Path

from forge_core.component import Component
from forge_core.errors import ForgeError
from forge_core.protocols.run import Hook


class Failing(Hook):
    def before_step(self, run):
        if run.state.step == 2 and run.topology.rank == 1:
            Path(os.environ["WHEN"]).write_text(str(time.time()))
            raise ForgeError("the device of rank 1 is on fire")


@dataclass(frozen=True, kw_only=True)
class Fails(Component):
    """Raises on rank 1."""

    def build(self, run):
        return Failing()
'''


def test_under_torchrun_the_others_end_within_seconds_and_the_cause_comes_first(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HOOK)
    (tmp_path / "tiny.toml").write_text(TINY + '\n[[hooks]]\nname = "./mine.py:Fails"\n')
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WHEN": str(tmp_path / "when")}
    done = subprocess.run(
        [*launcher, "-m", "forge_train", "run", "tiny.toml"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=environment,
    )
    ended = time.time()
    assert done.returncode != 0
    assert ended - float((tmp_path / "when").read_text()) < 10
    said = done.stderr + done.stdout
    assert "the device of rank 1 is on fire" in said
    others = [said.find(words) for words in ("Connection closed by peer", "Connection reset") if words in said]
    assert all(said.find("the device of rank 1 is on fire") < place for place in others)
    logs = (tmp_path / "runs" / "tiny" / "logs" / "rank-00001.log").read_text()
    assert "the device of rank 1 is on fire" in logs
