"""A vision-language model: encoder, adapter and fusion around `forge_models.decoder.Decoder`.

The module also makes batches with random images for checks; the images of a row are a function of its tokens.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forge_core.batch import IGNORE, PADDING, Batch
from forge_core.protocols.model import LossTerms
from forge_core.specs import Specs
from forge_models.blocks.cache import KVCache
from forge_models.blocks.rope import Rotary, Rotation
from forge_models.decoder import Decoder
from forge_models.inner_values import scope, show
from forge_models.torch_private import assert_async
from forge_vlm.context import FusionContext
from forge_vlm.encoders.vit import patch_mask
from forge_vlm.fusion.fusion import (
    Fusion,
    Inputs,
    Misplaced,
    check_placeholders,
    feature_places,
    on_host,
    prefix_of,
    seen_labels,
    with_zero_gradient,
)
from forge_vlm.fusion.modalities import is_real
from forge_vlm.images.pixels import split_native


class VisionLanguageModel(Decoder):
    """A decoder whose blocks, masks and embedded stream come from a `Fusion`.

    `encoder` and `adapter` convert images to (images, per_image, dim) vectors; both are None if images are discrete tokens.
    They run in every training forward, on an empty batch if no row has an image, so that the collectives of all ranks match. A
    forward without gradients and without images skips them.
    """

    inputs: ClassVar[frozenset[str]] = frozenset({"images", "image_rows", "image_times", "prefix"})

    def __init__(
        self,
        context: FusionContext,
        fusion: Fusion,
        encoder: nn.Module | None,
        adapter: nn.Module | None,
        image_shape: tuple[int, ...],
        frame_time: nn.Module | None = None,
    ) -> None:
        """
        Args:
            context: sizes of the model.
            fusion: builds the blocks.
            encoder: (n, *image_shape) -> (n, tokens, width); None if images are tokens.
            adapter: (n, tokens, width) -> (n, per_image, dim); None if images are tokens.
            image_shape: shape of one image as input of the encoder.
            frame_time: (n,) seconds -> (n, dim), added to the vectors of an image; None: times are no input.
        """
        super().__init__(context.shape, fusion.block)
        self.context, self.fusion, self.image_shape = context, fusion, image_shape
        self.encoder: nn.Module | None = encoder
        self.adapter: nn.Module | None = adapter
        self.frame_time: nn.Module | None = frame_time

    def forward(self, x: Tensor, **given: Any) -> Tensor | LossTerms:
        """See `Decoder`. With a cache the logit of the placeholder is -inf, because a generated placeholder would have no image.

        Raises:
            Misplaced: the model sees the token of a label in a prefix; for tensors on a device the process ends instead.
        """
        if given.get("labels") is not None:
            self._refuse_seen(given["labels"], x if given.get("tokens") is None else given["tokens"], given)
        out = super().forward(x, **given)
        token = self.context.image_token
        if given.get("cache") is None or token is None or self.head is None or not isinstance(out, Tensor):
            return out
        return out.index_fill(-1, torch.tensor([token], device=out.device), -torch.inf)

    def enter(
        self,
        x: Tensor,
        tokens: Tensor | None,
        documents: Tensor | None,
        extras: Mapping[str, Tensor],
        cache: KVCache | None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """See `Decoder`. Extras: `images` (n, ...) are inputs of the encoder, and `image_rows` (B, M) int64 has the numbers of
        each row's images in order, padded with -1. `image_times` (n,) has the seconds of images that are frames, and is negative
        for others; None: no image is a frame. `prefix` (B, T) bool marks tokens, such as those of a prompt, that see each
        other if the fusion has a prefix mask.

        Raises:
            ValueError: `images` or `image_rows` is missing, or `image_times` do not fit.
            Misplaced: a row has more or fewer placeholders than its images need.
        """
        assert tokens is not None
        if self.embed is None and not self.fusion.in_stream:
            raise ValueError(
                "blocks that attend to images need them on every stage of a pipeline, but only the first stage has them; set "
                "parallel.pp = 1, or a fusion with images in the stream"
            )
        if self.embed is not None:
            with scope("", self):
                show("modality", lambda: self.context.modalities.of(tokens).unsqueeze(-1))
        images, image_rows = self._images(tokens, extras, cache)
        visual = here = counts = None
        if images is not None:
            visual, here = self._vectors(images)
            visual = self._with_times(visual, extras.get("image_times")).to(x.dtype)
            counts = here.sum(1) if self.context.varies and here is not None else None
        token = self.context.image_token
        if visual is not None and not len(visual):
            x = with_zero_gradient(x, visual)
        elif visual is not None and image_rows is not None and token is not None and self.fusion.in_stream:
            places = feature_places(tokens, token, image_rows, self.context.per_image, counts)
            vectors = visual.flatten(0, 1)[places.clamp(min=0)]
            x = torch.where((places >= 0).unsqueeze(-1), vectors, x)
        inputs = Inputs(tokens, documents, visual, image_rows, cache, extras.get("prefix"), here)
        return x, {"inputs": inputs, **self.fusion.shared(inputs)}

    def _run_blocks(
        self,
        x: Tensor,
        rotations: dict[Rotary, Rotation],
        masks: dict[int | None, Any],
        cache: KVCache | None,
        shared: dict[str, Any],
    ) -> Tensor:
        inputs = shared.pop("inputs")
        masks = {window: self.fusion.seen(mask, inputs, window, x) for window, mask in masks.items()}
        return super()._run_blocks(x, rotations, masks, cache, shared)

    def _images(self, tokens: Tensor, extras: Mapping[str, Tensor], cache: KVCache | None) -> tuple[Tensor | None, Tensor | None]:
        """Returns the images and their rows; an empty batch of images if a step without images must run the encoder."""
        token = self.context.image_token
        if token is None or self.embed is None:
            return None, None
        images, rows = extras.get("images"), extras.get("image_rows")
        if (images is None) != (rows is None):
            raise ValueError("images and image_rows go together; give both, or neither for text")
        if cache is not None and images is not None and cache.extent != tokens.shape[1]:
            raise ValueError("images come with the first tokens of a cache; give the whole prompt at once (prefill = None)")
        if rows is None:
            rows = tokens.new_full((len(tokens), 1), -1)
            if self.training and torch.is_grad_enabled():
                images = tokens.new_zeros((0, *self.image_shape), dtype=self._dtype)
        if is_real(tokens) and not torch.compiler.is_compiling():
            counts = None
            if self.context.varies:
                counts = tokens.new_zeros(0) if images is None else split_native(images)[1].prod(1).clamp(min=1)
            check_placeholders(tokens, token, rows, self.context.per_image, counts)
        return images, rows

    def _vectors(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns (images, vectors, dim), and the (images, vectors) bool mask without padding; None: no padding."""
        encoder: Any = self.encoder
        adapter: Any = self.adapter
        if not self.context.native:
            return adapter(encoder(images.to(self._dtype))), None
        patches, grids = split_native(images)  # before any cast, because bf16 cannot represent 257
        features = encoder(patches.to(self._dtype), grids)
        here = patch_mask(grids, features.shape[1])
        return (adapter(features), here) if self.context.each else (adapter(features, here), None)

    def _with_times(self, visual: Tensor, times: Tensor | None) -> Tensor:
        """Returns (images, vectors, dim) with the time of each image added. Without times the module runs too, because ranks that
        exchange weights and gradients must run the same modules."""
        if self.frame_time is None:
            if times is not None:
                raise ValueError("image_times need a model that adds them; set model.frame_time, or remove image_times")
            return visual
        if times is None:
            times = visual.new_full((len(visual),), -1)
        if times.shape != visual.shape[:1]:
            raise ValueError(f"image_times has shape {tuple(times.shape)} for {len(visual)} images; give one time for each")
        return visual + self.frame_time(times).unsqueeze(1).to(visual.dtype)

    def example_inputs(self) -> dict[str, Tensor]:
        """Returns the arguments of a small forward through all inner values; see `forge_interp.tap_names.taps`."""
        tokens = torch.zeros(1, 3, dtype=torch.int64, device="meta")
        if self.context.image_token is None:
            return {"x": tokens}
        images = torch.zeros(1, *self.image_shape, dtype=self._dtype, device="meta")
        return {"x": tokens, "images": images, "image_rows": torch.zeros_like(tokens[:, :1])}

    @property
    def without_loss(self) -> frozenset[str]:
        """Returns the parameters without a gradient from a loss on text: those of images in the last block after keys and values,
        because nothing reads the stream of a placeholder after that block."""
        if self.context.image_token is None or not self.fusion.in_stream:
            return frozenset()
        last = f"blocks.{self.shape.layers - 1}."
        read = ("attention.k_", "attention.v_", "attention_norm.")
        names = (name for name, _ in self.named_parameters() if name.startswith(last) and ".image." in name)
        return frozenset(name for name in names if not name.removeprefix(last).startswith(read))

    @property
    def plain_ids(self) -> int:
        """Number of ids from 0 that are plain tokens, which need no image."""
        token = self.context.image_token
        return self.shape.vocab_size if token is None else token

    def with_extras(self, batch: Batch) -> Batch:
        """Returns the batch with images that are a function of each row, for checks; see `forge_core.protocols.model.Model`."""
        token = self.context.image_token
        if token is None:
            return batch
        batch = with_random_images(batch, self.context, self.image_shape)
        seen = self._seen_labels(batch.labels, batch.tokens, {"documents": batch.documents})
        return batch if seen is None else replace(batch, labels=batch.labels.masked_fill(seen, IGNORE))

    def _seen_labels(self, labels: Tensor, tokens: Tensor, given: Mapping[str, Any]) -> Tensor | None:
        token, documents = self.context.image_token, given.get("documents")
        if token is None or getattr(self.fusion, "image_attention", "causal") != "prefix":
            return None
        return seen_labels(labels, prefix_of(tokens, token, documents, given.get("prefix")), documents)

    def _refuse_seen(self, labels: Tensor, tokens: Tensor, given: Mapping[str, Any]) -> None:
        seen = self._seen_labels(labels, tokens, given) if is_real(labels) and not torch.compiler.is_compiling() else None
        if seen is None:
            return
        if not on_host(labels):
            assert_async(~seen.any(), "a label in a prefix is of a token that the model sees")
        elif seen.any():
            row, place = seen.nonzero()[0].tolist()
            raise Misplaced(
                f"row {row} has a label at place {place}, inside of its prefix, where the model sees the token that it should "
                f"predict; set labels of a prefix to {IGNORE}, mark as `prefix` only tokens that are not predicted, or set "
                "model.fusion.image_attention = 'bidirectional_image'"
            )

    @property
    def _dtype(self) -> torch.dtype:
        """Dtype of the embedding table, in which the embedding computes."""
        assert self.embed is not None
        return self.embed.weight.dtype

    def specs(self) -> Specs:
        """Returns the specs of this model for strategies."""
        specs = super().specs()
        entry = tuple(name for name in ("encoder", "adapter", "frame_time") if getattr(self, name) is not None)
        return replace(
            specs,
            entry=(*specs.entry, *entry),
            roles=self._roles(name for name, _ in self.named_parameters()),
        )

    def _roles(self, names: Iterable[str]) -> dict[str, frozenset[str]]:
        """Returns the parameters by role: `encoder`; `adapter`, with those of times; `fusion`, the parameters that a text model
        does not have; `decoder`, the rest."""
        places = {"encoder": ["encoder"], "adapter": ["adapter", "frame_time"], "fusion": []}
        for path, module in self.named_modules():
            places["fusion"] += [f"{path}.{name}" for name in getattr(module, "added", ())]
        roles: dict[str, set[str]] = {}
        for name in names:
            role = next((role for role, inside in places.items() if name.startswith(tuple(f"{at}." for at in inside))), "decoder")
            roles.setdefault(role, set()).add(name)
        return {role: frozenset(of) for role, of in roles.items()}


