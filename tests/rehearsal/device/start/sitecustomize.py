"""Python imports this at its start, where the folder is on PYTHONPATH; see `rehearsal.device.environment`."""

import os
import sys

if os.environ.get("FORGE_REHEARSAL_LIBRARY"):
    from rehearsal.device.load import WithTorch

    sys.meta_path.insert(0, WithTorch())
