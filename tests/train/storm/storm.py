"""A run in a storm of faults, and the same run without one: both finish, and their last checkpoints have the same bits.

`python -m train.storm.storm --minutes 30 --seed 1`, which is what `nox -s storm` does. Faults come from outside, at random
moments that a seed fixes, twenty seconds apart in the mean; what the storm did, and what became of the run, is printed. Around
the run stands what a scheduler and a person would be: it is started again whenever its exit code says that this helps.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from forge_ckpt.format.names import LATEST, MANIFEST, committed
from train.storm.faults import FAULTS, Struck
from train.storm.weather import FAULTY, FOLDER, PACE

HERE = Path(__file__).parent
RANKS = 4
MEAN_SECONDS = 20.0
AGAIN = {75: "was asked to stop", 5: "lost a rank", 1: "failed", 93: "got nowhere", -signal.SIGKILL: "lost its launcher"}
"""Exit codes after which a scheduler (75), or a person who has read the message, starts a run again."""

RECIPE = """
[job]
name = "storm"
seed = 3

[model]
name = "decoder"
dim = 16
layers = 2
heads = 4
kv_heads = 2
ffn_dim = 24
vocab_size = 61
max_length = 32

[data]
sequence_length = 16

[[data.sources]]
name = "random"
vocab_size = 61
tokens = 4000
document = 23
weight = 0.7
label = "many"

[[data.sources]]
name = "random"
vocab_size = 61
tokens = 900
document = 11
seed = 5
weight = 0.3
label = "few"

[train]
max_steps = 100000000
threads = 1
global_batch = 8
micro_batch = 1

[precision]
compute = "fp32"

[parallel]
patience = 1.0
timeout = 60.0
step_timeout = 8.0
least_timeout = 8.0

[optimizer]
name = "adamw"
lr = 1e-3

[schedule]
name = "constant"

[checkpoint]
keep = 4
first = true

[[hooks]]
name = "{weather}:Weather"

[[hooks]]
name = "ema"

