"""Feed-forward parts that do not do what they have to."""

from conformance.modules import One, alone, average, halves, infinite, noisy, unused
from conformance.part import Part
from forge_core.specs import Matrix


def made(work, **options):
    return lambda context: One(work, context.dim, context.dim, **options)


def half(context):
    return {"": Matrix((context.dim // 2, context.dim), ("embed", "embed"))}


BAD = {
    "check_specs": [(Part(make=made(alone, specs={})), "leave out weight")],
    "check_matrices": [(Part(make=made(alone), says=(("matrices", half),)), r"matrices\(context\) says")],
    "check_tokens": [
        (Part(make=made(average)), "token 0 alone and in its row"),
        (Part(make=made(halves)), "becomes"),
    ],
    "check_deterministic": [(Part(make=made(noisy)), "other outputs the second time")],
    "check_gradients": [
        (Part(make=made(unused)), "weight gets no gradient"),
        (Part(make=made(infinite)), "gradient of weight is not finite"),
    ],
}
