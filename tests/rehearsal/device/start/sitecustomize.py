"""Python imports this at its start, where the folder is on PYTHONPATH; see `rehearsal.device.environment`."""

import os
import sys

if os.environ.get("FORGE_REHEARSAL_LIBRARY"):
    from rehearsal.device.load import WithTorch

    sys.meta_path.insert(0, WithTorch())
    if os.environ.get("FORGE_REHEARSAL_REACHED") and not os.environ.get("FORGE_REHEARSAL_COMPILER"):
        from pathlib import Path

        from rehearsal.reach.record import Marking

        sys.meta_path.insert(0, Marking(Path(os.environ["FORGE_REHEARSAL_REACHED"])))
    if os.environ.get("FORGE_REHEARSAL_SMALL"):
        from rehearsal.device.small import Small

        sys.meta_path.insert(0, Small())
