"""Interpretability methods as functions of a decoder and tokens, built on `capture` and `edit`.

from forge_interp.methods import head_ablation, logit_lens

logits = logit_lens(model, tokens)  # (layers + 1, B, 1, vocab): the model's head on the stream of each layer
effects = head_ablation(model, tokens, metric)  # (layers, heads): a metric without each head
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_interp.methods.lens import Attributed as Attributed
    from forge_interp.methods.lens import TunedLens as TunedLens
    from forge_interp.methods.lens import direct_logit_attribution as direct_logit_attribution
    from forge_interp.methods.lens import divergences as divergences
    from forge_interp.methods.lens import lens_losses as lens_losses
    from forge_interp.methods.lens import logit_lens as logit_lens
    from forge_interp.methods.lens import tuned_lens as tuned_lens
    from forge_interp.methods.patching import activation_patching as activation_patching
    from forge_interp.methods.patching import attribution_patching as attribution_patching
    from forge_interp.methods.patching import head_ablation as head_ablation
    from forge_interp.methods.probes import LinearProbe as LinearProbe
    from forge_interp.methods.probes import dead_neurons as dead_neurons
    from forge_interp.methods.probes import effective_rank as effective_rank
    from forge_interp.methods.probes import linear_probe as linear_probe
    from forge_interp.methods.probes import steering_vector as steering_vector
    from forge_interp.methods.sae import SAE as SAE
    from forge_interp.methods.sae import Quality as Quality
    from forge_interp.methods.sae import largest as largest
    from forge_interp.methods.sae import loss_recovered as loss_recovered
    from forge_interp.methods.sae import quality as quality
    from forge_interp.methods.sae import train_sae as train_sae

_NAMES = {
    "lens": "Attributed TunedLens direct_logit_attribution divergences lens_losses logit_lens tuned_lens",
    "patching": "activation_patching attribution_patching head_ablation",
    "probes": "LinearProbe dead_neurons effective_rank linear_probe steering_vector",
    "sae": "SAE Quality largest loss_recovered quality train_sae",
}
__getattr__, __dir__ = lazy_exports(__name__, {name: module for module, names in _NAMES.items() for name in names.split()})
