"""Inner values of a model: read, changed, stored and compared by name.

    from forge_interp import capture, edit, zero
    from forge_models import initialize
    from forge_models.components.decoder import DecoderConfig

    model = DecoderConfig(dim=32, layers=2, heads=4, vocab_size=97, max_length=64).build()
    initialize(model, seed=0)
    with capture(model, "blocks.*.residual", positions="last") as values:
        model(tokens)
    values["blocks.0.residual"]  # (B, 1, 32)
    with edit(model, "attention.heads", zero(), layers=[1], heads=[2]):
        logits = model(tokens)  # without head 2 of block 1

`forge_interp.methods` has lenses, patching, probes and sparse autoencoders, `forge_interp.neuro` models of recorded brains.
Importing this package imports no torch. Names that end in `_sharded` need forge-parallel.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_interp.attention_scores import AttentionScores as AttentionScores
    from forge_interp.attention_scores import capture_qk as capture_qk
    from forge_interp.attention_scores import induction_scores as induction_scores
    from forge_interp.captures import capture as capture
    from forge_interp.captures import select_taps as select_taps
    from forge_interp.commands.ranks import capture_sharded as capture_sharded
    from forge_interp.commands.ranks import edit_sharded as edit_sharded
    from forge_interp.commands.ranks_store import record_sharded as record_sharded
    from forge_interp.edits import add as add
    from forge_interp.edits import edit as edit
    from forge_interp.edits import mean as mean
    from forge_interp.edits import patch as patch
    from forge_interp.edits import project_out as project_out
    from forge_interp.edits import replace as replace
    from forge_interp.edits import zero as zero
    from forge_interp.export import as_xarray as as_xarray
    from forge_interp.heat_maps import heat_map as heat_map
    from forge_interp.kernel_similarity import KernelSums as KernelSums
    from forge_interp.recorder import record as record
    from forge_interp.similarity import Moments as Moments
    from forge_interp.similarity import cca as cca
    from forge_interp.similarity import cka as cka
    from forge_interp.similarity import over as over
    from forge_interp.similarity import procrustes as procrustes
    from forge_interp.similarity import rsa as rsa
    from forge_interp.similarity import svcca as svcca
    from forge_interp.similarity import unbiased_cka as unbiased_cka
    from forge_interp.store import ActivationStore as ActivationStore
    from forge_interp.tap_names import InterpError as InterpError
    from forge_interp.tap_names import TapInfo as TapInfo
    from forge_interp.tap_names import taps as taps

_NAMES = {
    "attention_scores": "AttentionScores capture_qk induction_scores",
    "captures": "capture select_taps",
    "commands.ranks": "capture_sharded edit_sharded",
    "commands.ranks_store": "record_sharded",
    "edits": "add edit mean patch project_out replace zero",
    "export": "as_xarray",
    "heat_maps": "heat_map",
    "kernel_similarity": "KernelSums",
    "recorder": "record",
    "similarity": "Moments cca cka over procrustes rsa svcca unbiased_cka",
    "store": "ActivationStore",
    "tap_names": "InterpError TapInfo taps",
}
__getattr__, __dir__ = lazy_exports(__name__, {name: module for module, names in _NAMES.items() for name in names.split()})
