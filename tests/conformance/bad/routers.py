"""Routers that do not do what they have to."""

from dataclasses import replace

import torch

from conformance.part import Part
from forge_models.blocks.moe.routers import Hash, SigmoidTopK, SoftmaxTopK
from forge_models.shape import RouterContext


class Wrong(SoftmaxTopK):
    """A softmax router whose answer `spoil` changes."""

    def __init__(self, context: RouterContext, spoil) -> None:
        super().__init__(context)
        self.spoil = spoil

    def forward(self, x, tokens):
        return self.spoil(super().forward(x, tokens), x)


def wrong(spoil, **says) -> Part:
    return Part(make=lambda context: Wrong(context, spoil), says=tuple(says.items()))


class Greedy(SigmoidTopK):
    """Its bias moves the wrong way."""

    def balance(self, load, skip):
        super().balance(-load, skip)


class Restless(SigmoidTopK):
    """Its bias moves where nothing may."""

    def balance(self, load, skip):
        super().balance(load, torch.zeros_like(skip))


class Unnamed(SoftmaxTopK):
    def tensor_specs(self):
        return {}


def crowded(routing, x):
    """An expert takes one token of a batch only: what a token chooses depends on the others."""
    taken = routing.experts.clone()
    for at in range(1, len(taken)):
        if taken[at, 0] == taken[at - 1, 0]:
            free = sorted(set(range(8)) - set(taken[at].tolist()))
            taken[at, 0] = free[0]
    return routing._replace(experts=taken)


BAD = {
    "check_specs": [(Part(make=Unnamed), "leave out weight")],
    "check_choice": [
        (wrong(lambda r, x: r._replace(experts=r.experts[:, :1].expand_as(r.experts))), "an expert twice"),
        (wrong(lambda r, x: r._replace(experts=r.experts + 1)), "not all in 0 to 7"),
        (wrong(lambda r, x: r._replace(experts=r.experts.int())), "not int64"),
        (wrong(lambda r, x: r._replace(experts=r.experts[:, :2])), "experts have shape"),
        (wrong(crowded), "other experts alone than among others"),
    ],
    "check_weights": [
        (wrong(lambda r, x: r._replace(weights=r.weights / 0)), "weights are not finite"),
        (wrong(lambda r, x: r._replace(weights=r.weights.to(x.dtype))), "not fp32"),
        (wrong(lambda r, x: r._replace(weights=r.weights * 2), total=1.0), "off `total` = 1.0"),
        (wrong(lambda r, x: r._replace(probabilities=r.probabilities * 2)), "off 1 by"),
    ],
    "check_learned": [
        (wrong(lambda r, x: r._replace(weights=r.weights.detach() + 0 * x.sum().requires_grad_())), "weight gets no gradient"),
        (wrong(lambda r, x: r._replace(probabilities=None)), "gives no probabilities"),
        (wrong(lambda r, x: r, learned=False), "has parameters"),
        (Part(make=Hash), "gives no probabilities"),
    ],
    "check_balance": [
        (Part(make=lambda context: Greedy(replace(context), bias_rate=1e-3)), "as full as it was"),
        (Part(make=Restless), "skip = 1 changes bias"),
    ],
}
