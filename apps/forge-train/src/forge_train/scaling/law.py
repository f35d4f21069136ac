"""The law L(N, D) = E + A / N^alpha + B / D^beta of parameters and tokens (Hoffmann et al., 2022), and what follows from it."""

import math
from dataclasses import dataclass

_LARGEST = math.log(1e300)
FLOPS = 6
"""Of forward and backward for each parameter and token: the compute of a run is C = 6 N D."""


@dataclass(frozen=True)
class Law:
    """Constants of the law; losses in nats per token. N and D of the formulas are parameters and tokens.

    Attributes:
        irreducible: E, the loss that neither parameters nor tokens lower.
        a, alpha: A and alpha, of the parameters.
        b, beta: B and beta, of the tokens.
    """

    irreducible: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """L(N, D)."""
        return self.irreducible + self.a / parameters**self.alpha + self.b / tokens**self.beta

    @property
    def parameters_exponent(self) -> float:
        """a in N*(C) ~ C^a: beta / (alpha + beta)."""
        return self.beta / (self.alpha + self.beta)

    @property
    def tokens_exponent(self) -> float:
        """b in D*(C) ~ C^b: alpha / (alpha + beta)."""
        return self.alpha / (self.alpha + self.beta)

    @property
    def loss_exponent(self) -> float:
        """gamma in L*(C) - E ~ C^-gamma: alpha beta / (alpha + beta)."""
        return self.alpha * self.beta / (self.alpha + self.beta)

    def best_parameters(self, flops: float) -> float:
        """N*(C) = G (C / 6)^a with G = (alpha A / (beta B))^(1 / (alpha + beta)): the least loss for C = 6 N D.

        Raises:
            OverflowError: it is no positive finite number, as where a term does not fall.
        """
        terms = self.alpha * self.a, self.beta * self.b
        if min(*terms, self.alpha, self.beta) > 0 and max(terms) < math.inf:
            power = math.log(terms[0]) - math.log(terms[1]) + self.beta * math.log(flops / FLOPS)
            if abs(power := power / (self.alpha + self.beta)) < _LARGEST:
                return math.exp(power)
        raise OverflowError(f"the law has no best size for {flops:g} FLOPs that is a finite number: {self}")

    def best_tokens(self, flops: float) -> float:
        """D*(C) = C / (6 N*(C))."""
        return flops / (FLOPS * self.best_parameters(flops))

    def best_loss(self, flops: float) -> float:
        """The least loss that C FLOPs can reach."""
        return self.loss(self.best_parameters(flops), self.best_tokens(flops))
