"""Stored weights in use: opened from a run, a checkpoint or a Hugging Face folder, continued or evaluated.

    from forge_core import Registry
    from forge_models import generate
    from forge_train.inference import load_model, open_weights, tokenizer_for

    weights = open_weights("runs/first", Registry())  # the run of the example of `forge_train`
    tokenizer = tokenizer_for(weights, None, Registry(), print)
    new = generate(load_model(weights), [list(tokenizer.encode("def "))], max_tokens=4)
    print(tokenizer.decode(new[0]))

The commands `forge-train generate` and `forge-train evaluate` do this for all formats and layouts.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_train.inference.continuation import Continuation
    from forge_train.inference.evaluation import Score, recipe_for, scores
    from forge_train.inference.stored import load_model, load_sharded_model, open_weights, stored_parameters
    from forge_train.inference.tokenizer import chat_for, tokenizer_for, write_tokenizer

__all__ = [
    "Continuation",
    "Score",
    "chat_for",
    "load_model",
    "load_sharded_model",
    "open_weights",
    "recipe_for",
    "scores",
    "stored_parameters",
    "tokenizer_for",
    "write_tokenizer",
]
__getattr__, __dir__ = lazy_exports(__name__)
