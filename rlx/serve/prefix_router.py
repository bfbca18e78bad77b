"""A request router of Ray Serve: a request goes to the replica that has its prefix cached.

`initialize_state` has the options of `request_router_config.request_router_kwargs`.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from rlx.serve.ray_request import RoutedRequest

_HOMES = 4  # replicas that are remembered for a prefix


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Chooses the least busy of the replicas that had the longest prefix of a request; of all, if
    none had any of it, or if those have `spread` more requests than others."""

    def initialize_state(self, spread: int = 8, prefixes: int = 1 << 17) -> None:
        self._spread, self._most = spread, prefixes
        self._homes: OrderedDict[bytes, tuple[ReplicaID, ...]] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:  # fmt: skip
        """One replica, then the others, for when it is full."""
        if pending_request is None:
            return [list(candidate_replicas)]
        pending_request.routing_context.should_backoff = True  # between attempts
        asked = _routed(pending_request)
        if asked.home:
            owner = [r for r in candidate_replicas if replica_tag(r.replica_id) == asked.home]
            if owner:
                return [owner]
        ranked = sorted(candidate_replicas, key=lambda r: self._rank(r, asked.prefixes))
        warm = self._warm(asked.prefixes, ranked)
        if warm and self._load(warm[0]) - self._load(ranked[0]) <= self._spread:
            ranked.remove(warm[0])
            ranked.insert(0, warm[0])
        return [ranked[:1], ranked[1:]]

    def _load(self, replica: RunningReplica) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0

    def _rank(self, replica: RunningReplica, prefixes: list[bytes]) -> tuple[int, bytes]:
        """The least busy first; of equal ones every router finds the same for a prefix."""
        first = prefixes[0] if prefixes else b""
        name = first + replica.replica_id.unique_id.encode()
        return self._load(replica), blake2b(name, digest_size=8).digest()

    def _warm(self, prefixes: list[bytes], ranked: list[RunningReplica]) -> list[RunningReplica]:
        """Who had the longest prefix, the least busy first."""
        for key in reversed(prefixes):
            homes = self._homes.get(key, ())
            if found := [r for r in ranked if r.replica_id in homes]:
                return found
        return []

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        homes = self._homes
        for key in _routed(pending_request).prefixes:
            others = [one for one in homes.pop(key, ()) if one != replica_id]
            homes[key] = (replica_id, *others[: _HOMES - 1])
        while len(homes) > self._most:
            homes.popitem(last=False)


def replica_tag(replica_id: ReplicaID) -> str:
    """A short name of a replica, which ids of responses that it keeps begin with."""
    return blake2b(replica_id.unique_id.encode(), digest_size=4).hexdigest()


def _routed(pending: PendingRequest) -> RoutedRequest:
    found = pending.args[0] if pending.args else None
    return found if isinstance(found, RoutedRequest) else RoutedRequest({}, b"")
