"""Small decoders with drawn weights, as for the tests of forge-models."""

from models.conftest import make, tokens

__all__ = ["make", "tokens"]
