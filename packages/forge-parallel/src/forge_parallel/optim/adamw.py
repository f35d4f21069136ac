"""AdamW with torch's fused kernel. All state exists from construction on, and a step can be skipped on the device."""

from collections.abc import Mapping, Sequence

import torch

from forge_core.protocols.model import NamedTensor, TrainableModel
from forge_parallel.optim.groups import DECAYED, HasTorchView


class AdamW(HasTorchView):
    """Updates `model.trainable()`; implements `forge_core.protocols.model.Optimizer`."""

    def __init__(self, model: TrainableModel, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        named = list(model.trainable())
        self._named = named
        self._lr = lr
        groups = [
            {"params": [t for _, t, group in named if group in DECAYED], "weight_decay": weight_decay},
            {"params": [t for _, t, group in named if group not in DECAYED], "weight_decay": 0.0},
        ]
        # A pipeline stage may have nothing to train; torch accepts an empty group, but not an empty list of groups.
        filled = [group for group in groups if group["params"]] or groups[:1]
        self._adamw = torch.optim.AdamW(filled, lr=lr, betas=betas, eps=eps, fused=True)
        for _, tensor, _ in named:
            self._adamw.state[tensor] = {
                "step": torch.zeros((), dtype=torch.float32, device=tensor.device),
                "exp_avg": torch.zeros_like(tensor, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(tensor, memory_format=torch.preserve_format),
            }

    @torch.no_grad()
    def step(self, skip: torch.Tensor | None = None) -> None:
        """Updates the parameters; if `skip` is 1, nothing changes, the step count included."""
        if skip is not None and self._named:
            # Otherwise torch would copy it asynchronously, and a kernel on the host would read it too early.
            skip = skip.to(self._named[0].tensor.device)
        # The fused kernel reads this attribute; torch's gradient scaler uses it to skip steps as well.
        self._adamw.found_inf = skip  # type: ignore[attr-defined]
        self._adamw.step()

    def set_factor(self, factor: float) -> None:
        """Sets the learning rate to `factor` times its peak."""
        for group in self._adamw.param_groups:
            group["lr"] = self._lr * factor

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self._adamw.param_groups[0]["lr"]

    def zero_grad(self) -> None:
        """Frees all gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def trained(self) -> Sequence[NamedTensor]:
        """Returns the updated parameters."""
        return self._named

    def state(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Returns `step` (scalar), `exp_avg` and `exp_avg_sq` (shaped like the parameter) by global name."""
        return {key: {name: self._adamw.state[t][key] for name, t, _ in self._named} for key in ("step", "exp_avg", "exp_avg_sq")}
