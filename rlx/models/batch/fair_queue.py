"""The queue of requests that wait: by priority, then so that users and adapters get equal shares.

Each user has a counter of the tokens that were run for it, and so has each of its adapters. Among
requests of one priority that of the user with the least goes first (start-time fair queueing). A
counter begins where those that are served now stand: nobody saves up shares while idle.

Requests gain a priority for every `AGEING` seconds that they wait, up to the highest one waiting,
and a user's adapter that got nothing for `OVERDUE` seconds goes first: nothing starves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator

from rlx.models.batch.request import Request

AGEING = 5.0  # seconds of waiting that count as much as a priority
OVERDUE = 60.0  # seconds
OUTPUT_COST = 2  # of a generated token, in tokens of a prompt
_MOST_COUNTERS = 4096  # of users that have nothing waiting


class FairQueue:
    """Requests in the order in which to admit them. Not safe for several threads."""

    def __init__(self) -> None:
        self._flows: dict[tuple[str | None, int], list[Request]] = {}
        self._served: dict[tuple[str | None, int], float] = {}  # when, of flows that wait
        self._counters: dict[Hashable, float] = {}
        self._floor = 0.0  # the counter of the user that was served last
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        return (request for flow in self._flows.values() for request in flow)

    def add(self, request: Request, now: float) -> None:
        request.arrived = now
        flow = _flow(request)
        if flow not in self._flows:
            self._served[flow] = now
            self._lift(flow)
        insort(self._flows.setdefault(flow, []), request, key=_rank)
        self._count += 1

    def _lift(self, flow: tuple[str | None, int]) -> None:
        """Begin counting where those who are served now stand."""
        user, counters = flow[0], self._counters
        counters[user] = max(counters.get(user, 0.0), self._floor)
        others = [counters[f] for f in self._flows if f[0] == user]
        counters[flow] = max(counters.get(flow, 0.0), min(others, default=0.0))

    def remove(self, request: Request) -> bool:
        """Take a request out; whether it was in."""
        flow = _flow(request)
        waiting = self._flows.get(flow, [])
        at = bisect_left(waiting, _rank(request), key=_rank)
        while at < len(waiting) and waiting[at] is not request:
            at += 1
        if at == len(waiting):
            return False
        del waiting[at]
        self._count -= 1
        if not waiting:
            del self._flows[flow], self._served[flow]
            if len(self._counters) > 2 * _MOST_COUNTERS:
                self._forget()
        return True

    def first(self, now: float) -> Request | None:
        """The request to admit next."""
        if not self._flows:
            return None
        heads = [(flow, waiting[0]) for flow, waiting in self._flows.items()]
        if len(heads) == 1:
            return heads[0][1]
        top = max(head.terms.priority for _, head in heads)

        def turn(entry: tuple[tuple[str | None, int], Request]) -> tuple[float, ...]:
            flow, head = entry
            since = max(head.arrived, self._served[flow])
            if now - since > OVERDUE:
                return (-top - 1.0, since)
            aged = head.terms.priority + (now - head.arrived) // AGEING
            counters = self._counters[flow[0]], self._counters[flow]
            return (-min(aged, top), *counters, _rank(head))

        return min(heads, key=turn)[1]

    def serve(self, request: Request, now: float) -> None:
        """The request is admitted: take it out."""
        flow = _flow(request)
        self._floor = max(self._floor, self._counters[flow[0]])
        self._served[flow] = now
        self.remove(request)

    def charge(self, request: Request, tokens: int) -> None:
        """Tokens are run for a request."""
        flow = _flow(request)
        for key in (flow[0], flow):
            self._counters[key] = self._counters.get(key, self._floor) + tokens

    def _forget(self) -> None:
        """Drop the lowest counters of those who wait for nothing: most say no more than a new one
        would."""
        waiting = {key for flow in self._flows for key in (flow[0], flow)}
        idle = sorted(
            (k for k in self._counters if k not in waiting), key=self._counters.__getitem__
        )
        for key in idle[: max(0, len(idle) - _MOST_COUNTERS)]:
            del self._counters[key]


def _flow(request: Request) -> tuple[str | None, int]:
    return request.terms.user, request.adapter


def _rank(request: Request) -> float:
    """The order within a user's requests: time, and priorities as if they had come sooner."""
    return request.arrived - request.terms.priority * AGEING
