"""Weights of sources as exact numbers. Nothing here imports torch or numpy.

A weight is the number that is written in the recipe, in decimal. At a temperature it is a power of that, which has no
end in decimal, so then the weight is the double nearest to it. From there on nothing is rounded.
"""

from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction
from math import gcd, lcm

from forge_core.errors import DataError

Weight = float | Fraction


def exact_of(weight: Weight) -> Fraction:
    """A weight as it is written in decimal."""
    return weight if isinstance(weight, Fraction) else Fraction(str(weight))


def tempered(weights: Sequence[Weight], temperature: float) -> tuple[Weight, ...]:
    """(weight / largest weight) ** (1 / temperature); 0 stays 0 at any temperature, and at 1 weights stay as they are.

    Powers are worked out in decimal to 40 digits and then rounded to the nearest double: the same one on every machine,
    as no mathematical library of the system takes part.
    """
    if temperature == 1:
        return tuple(weights)
    digits = Context(prec=40)
    exact = [exact_of(weight) for weight in weights]
    largest = max(exact, default=Fraction(0))

    def power(weight: Fraction) -> float:
        ratio = weight / largest
        written = digits.divide(Decimal(ratio.numerator), Decimal(ratio.denominator))
        return float(digits.exp(digits.divide(digits.ln(written), Decimal(str(temperature)))))

    return tuple(power(weight) if weight else 0.0 for weight in exact)


def shares_of(weights: Sequence[Weight]) -> tuple[int, ...]:
    """Draws of each source in the shortest period in which they are exactly in the ratio of `weights`.

    Raises:
        DataError: no weight is above 0, or one is negative or not finite.
    """
    if any(not 0 <= weight < float("inf") for weight in weights):
        raise DataError(f"weights of sources must be finite and not negative: {[float(weight) for weight in weights]}")
    exact = [exact_of(weight) for weight in weights]
    if not any(exact):
        raise DataError("no source has a weight above 0; set the weight of at least one of [[data.sources]]")
    common = lcm(*(fraction.denominator for fraction in exact))
    shares = [int(fraction * common) for fraction in exact]
    divisor = gcd(*shares)
    return tuple(share // divisor for share in shares)
