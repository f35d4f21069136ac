"""Counts the calls of a run that were repeated after a crash. More than a few are a fault that hides there."""

import warnings

import pytest

REPEATED = "a crash, after which the call is repeated"
"""How the warning of a repeated call begins."""

MOST = 2
"""So many repeats in one run pass."""


class Count:
    """A plugin of the process that has the last word: a run with too many repeats fails, though every test of it passed."""

    def __init__(self) -> None:
        self._repeats = 0

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        """Workers of pytest-xdist hand their warnings on, so each is seen once."""
        self._repeats += str(warning_message.message).startswith(REPEATED)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Turns a success into a failure."""
        if self._repeats > MOST and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Says how many there were."""
        if self._repeats:
            verdict = f"more than {MOST}: the run fails" if self._repeats > MOST else f"up to {MOST} pass"
            terminalreporter.write_line(f"calls repeated after a crash: {self._repeats} ({verdict})")
