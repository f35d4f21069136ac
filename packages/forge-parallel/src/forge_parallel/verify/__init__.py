"""Is a layout right? Parity with one process, equal replicas, finite state, and what is proven.

    from forge_parallel.verify import is_proven, proven_rows

    assert is_proven(["dp_shard", "bf16"])  # a test runs a model with both
    assert not is_proven(["dp_shard", "a plugin"])
    print(len(proven_rows()["fast"]), "combinations of features are compared with one process in every test run")

`measure` and `compare` do that for a recipe; the command `forge-train parity` calls them.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_parallel.verify.parity import Case, Measurement, compare, measure
    from forge_parallel.verify.proofs import is_proven, proven_rows
    from forge_parallel.verify.state import drifted, not_finite

__all__ = ["Case", "Measurement", "compare", "drifted", "is_proven", "measure", "not_finite", "proven_rows"]
__getattr__, __dir__ = lazy_exports(__name__)
