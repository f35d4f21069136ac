"""Orders of work that leave something out, or never end."""

from dataclasses import dataclass

from conformance.bad.transforms import OPTIONS
from conformance.part import Part
from forge_parallel.pipeline.schedules import Action, TorchSchedule


@dataclass(frozen=True)
class Order(TorchSchedule):
    """1F1B, changed by `spoil` of (rank, its order)."""

    spoil: object = None

    def actions(self, ranks, micro_batches):
        return tuple(tuple(self.spoil(rank, list(order))) for rank, order in enumerate(super().actions(ranks, micro_batches)))


def spoiled(spoil, rule="any") -> Part:
    return Part(make=lambda: Order("mine", "Schedule1F1B", rule, spoil=spoil))


def split(rank, order):
    return [half for a in order for half in ((Action("I", *a[1:]), Action("W", *a[1:])) if a.kind == "B" else (a,))]


def shifted(rank, order):
    return [a._replace(stage=1 - a.stage) if a.stage < 2 else a for a in order]


def one_by_one(rank, order):
    """A micro-batch begins when the one before it is done on all ranks: the first rank waits for its backward."""
    return sorted(order, key=lambda a: (a.micro_batch, a.kind != "F"))


class Refuses(TorchSchedule):
    def refusal(self, ranks, micro_batches):
        return "no"


class Accepts(TorchSchedule):
    def refusal(self, ranks, micro_batches):
        return None


BAD = {
    "check_options": OPTIONS,
    "check_order": [
        (spoiled(lambda rank, order: order[:-1]), "backward 0 times whole"),
        (spoiled(lambda rank, order: order + order[:1]), "forward 2 times"),
        (spoiled(shifted), "a stage of rank"),
        (spoiled(split), "splits_backward is False"),
        (Part(make=lambda: Refuses("mine", "Schedule1F1B", "any")), "refuses .* micro-batches"),
    ],
    "check_ends": [
        (spoiled(lambda rank, order: order[::-1]), "deadlocks"),
        (spoiled(one_by_one), "more than GPipe's"),
    ],
    "check_refusals": [
        (Part(make=lambda: Refuses("mine", "Schedule1F1B", "any")), "refuses one micro-batch per stage"),
        (Part(make=lambda: Accepts("mine", "Schedule1F1B", "any")), "does not refuse 0"),
    ],
}
