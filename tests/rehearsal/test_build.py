"""The library of the device is built once; where it cannot be, there is a reason."""

from pathlib import Path

import pytest

from rehearsal.device import build

pytestmark = pytest.mark.rehearsal


def test_a_library_is_built_once_and_a_broken_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    try:
        first = build.library()
    except build.NoCompiler as reason:
        pytest.skip(str(reason))
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("it is there"))
    assert build.library() == first
    monkeypatch.undo()
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && echo mine && exit 0\necho no such header >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv(build.CACHE, str(tmp_path / "cache"))
    with pytest.raises(build.NoCompiler, match="no such header"):
        build.library()
    assert list((tmp_path / "cache").rglob("*.so")) == [], "nothing half made is published"
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(build.NoCompiler, match=r"no g\+\+"):
        build.library()
