"""Hooks that keep what cannot be kept, or reach into the run."""

import torch

from conformance.part import Part
from forge_core.protocols.run import Hook


class Counts(Hook):
    """Right: counts steps, and gives the number back."""

    def __init__(self):
        self.seen = 0

    def after_step(self, run, result):
        self.seen += 1

    def state(self):
        return {"seen": self.seen}

    def load_state(self, state):
        self.seen = state["seen"]


class KeepsTensors(Counts):
    def state(self):
        return {"seen": torch.tensor(self.seen)}


class KeepsTuples(Counts):
    def state(self):
        return {"seen": (self.seen,)}


class KeepsNan(Counts):
    def state(self):
        return {"seen": float("nan")}


class Forgets(Counts):
    def load_state(self, state):
        pass


class Reaches(Hook):
    """Looks at what only the trainer's own run has."""

    def after_step(self, run, result):
        run.training.factor(run.state.step)


class Writes(Hook):
    def start(self, run):
        run.health = run.health


class Trains(Hook):
    """Changes weights."""

    def after_step(self, run, result):
        with torch.no_grad():
            for item in run.model.trainable():
                item.tensor.mul_(0.99)


class SaysTooMuch(Counts):
    observes = "mostly"


BAD = {
    "check_state": [
        (Part(make=KeepsTensors), "is not JSON"),
        (Part(make=KeepsTuples), "reads back from JSON as"),
        (Part(make=KeepsNan), "is not JSON"),
        (Part(make=Forgets), "state\\(\\) returns {'seen': 0}"),
    ],
    "check_protocol": [
        (Part(make=Reaches), "uses training of the run"),
        (Part(make=Writes), "uses health of the run"),
        (Part(make=SaysTooMuch), "observes is 'mostly'"),
    ],
    "check_result": [(Part(make=Trains), "changes what is trained")],
}
