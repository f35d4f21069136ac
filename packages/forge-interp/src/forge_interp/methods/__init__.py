"""Interpretability methods as functions of a decoder and tokens, built on `capture` and `edit`.

    import torch
    from forge_interp.methods import head_ablation, logit_lens
    from forge_models import DecoderConfig, initialize

    model = DecoderConfig(dim=32, layers=2, heads=4, vocab_size=97, max_length=64).build()
    initialize(model, seed=0)
    tokens = torch.randint(0, 97, (2, 12))
    logits = logit_lens(model, tokens)  # the model's head on the stream before and after each block
    assert logits.shape == (3, 2, 1, 97)
    effects = head_ablation(model, tokens, lambda logits: logits[:, -1, 5].mean())  # the metric without each head
    assert effects.shape == (2, 4)

Importing this package imports no torch.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_interp.methods.lens import (
        Attributed,
        TunedLens,
        direct_logit_attribution,
        divergences,
        lens_losses,
        logit_lens,
        tuned_lens,
    )
    from forge_interp.methods.patching import activation_patching, attribution_patching, head_ablation
    from forge_interp.methods.probes import LinearProbe, dead_neurons, effective_rank, linear_probe, steering_vector
    from forge_interp.methods.sae import SAE, Quality, largest, loss_recovered, quality, train_sae

__all__ = [
    "SAE",
    "Attributed",
    "LinearProbe",
    "Quality",
    "TunedLens",
    "activation_patching",
    "attribution_patching",
    "dead_neurons",
    "direct_logit_attribution",
    "divergences",
    "effective_rank",
    "head_ablation",
    "largest",
    "lens_losses",
    "linear_probe",
    "logit_lens",
    "loss_recovered",
    "quality",
    "steering_vector",
    "train_sae",
    "tuned_lens",
]
__getattr__, __dir__ = lazy_exports(__name__)
