"""Fixtures of the code generation tests."""

from __future__ import annotations

import pytest
from kernel_support import RUNNABLE

from rlx.backends.cpu.thread_pool import ThreadPool
from rlx.llvm.target import Target


@pytest.fixture(autouse=True)
def _private_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "kernel-cache"))


@pytest.fixture(params=RUNNABLE)
def target(request) -> Target:
    """Every target whose code this machine can run."""
    return Target.named(request.param)


@pytest.fixture(
    params=[(1, True), (2, True), (4, True), (2, False), (4, False)],
    ids=lambda p: f"{p[0]}-{'futex' if p[1] else 'portable'}",
)
def pool(request):
    """Pools of several sizes, also with more workers than there may be cores."""
    workers, futex = request.param
    made = ThreadPool(workers, oversubscribe=True, futex=futex)
    yield made
    made.close()