[[hooks]]
name = "save"
"""
WAYS = (("sync", ""), ("async", "thread"), ("async", "process"))
"""How a life of the run saves: drawn anew for each."""


class StormError(Exception):
    """The run did not come through."""


class Planned(NamedTuple):
    """A fault that will be: after so many seconds, and not before the run has reached a step."""

    seconds: float
    step: int
    kind: str
    rank: int


class End(NamedTuple):
    """What a run has come to.

    Attributes:
        name: of its last checkpoint.
        files: bytes of tensors, by file.
        facts: position of the data and tokens seen.
    """

    name: str
    files: dict[str, bytes]
    facts: dict[str, object]


def drawn(seed: int, seconds: float, ranks: int, mean: float = MEAN_SECONDS) -> Iterator[Planned]:
    """The faults of a storm, in the order of time. Every kind comes once before one comes again."""
    draw, at, left = random.Random(seed), 0.0, list[str]()
    while (at := at + draw.expovariate(1 / mean)) < seconds:
        left = left or draw.sample(list(FAULTS), len(FAULTS))
        yield Planned(at, 0, left.pop(), draw.randrange(ranks))


@dataclass
class Storm:
    """One run of so many ranks in a folder.

    Attributes:
        lives: how often it was started, by why.
        did: faults that struck, by kind.
    """

    folder: Path
    ranks: int = RANKS
    seed: int = 0
    every: int = 20
    pace: float = 0.1
    faulty: bool = False
    lives: Counter[str] = field(default_factory=Counter)
    did: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.recipe = self.folder / "storm.toml"
        self.recipe.write_text(RECIPE.format(weather=HERE / "weather.py"))
        self.draw, self.began = random.Random(f"lives of {self.seed}"), time.monotonic()
        self.struck = Struck(0, self.folder, self.folder / "runs" / "storm" / "checkpoints")

    @property
    def step(self) -> int:
        """The newest step of any life of the run."""
        try:
            return int((self.folder / "step").read_text())
        except OSError:
            return 0

    def calm(self, until: int) -> End:
        """Trains to a step without another fault.

        Raises:
            StormError: it does not get there.
        """
        self._live([], until)
        return end_of(self.struck.checkpoints)

    def rage(self, faults: Sequence[Planned], until: int | None = None) -> None:
        """Trains while faults strike, to a step; without one until the last of them is over.

        Raises:
            StormError: the run ended in a way that says not to start it again, or got nowhere for ten minutes.
        """
        self._live(faults, until)

    def say(self, line: str) -> None:
        print(f"{time.monotonic() - self.began:7.1f} s  step {self.step:6}  {line}", flush=True)

    def _live(self, faults: Sequence[Planned], until: int | None) -> None:
        waiting, why, since = list(faults), "the start", time.monotonic()
        while True:
            self.lives[why] += 1
            process = self._start(until)
            self.struck.launcher = process.pid
            try:
                while (code := process.poll()) is None:
                    now = time.monotonic()
                    self.struck.settle()
                    if waiting and now - since >= waiting[0].seconds and self.step >= waiting[0].step:
                        self._strike(waiting.pop(0))
                    elif not waiting and until is None and not self.struck.undo:
                        process.send_signal(signal.SIGTERM)
                        until = -1
                    if now - self._moved() > 600:
                        raise StormError("the run has got nowhere for ten minutes")
                    time.sleep(0.02)
            finally:
                self.struck.settle(all_of_them=True)
                process.kill()
                process.wait()
            if code == 0 or until == -1:
                if waiting:
                    raise StormError(f"the run was over before {len(waiting)} of {len(faults)} faults")
                return
            if code not in AGAIN:
                raise StormError(f"exit code {code}: see {self.folder / 'said'}")
            why = AGAIN[code]
            self.say(f"exit code {code}, the run {why}: it is started again")

    def _strike(self, fault: Planned) -> None:
        if done := FAULTS[fault.kind](self.struck, fault.rank):
            self.did[fault.kind] += 1
            self.say(done)

    def _moved(self) -> float:
        """When the newest step was complete, or the run began."""
        step, now = self.step, time.monotonic()
        if step != getattr(self, "_seen", (None, 0.0))[0]:
            self._seen = step, now
        return self._seen[1]

    def _start(self, until: int | None) -> "subprocess.Popen[bytes]":
        mode, saver = self.draw.choice(WAYS)
        options = [f"--checkpoint.every={self.every}", f"--checkpoint.mode={mode}"]
        options += [f"--checkpoint.saver={saver}"] if saver else []
        if until is not None and until > 0:
            options.append(f"--train.stop_at={until}")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", FOLDER: str(self.folder), PACE: str(self.pace)}
        environment |= {FAULTY: "1"} if self.faulty else {}
        command = [
            sys.executable,
            "-m",
            "forge_train",
            "run",
            "storm.toml",
            f"--processes={self.ranks}",
            "--restarts=3",
            *options,
        ]
        # A pipe, since a process whose files cannot grow could not say so into one.
        process = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        threading.Thread(target=_keep, args=(process.stdout, self.folder / "said"), daemon=True).start()
        return process

    def without(self, folder: Path) -> "Storm":
        """The same run, for another folder and without a fault: it meets the same gradients that are not finite, and no more."""
        other = Storm(folder, self.ranks, self.seed, self.every, pace=0.0)
        for bad in self.folder.glob("bad-*"):
            (folder / bad.name).write_bytes(bad.read_bytes())
        return other


def end_of(checkpoints: Path) -> End:
    """The last checkpoint of a run."""
    place = checkpoints / (checkpoints / LATEST).read_text().strip()
    meta = json.loads((place / MANIFEST).read_text())["manifest"]["meta"]
    files = {path.name: path.read_bytes() for path in place.glob("*.bin")}
    return End(f"step {committed([place.name])[0].step}", files, {key: meta[key] for key in ("cursor", "tokens")})


def differences(one: End, other: End) -> list[str]:
    """Of two ends, what is not the same, bit by bit."""
    files = sorted(one.files.keys() | other.files.keys())
    found = [f"file {name}" for name in files if one.files.get(name) != other.files.get(name)]
    found += [f"{key}: {one.facts[key]} and {other.facts[key]}" for key in one.facts if one.facts[key] != other.facts[key]]
    return found if one.name == other.name else [f"{one.name} and {other.name}", *found]


def main() -> None:
    """Exit code 1 when the run did not come through, or its weights are others."""
    parser = argparse.ArgumentParser(prog="storm", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="of faults; the run and the clean one then finish")
    parser.add_argument("--seed", type=int, default=None, help="of the faults; drawn and printed when absent")
    parser.add_argument("--folder", type=Path, default=None, help="where both runs stay; removed at the end when absent")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    faults = list(drawn(seed, 60 * options.minutes, RANKS))
    print(f"storm of {options.minutes:g} minutes, seed {seed}: {len(faults)} faults on {RANKS} ranks", flush=True)
    with tempfile.TemporaryDirectory(prefix="forge-storm-") as temporary:
        folder = options.folder or Path(temporary)
        storm = Storm(folder / "stormy", seed=seed)
        try:
            storm.rage(faults)
            until = storm.step + storm.every // 2
            storm.say(f"the storm is over; on to step {until}")
            end = storm.calm(until)
            storm.say("finished; now the clean run")
            found = differences(end, storm.without(folder / "clean").calm(until))
        except StormError as cause:
            print((storm.folder / "said").read_text(errors="replace")[-4000:])
            sys.exit(f"storm of seed {seed}: {cause}")
        for count, kind in sorted(((count, kind) for kind, count in storm.did.items()), reverse=True):
            print(f"{count:5}  {kind.replace('_', ' ')}")
        within = (storm.folder / "said").read_bytes().count(b"; restart ")
        print(f"{sum(storm.did.values())} faults struck; starts: {dict(storm.lives)}, and {within} by the launcher itself")
        if found:
            sys.exit(f"storm of seed {seed}: the run has other bits than a clean one: {'; '.join(found)}")
        print(f"{end.name}: the same bits as a run without faults")


def _keep(stream: "IO[bytes]", path: Path) -> None:
    with stream, path.open("ab", buffering=0) as file:
        for line in stream:
            file.write(line)


if __name__ == "__main__":
    main()