def with_random_images(batch: Batch, context: FusionContext, shape: tuple[int, ...]) -> Batch:
    """Returns the batch with 0, 1 or 2 images in each row. They replace other tokens, which lose their labels. A batch without
    any image gets no extras.

    Args:
        batch: tokens and labels on the CPU; placeholder tokens in it become 1.
        context: context of the model, which has an encoder.
        shape: shape of one image.
    """
    image_token = context.image_token
    assert image_token is not None
    tokens, labels = batch.tokens.clone(), batch.labels.clone()
    tokens[tokens == image_token] = 1
    images: list[torch.Tensor] = []
    rows: list[list[int]] = []
    for row, ids in enumerate(batch.tokens.tolist()):
        seed = sum(place * token for place, token in enumerate(ids))
        documents = [0] * len(ids) if batch.documents is None else batch.documents[row].tolist()
        numbers_of_row: list[int] = []
        place = seed % 3
        while len(numbers_of_row) < seed % 3:
            draw = torch.Generator().manual_seed(seed + len(numbers_of_row) + 1)
            image, per_image = _random_image(context, shape, draw, seed + len(numbers_of_row))
            if place + per_image >= len(ids):
                break
            run = documents[place : place + per_image]
            if len({*run}) > 1 or run[0] == PADDING:  # an image must be inside one document
                place += 1
                continue
            tokens[row, place : place + per_image] = image_token
            numbers_of_row.append(len(images))
            images.append(image)
            place += per_image + 1 + seed % 2
        rows.append(numbers_of_row)
    before = torch.zeros_like(tokens, dtype=torch.bool)
    before[:, :-1] = tokens[:, 1:] == image_token
    labels[(tokens == image_token) | before] = IGNORE
    if not images:  # as a loader does for a batch without images
        return replace(batch, tokens=tokens, labels=labels)
    numbers = torch.full((len(rows), max(map(len, rows))), -1)
    for row, numbers_of_row in enumerate(rows):
        numbers[row, : len(numbers_of_row)] = torch.tensor(numbers_of_row, dtype=torch.int64)
    extras = {"images": torch.stack(images), "image_rows": numbers}
    if context.timed:  # every third one is no frame
        extras["image_times"] = torch.tensor([image * 1.5 if image % 3 != 2 else -1.0 for image in range(len(images))])
    return replace(batch, tokens=tokens, labels=labels, extras=extras)


