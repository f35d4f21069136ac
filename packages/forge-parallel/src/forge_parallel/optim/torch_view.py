"""A `torch.optim.Optimizer` for learning-rate schedulers and training loops that expect one: `optimizer.torch()` returns it."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from forge_core.errors import PlanError
from forge_core.protocols.model import NamedTensor, Optimizer
from forge_parallel.placement.boxes import local_box

FIXED = ("weight_decay", "betas", "momentum", "eps")
"""Keys of torch's parameter groups that would have no effect."""


class ViewedOptimizer(Optimizer, Protocol):
    """An optimizer with one learning rate, `lr`."""

    lr: float

    def trained(self) -> Sequence[NamedTensor]:
        """Returns the parameters that the optimizer updates."""
        ...


class TorchOptimizer(torch.optim.Optimizer):
    """View of an optimizer: one parameter group with its learning rate, and its live state.

    A rate that is written to the group applies from the next step on. All other rates, such as those of parameter groups and of
    Muon's AdamW, keep their ratio to it.

    Raises:
        PlanError: the learning rate is 0.
    """

    def __init__(self, optimizer: ViewedOptimizer) -> None:
        self._optimizer = optimizer
        now = optimizer.lr
        optimizer.set_factor(1.0)
        self._peak = optimizer.lr
        if self._peak == 0:
            raise PlanError("optimizer.torch(): a learning rate of 0 cannot be scaled; build the optimizer with its peak rate")
        optimizer.set_factor(now / self._peak)
        named = optimizer.trained()
        super().__init__([{"params": [(name, tensor) for name, tensor, _ in named]}], {"lr": now})
        self.state = defaultdict(dict, {tensor: {} for _, tensor, _ in named})
        tensors = {name: tensor for name, tensor, _ in named}
        for key, states in optimizer.state().items():
            for name, state in states.items():
                self.state[tensors[name]][key] = state

    def step(self, closure: Callable[[], Any] | None = None, *, skip: Tensor | None = None) -> Any:  # type: ignore[override]
        """Does one update with the group's learning rate and returns the result of `closure`, which computes the gradients.

        Raises:
            PlanError: the group has a key that would have no effect.
        """
        (group,) = self.param_groups
        if written := [key for key in FIXED if key in group]:
            raise PlanError(
                f"optimizer.torch(): {', '.join(written)} of a parameter group would have no effect; set it where the optimizer "
                "is built, and of single parameters with forge_parallel.optim.ParameterGroup"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._optimizer.set_factor(float(group["lr"]) / self._peak)
        self._optimizer.step(skip)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`; only for its constructor.

        Raises:
            PlanError: the optimizer has its parameters already.
        """
        if self.param_groups:
            raise PlanError(
                "optimizer.torch(): parameters cannot be added; build another optimizer, and give single parameters their own "
                "rate with forge_parallel.optim.ParameterGroup"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Copies a result of `state_dict` into the state, and its learning rate into the group. Nothing changes if it is refused.

        Raises:
            PlanError: it is of other parameters, or of another optimizer.
        """
        (group,), (saved, *others) = self.param_groups, state_dict["param_groups"]
        names = saved.get("param_names", group["param_names"])
        if others or list(names) != list(group["param_names"]) or len(saved["params"]) != len(group["params"]):
            raise PlanError(
                "optimizer.torch(): the state is of other parameters; load a state_dict() of the same model, layout and groups, "
                "or use checkpoints of forge_ckpt, which fit any layout"
            )
        copies: list[tuple[Tensor, Tensor]] = []
        for index, name, tensor in zip(saved["params"], names, group["params"], strict=True):
            state, stored = self.state[tensor], state_dict["state"].get(index, {})
            if stored.keys() != state.keys() or any(stored[key].shape != state[key].shape for key in state):
                raise PlanError(
                    f"optimizer.torch(): the state of {name} has {', '.join(stored) or 'nothing'} instead of "
                    f"{', '.join(state)} in the same shapes; load a state_dict() of the same optimizer"
                )
            copies += [(local_box(state[key]).local, local_box(stored[key]).local) for key in state]
        for live, value in copies:
            live.copy_(value)
        group.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
