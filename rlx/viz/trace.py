"""A timeline as a file for Perfetto (ui.perfetto.dev) and chrome://tracing: one row per worker.

The format is the Trace Event Format: a list of events, times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.backends.timing import WAIT, Slice

Event = dict[str, Any]
_PROCESS = 1
_RUNS = 0  # the row above the workers'


def write_trace(path: Path | str, recorded: Mapping[str, Sequence[Slice]]) -> None:
    """Write the slices of several recordings, by name."""
    text = json.dumps({"traceEvents": trace_events(recorded), "displayTimeUnit": "ns"})
    Path(path).write_text(text + "\n", encoding="utf-8")


def trace_events(recorded: Mapping[str, Sequence[Slice]]) -> list[Event]:
    every = [s for slices in recorded.values() for s in slices]
    start = min((s.begin for s in every), default=0.0)
    workers = sorted({s.worker for s in every})
    events = [_title("process_name", 0, "rlx"), _title("thread_name", _RUNS, "runs")]
    events += [_title("thread_name", _row(w), f"worker {w}") for w in workers]
    for name, slices in recorded.items():
        events += [_event(name, "run", _RUNS, *span, start) for span in _runs(slices)]
        events += [_slice_event(s, start) for s in slices]
    return events


def _runs(slices: Sequence[Slice]) -> list[tuple[float, float]]:
    """Begin and end of each run."""
    spans: dict[int, tuple[float, float]] = {}
    for s in slices:
        begin, end = spans.get(s.run, (s.begin, s.end))
        spans[s.run] = min(begin, s.begin), max(end, s.end)
    return [*spans.values()]


def _row(worker: int) -> int:
    return worker + 1


def _title(kind: str, row: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": row, "args": {"name": name}}


def _slice_event(s: Slice, start: float) -> Event:
    kind = "wait" if s.label == WAIT else "kernel"
    event = _event(s.label, kind, _row(s.worker), s.begin, s.end, start)
    about = {"node": s.node, "block": s.block}
    return event | {"args": {key: text for key, text in about.items() if text}}


def _event(name: str, kind: str, row: int, begin: float, end: float, start: float) -> Event:
    """Times to the nanosecond: more is below the clock's grain."""
    return {
        "ph": "X", "name": name, "cat": kind, "pid": _PROCESS, "tid": row,
        "ts": round((begin - start) * 1e6, 3), "dur": round((end - begin) * 1e6, 3),
    }  # fmt: skip
