"""Attentions that do not do what they have to."""

from conformance.bad import mlps
from conformance.bad.mlps import made
from conformance.modules import alone, average, halves, infinite, noisy, running, unused
from conformance.part import Part


def refuses(context):
    raise ValueError("heads 4 are too few")


BAD = {
    "check_specs": [*mlps.BAD["check_specs"], (Part(make=made(alone), says=(("check", refuses),)), "heads 4 are too few")],
    "check_matrices": mlps.BAD["check_matrices"],
    "check_causality": [
        (Part(make=made(average)), "tokens up to 0 see later ones"),
        (Part(make=made(alone)), "token 1 does not see token 0"),
        (Part(make=made(halves)), "becomes"),
    ],
    "check_documents": [(Part(make=made(running)), "second document of a row sees another")],
    "check_deterministic": [(Part(make=made(noisy)), "other outputs the second time")],
    "check_gradients": [
        (Part(make=made(unused)), "weight gets no gradient"),
        (Part(make=made(infinite)), "gradient of weight is not finite"),
    ],
}
