"""Adapters that do not do what they have to."""

from conformance.modules import One, alone, infinite, noisy, unused
from conformance.part import Part


def as_many(n):
    return n


def made(work, **options):
    return lambda context: One(work, context.dim, context.width, **options)


def matrix(weight, x):
    return x @ weight.T


def of_all(weight, x):
    return matrix(weight, x + x.mean(0, keepdim=True))


def without_last(weight, x):
    return matrix(weight, x[:, [*range(x.shape[1] - 1), 0]])


def halved(weight, x):
    return matrix(weight, x)[..., :6]


SAYS = (("tokens", as_many),)
BAD = {
    "check_specs": [(Part(make=made(matrix, specs={}), says=SAYS), "leave out weight")],
    "check_tokens": [
        (Part(make=made(matrix), says=(("tokens", lambda n: n // 4),)), "means"),
        (Part(make=made(alone), says=SAYS), "the adapter returns the shape"),
    ],
    "check_no_image": [
        (Part(make=made(halved), says=SAYS), r"an empty batch returns the shape \(0, 16, 6\)"),
        (Part(make=made(lambda weight, x: infinite(weight, matrix(weight, x))), says=SAYS), "a nonzero gradient"),
    ],
    "check_images": [(Part(make=made(of_all), says=SAYS), "image 0 alone and with others")],
    "check_all_features": [(Part(make=made(without_last), says=SAYS), "feature 15 does not change any token")],
    "check_deterministic": [(Part(make=made(noisy), says=SAYS), "other outputs the second time")],
    "check_gradients": [
        (Part(make=made(unused), says=SAYS), "weight gets no gradient"),
        (Part(make=made(infinite), says=SAYS), "gradient of weight is not finite"),
    ],
}
