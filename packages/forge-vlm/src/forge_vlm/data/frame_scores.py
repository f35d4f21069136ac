"""Scores of frames by a model of text and images in the Hugging Face format, such as CLIP or SigLIP, and a file that stores them.

A score is the cosine of the features of a frame and of a question. The file keeps features, not scores: a frame is encoded once
for all questions about its clip, and a question once for all frames. Keys are hashes of the frame's file or of the question, so
the file stays valid if rows, clips or settings change.
"""

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import finalize

import numpy as np

from forge_core.errors import DataError
from forge_data.storage.checksums import digest_of
from forge_data.storage.files import find
from forge_vlm.data.frame_selection import FrameScores
from forge_vlm.images.pixels import ImageError, decode

FAMILIES = ("clip", "siglip", "siglip2")
"""Values of `model_type` of models whose features are compared by their cosine."""
_WAIT = 60.0
"""Seconds to wait for another process that writes to the file."""


class ImageTextEncoder:
    """A frozen model of transformers that encodes images and text to vectors of the same space.

    Attributes:
        identity: changes with the weights and the preprocessing.
    """

    def __init__(self, path: str, batch: int = 16, device: str = "cpu") -> None:
        """
        Args:
            path: folder with weights in safetensors, tokenizer and preprocessor.
            batch: number of images that are encoded together.
            device: device of torch.

        Raises:
            DataError: the folder has no such model.
        """
        config = Path(path) / "config.json"
        try:
            kind = json.loads(config.read_text(encoding="utf-8")).get("model_type")
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{config} cannot be read: {error}; give a folder of a model in the Hugging Face format") from error
        if kind not in FAMILIES:
            raise DataError(f"{path} has model_type {kind!r}; give a folder of a model of {', '.join(FAMILIES)}")
        self.identity = digest_of(find(path, (".safetensors", ".json", ".txt", ".model"), "model"), "image and text")
        self._path, self._batch, self._device = path, batch, device
        # SigLIP was trained with padding up to its length, without a mask
        self._padding = "longest" if kind == "clip" else "max_length"

    @cached_property
    def _parts(self) -> tuple[Any, Any, Any]:
        """Model, tokenizer and image processor, which are loaded on first use.

        Raises:
            DataError: transformers is not installed, or the folder lacks a part.
        """
        try:
            from transformers import AutoImageProcessor, AutoModel, AutoTokenizer, __version__
        except ImportError as error:
            raise DataError("scorer 'image_text' needs transformers; pip install 'forge-vlm[transformers]'") from error
        local: dict[str, Any] = {"local_files_only": True}
        # pixels of Pillow on every machine, also where torchvision is installed
        slow: dict[str, Any] = {"use_fast": False} if __version__.startswith("4.") else {"backend": "pil"}
        try:
            model: Any = AutoModel.from_pretrained(self._path, use_safetensors=True, **local)
            tokenizer = AutoTokenizer.from_pretrained(self._path, **local)
            processor = AutoImageProcessor.from_pretrained(self._path, **slow, **local)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{self._path} cannot be read as a model of text and images: {error}") from error
        return model.eval().requires_grad_(False).to(self._device), tokenizer, processor

    def images(self, frames: Sequence[bytes]) -> np.ndarray:
        """Returns (frames, width) float32 unit vectors of image files.

        Raises:
            DataError: a file is not an image.
        """
        import torch

        model, _, processor = self._parts
        found = []
        for start in range(0, len(frames), self._batch):
            pictures = [_picture(content) for content in frames[start : start + self._batch]]
            inputs = processor(images=pictures, return_tensors="pt").to(self._device)
            with torch.inference_mode():
                found.append(_unit(model.get_image_features(**inputs)))
        return np.concatenate(found)

    def text(self, text: str) -> np.ndarray:
        """Returns the (width,) float32 unit vector of a text, which is truncated to the length of the model."""
        import torch

        model, tokenizer, _ = self._parts
        length = model.config.text_config.max_position_embeddings
        given = tokenizer([text], padding=self._padding, truncation=True, max_length=length, return_tensors="pt")
        names = ("input_ids", "attention_mask") if self._padding == "longest" else ("input_ids",)
        with torch.inference_mode():
            return _unit(model.get_text_features(**{name: given[name].to(self._device) for name in names}))[0]


def _picture(content: bytes) -> Any:
    try:
        return decode(content, 3, "a frame")
    except ImageError as error:
        raise DataError(str(error)) from error


def _unit(output: Any) -> np.ndarray:
    """Returns unit vectors of the output of a model, whose class depends on the version of transformers."""
    vectors = getattr(output, "pooler_output", output).float()
    return (vectors / vectors.norm(dim=-1, keepdim=True)).cpu().numpy()


