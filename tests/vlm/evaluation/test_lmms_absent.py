"""Without lmms-eval, or with a broken one."""

from types import SimpleNamespace
from typing import Any

import pytest

from forge_core.errors import ForgeError
from forge_train.hooks import evaluation


@pytest.mark.parametrize("missing", ["lmms_eval", "lmms_eval.api"])
def test_the_error_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(name, name=missing)

    monkeypatch.setattr(evaluation, "importlib", SimpleNamespace(import_module=absent))
    with pytest.raises(ForgeError, match=r'tasks need lmms-eval; install it: pip install "forge-train\[lmms\]"'):
        evaluation.import_library("forge_train.inference.lmms_harness", "lmms_eval", "lmms-eval", "lmms")
