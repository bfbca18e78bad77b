"""Fixtures of the code generation tests."""

from __future__ import annotations

import pytest
from codegen_support import RUNNABLE

from rlx.codegen.target import Target


@pytest.fixture(autouse=True)
def _private_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "kernel-cache"))


@pytest.fixture(params=RUNNABLE)
def target(request) -> Target:
    """Every target whose code this machine can run."""
    return Target.named(request.param)
