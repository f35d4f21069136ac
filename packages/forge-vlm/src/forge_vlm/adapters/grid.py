"""The square grid that features of an image lie on. Plain arithmetic: importing it needs no torch."""

from math import isqrt


def side(tokens: int, what: str) -> int:
    """Rows, which are as many as columns, of `tokens` features.

    Raises:
        ValueError: they are not a square.
    """
    root = isqrt(tokens)
    if root * root != tokens:
        raise ValueError(
            f"{what} needs a square grid of features, and {tokens} are none; if one of them is the class token, leave it out "
            "(encoder.class_feature = false, or encoder.class_token = false)"
        )
    return root


def windows(tokens: int, size: int, what: str) -> int:
    """Windows of size x size of which `tokens` features consist.

    Raises:
        ValueError: they are not a square, or windows of this size leave something over.
    """
    root = side(tokens, what)
    if root % size:
        raise ValueError(f"{what} {size} must divide the {root} x {root} grid of {tokens} features")
    return (root // size) ** 2
