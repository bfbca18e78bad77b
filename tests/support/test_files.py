"""Files: the cache directory, atomic writes, trusted files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlx.errors import close_names, did_you_mean
from rlx.support import files


def test_the_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLX_CACHE", "1")
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    assert files.cache_directory("kernels") == tmp_path / "kernels"
    monkeypatch.setenv("RLX_CACHE_DIR", "~/somewhere")
    assert files.cache_root() == Path.home() / "somewhere"
    monkeypatch.delenv("RLX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert files.cache_root() == tmp_path / "xdg" / "rlx"
    monkeypatch.setenv("RLX_CACHE", "0")
    assert files.cache_directory("kernels") is None


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyError), files.private_file(path) as file:
        file.write(b"half")
        raise KeyError
    with pytest.raises(KeyError), files.atomic_file(path) as file:
        file.write(b"half")
        raise KeyError
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


def test_permissions(tmp_path: Path) -> None:
    """Cached code is for its user alone; files that users ask for have the usual permissions."""
    mask = os.umask(0o022)
    try:
        files.write_atomic(tmp_path / "code", b"1")
        with files.atomic_file(tmp_path / "result") as file:
            file.write(b"2")
    finally:
        os.umask(mask)
    assert (tmp_path / "code").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "result").stat().st_mode & 0o777 == 0o644


def test_only_trusted_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "code"
    files.write_atomic(path, b"code", durable=False)
    assert files.read_trusted(path) == b"code"
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError):
        files.read_trusted(tmp_path / "link")
    path.chmod(0o620)
    with pytest.raises(PermissionError, match="others may write"):
        files.read_trusted(path)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError):
        files.make_trusted_directory(tmp_path / "open")


POSIX = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners here")


@POSIX
def test_a_cache_root_that_others_may_write_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever may write to the root may put other directories in place of those in it."""
    root = tmp_path / "cache"
    monkeypatch.setenv("RLX_CACHE_DIR", str(root))
    mask = os.umask(0o002)
    try:
        files.make_trusted_directory(root / "kernels")
        files.make_private_directory(root / "models")
    finally:
        os.umask(mask)
    assert [p.stat().st_mode & 0o777 for p in (root, root / "kernels", root / "models")] == [
        0o700
    ] * 3
    root.chmod(0o770)
    for code in (True, False):
        with pytest.raises(PermissionError, match=f"others may write to it: {root}$"):
            files.check_directory(root / "kernels", code=code)
    root.chmod(0o700)
    files.check_directory(root / "kernels")
    files.check_directory(root / "nothing")  # this user makes it


@POSIX
def test_links_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    monkeypatch.setenv("RLX_CACHE_DIR", str(root))
    root.mkdir(mode=0o700)
    elsewhere.mkdir(mode=0o700)
    (root / "kernels").symlink_to(elsewhere)
    with pytest.raises(PermissionError, match="a symbolic link"):
        files.make_trusted_directory(root / "kernels")
    files.check_directory(root / "kernels", code=False)  # no code: may lie elsewhere
    elsewhere.chmod(0o777)
    with pytest.raises(PermissionError, match="others may write"):
        files.check_directory(root / "kernels", code=False)


@POSIX
def test_foreign_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    (tmp_path / "models").mkdir()
    files.check_directory(tmp_path / "models", code=False)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    if me:
        with pytest.raises(PermissionError, match="another user"):
            files.check_directory(tmp_path / "models", code=False)
    else:  # the superuser's models may be used by all, but not the superuser's code
        files.check_directory(tmp_path / "models", code=False)
    with pytest.raises(PermissionError, match="another user"):
        files.check_directory(tmp_path / "models")


def test_temporary_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    names = [f".new-{dead}-a", f".new-{os.getpid()}-b", "artifact"]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    assert files.remove_stale(tmp_path) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names[1:])


def test_suggestions() -> None:
    known = ["fuse.residual", "fuse.glu", "simplify"]
    assert did_you_mean("fuse.residul", known) == "did you mean fuse.residual?"
    assert did_you_mean("zzz", known) == ""
    assert close_names("fuse.gl", known).startswith("close names: fuse.glu")
    assert close_names("zzz", known) == ""