def _random_image(context: FusionContext, shape: tuple[int, ...], draw: torch.Generator, seed: int) -> tuple[torch.Tensor, int]:
    """Returns an image and its number of placeholders. In native proportions it has a few patches in one or two rows."""
    image = torch.randn(shape, generator=draw)
    if not context.native:
        return image, context.per_image
    most = shape[0] - 1
    rows = 1 + seed % 2 if most > 1 else 1
    columns = 1 + seed % min(3, most // rows)
    image[rows * columns :] = 0
    image[-1, :2] = torch.tensor([rows, columns])
    return image, rows * columns if context.varies else context.per_image


def fixed_rows(
    vocab_size: int, max_length: int, image_token: int, per_image: int, shape: tuple[int, ...], in_stream: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns three fixed rows: one begins with an image, one has text before and between images, and one is text.

    If images stay out of the stream, no text comes before the first image of a row: libraries treat such text differently.

    Args:
        vocab_size: number of ids.
        max_length: maximum number of tokens of a row.
        image_token: id of the placeholder.
        per_image: number of placeholders of an image.
        shape: shape of one image.
        in_stream: whether image vectors replace their placeholders.

    Returns:
        tokens (3, T), and the model inputs `images` and `image_rows`.
    """
    length = min(max_length, 2 * per_image + 24)
    draw = torch.Generator().manual_seed(20)
    tokens = torch.randint(0, vocab_size - 1, (3, length), generator=draw)
    tokens += tokens >= image_token
    begins = ((0, per_image + 5), (3, per_image + 5) if in_stream else (0, per_image), ())
    numbers, count = torch.full((3, 2), -1), 0
    for row, places in enumerate(begins):
        for which, place in enumerate(places):
            if place + per_image < length:
                tokens[row, place : place + per_image] = image_token
                numbers[row, which] = count
                count += 1
    images = torch.randn((max(1, count), *shape), generator=draw)
    return tokens, {"images": images, "image_rows": numbers}
