"""Any image-text model of transformers as a model of Forge: `CausalLM` with images.

The body of a class computes hidden states from tokens and images; the loss is computed from them in parts. Both towers are
blocks of the specs. A batch without images runs the vision tower on a blank image whose features count zero, at the place where
the class runs it: ranks that shard parameters then make the same collectives in the same order.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forge_core.batch import IGNORE, Batch
from forge_core.protocols.model import Objective
from forge_core.specs import Init, Specs
from forge_models.components.lora import LoRAConfig
from forge_models.hf.causal_lm import CausalLM, mixed, offer_experts
from forge_models.hf.causal_lm_anatomy import Anatomy, AutoClass, arguments, built, head_of, read_settings, replaced
from forge_models.hf.causal_lm_lora import blocks_path
from forge_models.hf.config import Unsupported
from forge_models.torch_private import assert_async
from forge_vlm.hf.image_arguments import CUT, IN_ROWS, ImageArguments

IMAGE_TEXT = AutoClass("AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "image-text model")
MARKS = ("token_type_ids", "mm_token_type_ids")
"""Arguments of forwards that mark the placeholders of images."""
MEDIA, IDS = ("image", "video", "vision", "audio"), ("_token_id", "_token_index")
"""Beginnings and ends of keys with the ids of tokens that stand for media."""
OTHERS = ("audio", "vq")
"""Beginnings of the names of towers that are not for the images of a prompt."""
PROJECTED = {"llama4": "multi_modal_projector"}
"""Classes whose features of images go through a projector in their forward, and its path."""
UNUSED = ("last_hidden_state", "hidden_states", "attentions")
"""Outputs of a vision tower that do not reach the text model."""


def image_text_model(config: str, settings: Mapping[str, Any], most: int, drawn: bool = False) -> "ImageTextModel":
    """Returns the model of a configuration, with parameters and persistent buffers on the meta device.

    Args:
        config: content of `config.json`.
        settings: keys that replace those of `config`.
        most: maximum number of patches of an image that keeps its proportions.
        drawn: whether initial weights are drawn, so that every initial value must be one that a spec can express.

    Raises:
        Unsupported: transformers is not installed, does not know the model, or Forge cannot train this class; says why.
    """
    offer_experts()
    module = hollow(config, settings)
    images = ImageArguments.of(module.config, most)
    model: ImageTextModel = mixed(module, ImageTextModel, drawn, packs=False)
    model.see(images)
    return model


def hollow(config: str, settings: Mapping[str, Any]) -> Any:
    """Returns the module of a configuration on the meta device.

    Raises:
        Unsupported: the class is unknown, or dropout is on.
    """
    module = built(read_settings(config, settings), IMAGE_TEXT)
    vision = getattr(module.config, "vision_config", None)
    values = vision.to_dict() if vision is not None else {}
    random = sorted(key for key, value in values.items() if "drop" in key and isinstance(value, float) and value > 0)
    if random:
        keys = ", ".join(f"{key} = 0.0" for key in random)
        raise Unsupported(f"dropout would differ between layouts; set {keys} in vision_config of config.json")
    return module


class ImageTextModel(CausalLM):
    """Mixed into an image-text class of transformers.

    Attributes:
        images: form of its images.
    """

    inputs: ClassVar[frozenset[str]] = frozenset({"images", "image_rows"})
    images: ImageArguments

    def prepare(self, anatomy: Anatomy, inits: Mapping[str, Init | str], packs: bool) -> None:
        """See `CausalLM`; blocks are those of both towers.

        Raises:
            Unsupported: the loss would need whole logits.
        """
        if not anatomy.head:
            anatomy = _around_text(self, anatomy)
        super().prepare(replace(anatomy, blocks=_blocks(self)), inits, packs)
        self.is_blank = False
        embed: nn.Module = self.get_submodule(anatomy.embed)
        embed.register_forward_hook(self._with_blank)

    def targeted(self, lora: LoRAConfig, paths: Sequence[str]) -> tuple[str, ...]:
        """See `CausalLM`; a layer outside of the text model, such as one of the vision tower, needs a target with the name of
        that part, and blocks are those of the text model."""
        decoder = _decoder_path(self)
        parts = {path: part for path in paths if (part := _part(path, decoder))}
        blocks = [path for path in self.anatomy.blocks if path.startswith(f"{decoder}.")]
        others = {path: blocks_path(blocks, path) for path in paths}
        found: set[str] = set()
        for target in lora.targets:
            named = {part for part in parts.values() if part in target}
            known = [path for path in paths if parts.get(path) in named or not (named or path in parts)]
            found.update(replace(lora, targets=(target,)).matched(known, others))
        return tuple(path for path in paths if path in found)

    def see(self, images: ImageArguments) -> None:
        """Sets the form of images, and counts the placeholders of a tile with one forward on the meta device."""
        self.images = images
        if images.kind in IN_ROWS or images.per_tile:
            return
        with torch.device("cpu"):
            given = images.arguments(images.blank(torch.empty(0)), torch.float32)
        with _on_meta(self), torch.no_grad():
            found = self._features(given | {"pixel_values": given["pixel_values"].to("meta")})
        self.images = replace(images, per_tile=found.numel() // found.shape[-1])

    def _features(self, given: Mapping[str, Tensor]) -> Tensor:
        """Returns the vectors (placeholders, width) that replace the placeholders of items, from the arguments of a forward."""
        found = self._encoded(given)["pooler_output"]
        found = torch.cat([*found]) if isinstance(found, list | tuple) else found
        return found.flatten(0, -2)

    def _encoded(self, given: Mapping[str, Tensor]) -> dict[str, Any]:
        """Returns the features of images by name, from the arguments of a forward; `pooler_output` replaces placeholders."""
        body: Any = self.get_submodule(self.anatomy.body)
        features: Any = body.get_image_features if hasattr(body, "get_image_features") else self.get_image_features
        out = features(**given, return_dict=True)
        if self.config.model_type in PROJECTED:
            projector: Any = self.get_submodule(PROJECTED[self.config.model_type])
            return {"pooler_output": projector(out.last_hidden_state.flatten(0, -2))}
        return dict(out) if isinstance(out, Mapping) else {"pooler_output": out}

    def _with_blank(self, _embed: nn.Module, _given: Any, out: Tensor) -> Tensor:
        """Adds zero times the features of a blank image to the embeddings."""
        if not self.is_blank:
            return out
        self.is_blank = False  # an image tower may embed as well
        given = self.images.arguments(self.images.blank(out), out.dtype)
        # What the class does not use gets no gradient on ranks with images, so it must not get one here.
        used = {name: value for name, value in self._encoded(given).items() if name not in UNUSED}
        tensors = [each for each in _tensors_in(used.values()) if each.is_floating_point()]
        return out + sum((each.sum() * 0 for each in tensors), start=out.new_zeros(()))

    def forward(  # type: ignore[override]  # images instead of a cache
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
        objective: Objective | None = None,
        images: Tensor | None = None,
        image_rows: Tensor | None = None,
    ) -> Any:
        """Returns logits (B, T, vocab), with an objective its `LossTerms`.

        Args:
            x: (B, T) int64 tokens, with placeholders of images.
            positions: unused; each row is one document.
            documents: (B, T) document of each token, of which a row has one; None: there is no padding.
            labels: (B, T) int64, already shifted; required by an objective.
            objective: the loss to minimize.
            images: (n, *shape) float32 items of the rows, one row after the other; None: the batch is text.
            image_rows: (B, M) int64 numbers of the items of each row, padded with -1.

        Raises:
            ValueError: a row has several documents, or more or fewer placeholders than its images need; on a GPU the device
                asserts it.
        """
        if documents is not None:
            self.refuse_several(documents)
        if self.constants_on != x.device:
            self.move_constants(x.device)
        self._check(x, images, image_rows)
        body: Any = self.get_submodule(self.anatomy.body)
        whole = body is self  # which calls the head itself
        takes = arguments(type(self).original if whole else type(body))
        given: dict[str, Any] = {"use_cache": False} if "use_cache" in takes else {}
        marks = self.images.marks(x, labels)
        given |= {name: marks for name in MARKS if name in takes}
        if images is not None:
            embed: Any = self.get_submodule(self.anatomy.embed)
            given |= self.images.arguments(images, embed.weight.dtype)
        self.is_blank = images is None
        try:
            hidden = self._before_head(input_ids=x, **given) if whole else body(input_ids=x, **given)[0]
        finally:
            self.is_blank = False
        return self.get_submodule(self.anatomy.head)(hidden, labels, objective)

    def _before_head(self, **given: Any) -> Tensor:
        """Returns what the head gets in the forward of the class, without logits."""
        seen: list[Tensor] = []

        def keep(hidden: Tensor) -> Tensor:
            seen.append(hidden)
            return hidden[..., :1]

        with replaced((self.get_submodule(self.anatomy.head), keep)):
            type(self).original.forward(self, **given)
        return seen[0]

    def _check(self, x: Tensor, images: Tensor | None, image_rows: Tensor | None) -> None:
        """Checks the number of placeholders of each row; the class counts those of the whole batch only."""
        if (images is None) != (image_rows is None):
            raise ValueError("images and image_rows go together; give both, or neither for text")
        if x.is_meta or torch.compiler.is_compiling():
            return
        wanted = x.new_zeros(len(x))
        if images is not None and image_rows is not None:
            counts = torch.cat([self.images.counts(images), x.new_zeros(1)])  # the last one is that of -1
            wanted = counts[image_rows].sum(1)
        found = (x == self.images.token).sum(1)
        wrong = found != wanted
        message = "a row has more or fewer placeholders than its images need"
        if x.device.type != "cpu":
            assert_async(~wrong.any(), message)
        elif wrong.any():
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"{message}: row {row} has {int(found[row])} tokens {self.images.token}, but its images need {int(wanted[row])}; "
                "prepare the data again with the processor of this model"
            )

    def new_cache(self, batch: int, capacity: int) -> Any:
        """
        Raises:
            ValueError: always; a folder of transformers generates.
        """
        raise ValueError(
            f"{type(self).__name__} of transformers does not generate in Forge; export it with `forge-train convert --to hf` and "
            "use its `generate`"
        )

    def specs(self) -> Specs:
        """Returns the specs from which strategies work. Roles: `encoder`, `adapter` and `decoder`."""
        specs = super().specs()
        towers = tuple(f"{path.rpartition('.')[0]}." for path in self.anatomy.blocks)
        encoder = _stem(self, towers[0]) if towers[0] != towers[-1] else None
        decoder = f"{_decoder_path(self)}."
        roles: dict[str, set[str]] = {}
        for name in specs.tensors:
            inside = encoder is not None and name.startswith(encoder)
            outside = name.startswith((decoder, f"{self.anatomy.head}."))
            roles.setdefault("encoder" if inside else "decoder" if outside else "adapter", set()).add(name)
        return replace(specs, roles={role: frozenset(names) for role, names in roles.items()})

    def _ends(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        self.no_stages = f"a pipeline does not split {type(self).__name__}: images enter in front of its first block"
        return (), ()

    @property
    def without_loss(self) -> frozenset[str]:
        """Returns the parameters of the vision tower that do not affect the features of images."""
        tower = self.specs().roles.get("encoder", frozenset())
        held = {name: parameter for name, parameter in self.named_parameters() if name in tower and parameter.requires_grad}
        if not held:
            return frozenset()
        with torch.enable_grad():
            blank = self.images.blank(next(self.parameters()))
            features = self._features(self.images.arguments(blank, torch.float32))
            found = torch.autograd.grad(features.sum(), [*held.values()], allow_unused=True)
        return frozenset(name for name, gradient in zip(held, found, strict=True) if gradient is None)

    @property
    def plain_ids(self) -> int:
        """Number of ids from 0 that are plain tokens, which need no image."""
        values: Mapping[str, Any] = self.config.to_dict()
        marks = [value for key, value in values.items() if key.endswith(IDS) and key.startswith(MEDIA)]
        return min([self.images.token, *(value for value in marks if isinstance(value, int))])

    def with_extras(self, batch: Batch) -> Batch:
        """Returns the batch with images that are a function of each row, for checks: no image, one or two. Each row becomes one
        document, because a class does not keep several apart."""
        batch = replace(batch, positions=None, documents=None, document_starts=None)
        tokens, labels = batch.tokens.clone(), batch.labels.clone()
        tokens[tokens == self.images.token] = (self.images.token + 1) % 7
        items: list[Tensor] = []
        numbers: list[list[int]] = []
        for row, ids in enumerate(batch.tokens.tolist()):
            seed = sum(place * token for place, token in enumerate(ids))
            place, own = 1 + seed % 2, []
            for number in range(seed % 3):
                drawn = self._drawn(seed + number)
                count = int(self.images.counts(drawn).sum())
                if place + count >= len(ids):
                    break
                tokens[row, place : place + count] = self.images.token
                own += range(len(items), len(items) + len(drawn))
                items += drawn
                place += count + 1
            numbers.append(own)
        before = torch.zeros_like(tokens, dtype=torch.bool)
        before[:, :-1] = tokens[:, 1:] == self.images.token
        labels[(tokens == self.images.token) | before] = IGNORE
        if not items:
            return replace(batch, tokens=tokens, labels=labels)
        rows = torch.full((len(numbers), max(map(len, numbers))), -1)
        for row, own in enumerate(numbers):
            rows[row, : len(own)] = torch.tensor(own, dtype=torch.int64)
        return replace(batch, tokens=tokens, labels=labels, extras={"images": torch.stack(items), "image_rows": rows})

    def _drawn(self, seed: int) -> Tensor:
        """Returns the items (n, *shape) of one image."""
        generator = torch.Generator().manual_seed(seed + 1)
        blank = self.images.blank(torch.empty(0))
        items = torch.randn(blank.shape, generator=generator)
        if self.images.kind in IN_ROWS:
            side = int(blank[0, -1, 1])
            rows, columns = side * (1 + seed % 2), side * (1 + seed % 3)
            items[0, rows * columns :] = 0
            items[0, -1, :3] = torch.tensor([1.0, rows, columns])
        elif self.images.least:
            items[:, 0, -1, :CUT] = blank[:, 0, -1, :CUT]
        return items


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors among values, and in their lists, tuples and outputs of transformers."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors_in(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _around_text(module: Any, anatomy: Anatomy) -> Anatomy:
    """Returns the anatomy of a class around a text model with a head of its own, whose body is the class itself.

    Raises:
        Unsupported: the loss would need whole logits, or the forward of the class fails.
    """
    head = module.get_output_embeddings()
    with replaced((module, partial(type(module).original.forward, module))):
        text = module.get_decoder()
        _, scale, soft_cap = head_of(module, getattr(text, "model", text), head, embedded=True)
    path = next(path for path, part in module.named_modules() if part is head)
    found = replace(anatomy, body="", head=path, rest=(), scale=scale, soft_cap=soft_cap, width=head.in_features)
    return replace(found, why_whole="")


def _decoder_path(module: Any) -> str:
    """Returns the path of the text model inside of a model."""
    decoder = module.get_decoder()
    return next(path for path, part in module.named_modules() if part is decoder)


def _part(path: str, decoder: str) -> str:
    """Returns the name of the part of a model in which a module is, such as `vision_tower`; empty if it is in the text model."""
    words, inner = path.split("."), decoder.split(".")
    return next((word for word, other in zip_longest(words, inner) if other is not None and word != other), "")


def _blocks(module: Any) -> tuple[str, ...]:
    """Returns the paths of the repeated blocks of the vision tower, then those of the text model.

    Raises:
        Unsupported: there is no list of blocks in the text model.
    """
    decoder = _decoder_path(module)
    found: dict[bool, tuple[int, str, int]] = {}
    for path, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and not _part(path, decoder).startswith(OTHERS):
            size, text = sum(parameter.numel() for parameter in part.parameters()), path.startswith(f"{decoder}.")
            if size and size > found.get(text, (0, "", 0))[0]:
                found[text] = (size, path, len(part))
    if True not in found:
        raise Unsupported(f"the text model of {type(module).__name__} has no list of blocks")
    return tuple(
        f"{path}.{index}" for text in (False, True) if text in found for _, path, n in [found[text]] for index in range(n)
    )


def _stem(module: Any, blocks: str) -> str:
    """Returns the prefix of the vision tower, the outermost module around its blocks without the text model."""
    decoder = _decoder_path(module)
    words = blocks.rstrip(".").split(".")
    for end in range(1, len(words)):
        prefix = ".".join(words[:end])
        if not f"{decoder}.".startswith(f"{prefix}."):
            return f"{prefix}."
    return blocks


@contextmanager
def _on_meta(module: nn.Module) -> Iterator[None]:
    """Context in which constants are on the meta device, as parameters are."""
    kept = [(part, name, value) for part in module.modules() for name, value in vars(part).items() if isinstance(value, Tensor)]
    for part, name, value in kept:
        part.__dict__[name] = value.to("meta")
    try:
        with torch.device("meta"):
            yield
    finally:
        for part, name, value in kept:
            part.__dict__[name] = value
