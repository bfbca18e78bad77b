"""What `/metrics` tells Prometheus: requests, tokens, latencies, and the state of engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_WHOLE = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# statistics of an engine: a name here, its name there, what it is, whether it only grows
_ENGINE = (
    ("rlx_engine_running", "running", "Requests in the batch", False),
    ("rlx_engine_waiting", "waiting", "Requests in the queue", False),
    ("rlx_kv_pages_used", "pages_used", "Pages of the KV cache in use", False),
    ("rlx_kv_pages_free", "pages_free", "Pages of the KV cache that could be used", False),
    ("rlx_kv_pages_cached", "pages_cached", "Free pages of the KV cache with a prefix", False),
    ("rlx_prefix_hits", "prefix_hits", "Requests whose prefix was in the KV cache", True),
    ("rlx_prefix_hit_tokens", "prefix_tokens", "Prompt tokens that were in the KV cache", True),
    ("rlx_engine_runs", "runs", "Runs of the model", True),
    ("rlx_engine_run_seconds", "run_seconds", "Time of the runs", True),
    ("rlx_engine_tokens_in", "tokens_in", "Prompt tokens of the engine", True),
    ("rlx_engine_tokens_out", "tokens_out", "Tokens that the engine generated", True),
)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, loaded: Callable[[], Iterable[Any]]) -> None:
        """`loaded` gives the models whose engines are asked."""
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry}
        model = ["model"]
        self.requests = Counter(
            "rlx_requests", "Requests that were answered", ["path", "status"], **own
        )
        self.in_flight = Gauge("rlx_requests_in_flight", "Requests being answered", **own)
        self.seconds = Histogram(
            "rlx_request_seconds", "Time of a request", ["path"], buckets=_WHOLE, **own
        )
        self.first_token = Histogram(
            "rlx_time_to_first_token_seconds", "Time to the first token", model, buckets=_FIRST,
            **own,
        )  # fmt: skip
        self.inter_token = Histogram(
            "rlx_inter_token_seconds", "Time between tokens", model, buckets=_BETWEEN, **own
        )
        self.prompt_tokens = Counter("rlx_prompt_tokens", "Tokens of prompts", model, **own)
        self.cached_tokens = Counter(
            "rlx_cached_tokens", "Tokens of prompts that were in the KV cache", model, **own
        )
        self.completion_tokens = Counter("rlx_completion_tokens", "Tokens of answers", model, **own)
        self.registry.register(_EngineCollector(loaded))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector:
    """Asks engines when metrics are read."""

    def __init__(self, loaded: Callable[[], Iterable[Any]]) -> None:
        self._loaded = loaded

    def collect(self) -> Iterable[Metric]:
        told = [(m.name, m.stats()) for m in list(self._loaded())]
        models = GaugeMetricFamily("rlx_model_loaded", "Models in memory", labels=["model"])
        for name, _ in told:
            models.add_metric([name], 1)
        yield models
        for ours, theirs, text, grows in _ENGINE:
            kind = CounterMetricFamily if grows else GaugeMetricFamily
            family = kind(ours, text, labels=["model"])
            for name, stats in told:
                if theirs in stats:
                    family.add_metric([name], stats[theirs])
            yield family
