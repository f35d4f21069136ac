"""Inner values of a model: read, changed, stored and compared by name.

    import torch
    from forge_interp import capture, edit, zero
    from forge_models import DecoderConfig, initialize

    model = DecoderConfig(dim=32, layers=2, heads=4, vocab_size=97, max_length=64).build()
    initialize(model, seed=0)
    tokens = torch.randint(0, 97, (2, 12))
    with torch.no_grad(), capture(model, "blocks.*.residual", positions="last") as values:
        model(tokens)
    assert values["blocks.0.residual"].shape == (2, 1, 32)
    with torch.no_grad(), edit(model, "attention.heads", zero(), layers=[1], heads=[2]):
        logits = model(tokens)  # without head 2 of block 1

`forge_interp.methods` has lenses, patching, probes and sparse autoencoders, `forge_interp.neuro` models of recorded brains.
Importing this package imports no torch. Names that end in `_sharded` need forge-parallel.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_interp.attention_scores import AttentionScores, capture_qk, induction_scores
    from forge_interp.captures import capture, select_taps
    from forge_interp.commands.ranks import capture_sharded, edit_sharded
    from forge_interp.commands.ranks_store import record_sharded
    from forge_interp.edits import add, edit, mean, patch, project_out, replace, zero
    from forge_interp.export import as_xarray
    from forge_interp.heat_maps import heat_map
    from forge_interp.similarity import KernelSums, Moments, cca, cka, over, procrustes, rsa, svcca, unbiased_cka
    from forge_interp.store import ActivationStore, record
    from forge_interp.tap_names import InterpError, TapInfo, taps

__all__ = [
    "ActivationStore",
    "AttentionScores",
    "InterpError",
    "KernelSums",
    "Moments",
    "TapInfo",
    "add",
    "as_xarray",
    "capture",
    "capture_qk",
    "capture_sharded",
    "cca",
    "cka",
    "edit",
    "edit_sharded",
    "heat_map",
    "induction_scores",
    "mean",
    "over",
    "patch",
    "procrustes",
    "project_out",
    "record",
    "record_sharded",
    "replace",
    "rsa",
    "select_taps",
    "svcca",
    "taps",
    "unbiased_cka",
    "zero",
]
__getattr__, __dir__ = lazy_exports(__name__)
