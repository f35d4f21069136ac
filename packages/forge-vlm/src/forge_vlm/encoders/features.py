"""Features that were computed before, in the place of images."""

from torch import Tensor, nn

from forge_core.specs import ModuleSpec


class Features(nn.Module):
    """The identity on features of a known size."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.size = (tokens, width)

    def forward(self, images: Tensor) -> Tensor:
        """(N, tokens, width) -> the same.

        Raises:
            ValueError: features of another size.
        """
        if images.shape[1:] != self.size:
            raise ValueError(f"features have the shape {tuple(images.shape[1:])}, and {self.size} are expected: tokens, width")
        return images

    @property
    def blocks(self) -> tuple[str, ...]:
        """None."""
        return ()

    def module_specs(self) -> dict[str, ModuleSpec]:
        """None."""
        return {}
