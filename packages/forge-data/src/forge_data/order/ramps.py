"""How many samples each source gives in a stretch of a ramp, so that many short stretches do not add up their errors.

Every stretch owes each source its exact share of samples, and what the stretches before left; whole samples go to the
source that is owed most, one after the other. Then, at the end of every stretch, a source of k is ahead of its exact
share by less than one sample and behind by at most 1/2 + 1/3 + ... + 1/k.

Ahead: before a sample is given the debts add up to 1 at least, so the largest is above 0. Behind: let D_j be the sum of
the j largest debts after a stretch; D_k = 0, as all together are owed what is given. We show D_j <= j (1/(j+1) + ... +
1/k), downwards from j = k. If only those j were given samples in the stretch, they got all of them, so their debts did
not grow in sum. Else another source was given one while it was owed as much as each of the j, so it is owed at least
D_j / j - 1 afterwards, and D_{j+1} >= D_j + D_j / j - 1, from which the claim follows. j = 1 is the bound.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import floor


def given(owed: Sequence[Fraction], samples: int) -> list[int]:
    """Samples of each source, `samples` in all, each to the source that is owed most by then.

    Args:
        owed: to each source, `samples` in sum; what is left of it after giving is its debt.
        samples: of the stretch.
    """
    found = [max(0, floor(debt)) for debt in owed]
    while sum(found) < samples:
        found[max(range(len(owed)), key=lambda i: owed[i] - found[i])] += 1
    while sum(found) > samples:
        found[min((i for i in range(len(owed)) if found[i]), key=lambda i: owed[i] - found[i])] -= 1
    return found
