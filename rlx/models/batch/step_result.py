"""What a run gives: logits, and on devices with memory of their own tokens drawn from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlx.backends.buffer import Buffer
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.runtime.compiled import CompiledGraph


class DeviceRows:
    """Logits [n, vocab] that stay on the device until somebody looks at them."""

    def __init__(self, buffer: Buffer, first: int, last: int) -> None:
        self._buffer, self._first, self._last = buffer, first, last

    def __len__(self) -> int:
        return self._last - self._first

    def __getitem__(self, rows: slice) -> DeviceRows:
        first, last, _ = rows.indices(len(self))
        return DeviceRows(self._buffer, self._first + first, self._first + max(last, first))

    @property
    def buffer(self) -> Buffer:
        """Their memory, [n, vocab]."""
        vocab, dtype = self._buffer.shape[-1], self._buffer.dtype
        return self._buffer.view(4 * self._first * vocab, (len(self), vocab), dtype)

    def copy_out(self) -> Any:
        return self.buffer.copy_out()


def on_host(rows: Any) -> Any:
    """Logits as an array."""
    return rows.copy_out() if isinstance(rows, DeviceRows) else rows


def as_argument(rows: Any) -> Any:
    """Logits as an input of a graph."""
    return rows.buffer if isinstance(rows, DeviceRows) else rows


@dataclass(frozen=True)
class StepResult:
    """Logits [n, vocab], in the order of the rows that were wanted."""

    logits: Any  # an array, or rows of a device
    tokens: Sequence[int] | None = None  # where a device has drawn them


@dataclass(frozen=True)
class QueuedRun:
    """A run that a device has yet to do, or does now."""

    graph: CompiledGraph
    inputs: Mapping[str, Any]  # what it was given
    count: int  # tokens that it draws
    logits: DeviceRows
    tokens: Buffer  # where they will be, for the next run to read
    read: Callable[[], Any]  # waits for them

    def result(self) -> StepResult:
        """Wait for it."""
        return StepResult(self.logits, self.read()[: self.count].tolist())