class FeatureFile:
    """A SQLite file of vectors, by the model that computed them and by a key. Threads and processes may share it."""

    def __init__(self, path: str, new: bool) -> None:
        """
        Args:
            path: path of the file.
            new: creates the file if it does not exist.

        Raises:
            DataError: the file does not exist, or is not one of these files.
        """
        self.path, self._lock = path, Lock()
        if not new and not Path(path).is_file():
            raise DataError(f"{path} does not exist; prepare the data once with scorer 'image_text' and store = {path!r}")
        self._connection = self._tried(lambda: sqlite3.connect(path, timeout=_WAIT, check_same_thread=False))
        finalize(self, self._connection.close)  # Python 3.13 warns of a connection that nobody closes
        if new:
            table = "create table if not exists features (model text, key blob, vector blob, primary key (model, key))"
            self._written(lambda: self._connection.execute(table))

    @property
    def models(self) -> list[str]:
        """Identities of the models whose vectors are in the file."""
        with self._lock:
            rows = self._tried(lambda: self._connection.execute("select distinct model from features order by model").fetchall())
        return [model for (model,) in rows]

    def read(self, model: str, keys: Sequence[bytes]) -> dict[bytes, np.ndarray]:
        """Returns the vectors of those keys that the file has."""
        query = "select vector from features where model = ? and key = ?"
        with self._lock:
            rows = {key: self._tried(lambda key=key: self._connection.execute(query, (model, key)).fetchone()) for key in keys}
        return {key: np.frombuffer(row[0], dtype="<f4") for key, row in rows.items() if row is not None}

    def add(self, model: str, vectors: Mapping[bytes, np.ndarray]) -> None:
        """Stores vectors."""
        rows = [(model, key, vector.astype("<f4").tobytes()) for key, vector in vectors.items()]
        query = "insert or replace into features values (?, ?, ?)"
        with self._lock:
            self._written(lambda: self._connection.executemany(query, rows))

    def _written(self, write: Callable[[], Any]) -> None:
        def commit() -> None:
            with self._connection:
                write()

        self._tried(commit)

    def _tried(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except sqlite3.Error as error:
            raise DataError(
                f"{self.path} cannot be read or written as a file of features: {error}; set `store` to another file"
            ) from error


class FeatureScorer:
    """Scores frames by cosines, see `forge_vlm.data.frame_selection.FrameScorer`.

    Attributes:
        identity: that of the model.
    """

    def __init__(self, encoder: ImageTextEncoder | None, file: FeatureFile | None) -> None:
        """
        Args:
            encoder: computes features that the file lacks; None: they are missing.
            file: stores features; None: nothing is stored.

        Raises:
            DataError: without an encoder, the file has features of no model, or of several.
        """
        self._encoder, self._file, self._lock = encoder, file, Lock()
        if encoder is not None:
            self.identity = encoder.identity
            return
        models = [] if file is None else file.models
        if len(models) != 1:
            where = "no file" if file is None else file.path
            raise DataError(
                f"{where} has features of {len(models)} models, but scorer 'stored' needs those of one; use scorer 'image_text' "
                "with the folder of the model"
            )
        (self.identity,) = models

    def __call__(self, frames: Sequence[bytes], question: str) -> FrameScores:
        """Returns cosines and features.

        Raises:
            DataError: a frame is not an image, or its features are neither stored nor can be computed.
        """
        keys = [b"f" + blake2b(frame, digest_size=16).digest() for frame in frames]
        asked = b"q" + blake2b(question.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        with self._lock:
            images = self._vectors(dict(zip(keys, frames, strict=True)), lambda encoder, missing: encoder.images(missing))
            text = self._vectors({asked: question}, lambda encoder, missing: [encoder.text(each) for each in missing])[asked]
        features = np.stack([images[key] for key in keys]).astype(np.float64)
        return FrameScores(features @ text.astype(np.float64), features)

    def _vectors(self, wanted: Mapping[bytes, Any], encode: Callable[[Any, Any], Any]) -> dict[bytes, np.ndarray]:
        """Returns the vectors of these values by key: those of the file, and others as `encode` computes them."""
        known = {} if self._file is None else self._file.read(self.identity, list(wanted))
        missing = {key: value for key, value in wanted.items() if key not in known}
        if not missing:
            return known
        if self._encoder is None:
            where = self._file.path if self._file is not None else ""
            raise DataError(
                f"{where} has no features of {len(missing)} of {len(wanted)} frames or questions; prepare the data once with "
                f"scorer 'image_text' and store = {where!r}"
            )
        made = dict(zip(missing, encode(self._encoder, list(missing.values())), strict=True))
        if self._file is not None:
            self._file.add(self.identity, made)
        return known | made
