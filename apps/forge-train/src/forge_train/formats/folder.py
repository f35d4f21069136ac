"""A folder that appears whole: it is filled under another name, flushed and renamed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forge_core.durable_files import publish, sync_path
from forge_core.errors import ForgeError
from forge_core.protocols.weights import Weights
from forge_train.inference.forge_weights import TOKENIZER, copy_tokenizer


@contextmanager
def new_folder(path: Path, weights: Weights) -> Iterator[Path]:
    """Inside, a folder to fill; afterwards it is `path`, with the files of the tokenizer. After an error there is none.

    Raises:
        ForgeError: `path` is taken.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ForgeError(f"{path} exists and is not an empty folder; choose another")
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        if weights.facts.tokenizer is not None:
            copy_tokenizer(weights.facts.tokenizer, partial / TOKENIZER)
        for file in [*partial.rglob("*"), partial]:
            sync_path(file)
        publish(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
