"""The fixture `migrated` of this folder's tests."""

from functools import partial
from pathlib import Path

import pytest

from train.migration.migrated import Migrate, migrate_text


@pytest.fixture
def migrated(tmp_path: Path) -> Migrate:
    """Returns a function of a file's name and text that migrates it."""
    return partial(migrate_text, tmp_path)
