"""/metrics: Prometheus series under vLLM's names, and quickdraft's own beside them.

Histograms and counters of finished work are kept here, in a registry of this application; what the
engine counts is read when somebody asks. Nothing is global: two applications do not meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, UntypedMetricFamily
from prometheus_client.registry import Collector

from quickdraft.engine.metrics import EngineMetrics
from quickdraft.server.answer import Choice
from quickdraft.server.request_log import CLIENT_GONE, RequestLog
from quickdraft.types import FinishReason

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_FIRST: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_BETWEEN: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
    7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_WHOLE: Final = (
    0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip


class Metrics:
    """The series of one application serving `model_name`; `engine` gives the engine's counts now."""

    def __init__(self, model_name: str, engine: Callable[[], EngineMetrics]) -> None:
        registry = self._registry = CollectorRegistry()
        self._model = model_name
        registry.register(_EngineCollector(model_name, engine))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("model_name", *labels), registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, text, ("model_name",), buckets=buckets, registry=registry)
            return family.labels(model_name)

        prompt = counter("vllm:prompt_tokens", "Prompt tokens of requests that emitted a token.")
        generated = counter("vllm:generation_tokens", "Tokens emitted.")
        self._prompt, self._generated = prompt.labels(model_name), generated.labels(model_name)
        self._success = counter("vllm:request_success", "Requests that ended.", "finished_reason")
        for reason in FinishReason:
            self._success.labels(model_name, reason)
        self._calls = counter("quickdraft_calls", "Calls by endpoint and status.", "endpoint", "status")
        self._first = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _FIRST)
        self._between = histogram(
            "vllm:inter_token_latency_seconds", "Between tokens; those of one step share its time.", _BETWEEN
        )
        self._whole = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _WHOLE)
        self._queue = histogram("vllm:request_queue_time_seconds", "Waiting for the first step.", _WHOLE)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "Reading the prompt.", _WHOLE)
        self._decode = histogram("vllm:request_decode_time_seconds", "Decoding.", _WHOLE)

    def tokens(self, choice: Choice, count: int, gap: float | None, arrived: float) -> None:
        """`count` tokens came, `gap` seconds after the choice's previous ones (None: the first)."""
        self._generated.inc(count)
        if gap is None:
            assert choice.first_at is not None, "tokens came, so there was a first one"
            self._prompt.inc(choice.prompt_tokens)
            self._first.observe(choice.first_at - arrived)
            return
        for _ in range(count):
            self._between.observe(gap / count)

    def ended(self, endpoint: str, log: RequestLog) -> None:
        """A call ended, well or not."""
        self._calls.labels(self._model, endpoint, str(log.status)).inc()
        for choice in log.answer.choices if log.answer is not None else ():
            self._choice_ended(choice, log)

    def exposition(self) -> bytes:
        """All series in Prometheus's text format, of the type CONTENT_TYPE."""
        return generate_latest(self._registry)

    def _choice_ended(self, choice: Choice, log: RequestLog) -> None:
        reason = choice.finish_reason
        if reason is None:
            reason = FinishReason.ABORT if log.status in (CLIENT_GONE, 504) else FinishReason.ERROR
        self._success.labels(self._model, reason).inc()
        if choice.timings is None:
            return
        self._queue.observe(choice.timings.queue_ms / 1000)
        self._prefill.observe(choice.timings.prompt_ms / 1000)
        self._decode.observe(choice.timings.decode_ms / 1000)
        if choice.last_at is not None:
            self._whole.observe(choice.last_at - log.arrived)


class _EngineCollector(Collector):
    """Series read from the engine at each scrape."""

    def __init__(self, model_name: str, engine: Callable[[], EngineMetrics]) -> None:
        self._model, self._engine = model_name, engine

    def describe(self) -> Iterable[Metric]:
        return ()  # the engine is not asked before somebody scrapes

    def collect(self) -> Iterator[Metric]:
        now = self._engine()
        used = now.kv_blocks_used / now.kv_blocks
        yield self._gauge("vllm:num_requests_running", "Requests being computed.", now.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", now.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks requests hold, 0 to 1.", used)
        yield self._counter("vllm:num_preemptions", "Requests put back into the queue.", now.preemptions)
        for name, text, value in (
            ("queries", "Prompt tokens looked up in the prefix cache.", now.prefix_queries),
            ("hits", "Of these, tokens found.", now.prefix_hits),
        ):
            # vLLM documents the name without _total and exports it with: dashboards use either.
            plain = UntypedMetricFamily(f"vllm:prefix_cache_{name}", text, labels=["model_name"])
            plain.add_metric([self._model], value)
            yield plain
            yield self._counter(f"vllm:prefix_cache_{name}", text, value)
        yield from self._speculation(now)
        yield from self._cache(now)

    def _speculation(self, now: EngineMetrics) -> Iterator[Metric]:
        for name, own, text, counts in (
            ("num_drafts", "drafts", "Drafts verified.", now.draft_steps),
            ("num_draft_tokens", "draft_tokens", "Tokens drafted.", now.drafted),
            ("num_accepted_tokens", "accepted_tokens", "Drafted tokens emitted.", now.accepted),
        ):
            yield self._counter(f"vllm:spec_decode_{name}", text, sum(counts.values()))
            family = CounterMetricFamily(f"quickdraft_{own}", text, labels=["model_name", "source"])
            for source, count in counts.items():
                family.add_metric([self._model, source], count)
            yield family
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts whose token at this position was emitted.",
            labels=["model_name", "position"],
        )
        for position, count in enumerate(now.accepted_per_position):
            family.add_metric([self._model, str(position)], count)
        yield family
        text = "Tokens found in the prefix cache without rows of the model that drafts."
        yield self._counter("quickdraft_draft_cold_tokens", text, now.draft_cold_tokens)

    def _cache(self, now: EngineMetrics) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            "quickdraft_kv_blocks", "KV blocks by state.", labels=["model_name", "state"]
        )
        free = now.kv_blocks - now.kv_blocks_used - now.kv_blocks_cached
        for state, count in (("used", now.kv_blocks_used), ("cached", now.kv_blocks_cached), ("free", free)):
            blocks.add_metric([self._model, state], count)
        yield blocks
        evicted = now.prefix_evicted_blocks
        yield self._counter("quickdraft_prefix_cache_evicted_blocks", "KV blocks evicted.", evicted)
        gone = now.checkpoints_evicted
        yield self._gauge("quickdraft_checkpoints", "Recurrent states kept.", now.checkpoints)
        yield self._counter("quickdraft_checkpoints_evicted", "Recurrent states evicted.", gone)
        from_disk = now.prefix_restored
        hits = CounterMetricFamily(
            "quickdraft_prefix_cache_hit_tokens",
            "Prompt tokens found, by tier.",
            labels=["model_name", "tier"],
        )
        hits.add_metric([self._model, "memory"], now.prefix_hits - from_disk)
        hits.add_metric([self._model, "disk"], from_disk)
        yield hits
        disk = UntypedMetricFamily(
            "quickdraft_disk_cache", "What the disk tier counts.", labels=["model_name", "counter"]
        )
        for name, value in now.disk.items():
            disk.add_metric([self._model, name], value)
        yield disk

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
