"""/metrics: vLLM's names, the values of what was really sent, no state shared between applications."""

from __future__ import annotations

import re
import threading
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from quickdraft.engine.metrics import EngineMetrics
from quickdraft.server.limits import Limits
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import complete_app, live_server

USER = [{"role": "user", "content": "hi"}]
COUNTS = EngineMetrics(
    running=2, waiting=3, kv_blocks=10, kv_blocks_used=4, kv_blocks_cached=5, preemptions=6,
    prefix_queries=100, prefix_hits=70, prefix_evicted_blocks=8,
    prefix_restored=20, checkpoints=9, checkpoints_evicted=12,
    disk={"restored_tokens": 35, "written_bytes": 4096},
    draft_steps={"lookup": 11, "mtp": 2}, drafted={"lookup": 50, "mtp": 4},
    accepted={"lookup": 30, "mtp": 3}, accepted_per_position=(13, 9, 1),
    draft_cold_tokens=12,
)  # fmt: skip
VLLM_NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_queue_time_seconds_count",
    "vllm:request_prefill_time_seconds_count",
    "vllm:request_decode_time_seconds_count",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
}


def scrape(url: str) -> dict[str, float]:
    """Samples by name and labels other than model_name, which each must carry."""
    reply = httpx.get(f"{url}/metrics", trust_env=False)
    assert reply.status_code == 200
    assert re.match(r"text/plain; version=\d+\.\d+\.\d+; charset=utf-8", reply.headers["content-type"])
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "fake", sample
            rest = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
            samples[f"{sample.name}{{{rest}}}" if rest else sample.name] = sample.value
    return samples


def test_engine_counts() -> None:
    with live_server(complete_app(FakeEngine(counts=COUNTS))) as url:
        got = scrape(url)
    bare = {name.partition("{")[0] for name in got}
    assert bare >= VLLM_NAMES, VLLM_NAMES - bare
    expected = {
        "vllm:num_requests_running": 2, "vllm:num_requests_waiting": 3, "vllm:kv_cache_usage_perc": 0.4,
        "vllm:num_preemptions_total": 6, "vllm:prefix_cache_queries": 100, "vllm:prefix_cache_hits": 70,
        "vllm:prefix_cache_queries_total": 100, "vllm:prefix_cache_hits_total": 70,
        "vllm:spec_decode_num_drafts_total": 13, "vllm:spec_decode_num_draft_tokens_total": 54,
        "vllm:spec_decode_num_accepted_tokens_total": 33,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=0}": 13,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=2}": 1,
        "quickdraft_drafts_total{source=lookup}": 11, "quickdraft_draft_tokens_total{source=mtp}": 4,
        "quickdraft_accepted_tokens_total{source=lookup}": 30, "quickdraft_kv_blocks{state=used}": 4,
        "quickdraft_kv_blocks{state=cached}": 5, "quickdraft_kv_blocks{state=free}": 1,
        "quickdraft_prefix_cache_hit_tokens_total{tier=memory}": 50,
        "quickdraft_prefix_cache_hit_tokens_total{tier=disk}": 20,
        "quickdraft_prefix_cache_evicted_blocks_total": 8,
        "quickdraft_checkpoints": 9, "quickdraft_checkpoints_evicted_total": 12,
        "quickdraft_draft_cold_tokens_total": 12,
        "quickdraft_disk_cache{counter=written_bytes}": 4096,
    }  # fmt: skip
    assert {name: got.get(name) for name in expected} == expected


def ask(url: str, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    what = {"messages": USER} if "chat" in path else {"prompt": [5, 6, 7]}
    return httpx.post(url + path, json={"model": "fake", **what, **fields}, trust_env=False)


def test_counts_of_what_was_sent() -> None:
    engine = FakeEngine(tokens_per_step=2)
    with live_server(complete_app(engine)) as url:
        usages = [ask(url, stream=stream, max_tokens=7) for stream in (False, True)]
        prompt = usages[0].json()["usage"]["prompt_tokens"]
        assert ask(url, "/v1/completions", prompt=[[5, 6, 7], [8]], max_tokens=4).is_success
        assert ask(url, n=0).status_code == 400
        engine.error_at_step = 2
        assert ask(url).status_code == 500
        engine.capacity = 0
        assert ask(url).status_code == 429  # never began: it did not end either
        got = scrape(url)
    assert got["vllm:prompt_tokens_total"] == 3 * prompt + 4
    assert got["vllm:generation_tokens_total"] == 7 + 7 + 4 + 4 + 4
    reasons = {
        r: got[f"vllm:request_success_total{{finished_reason={r}}}"]
        for r in ("stop", "length", "abort", "error")
    }
    assert reasons == {"stop": 0, "length": 4, "abort": 0, "error": 1}
    assert got["vllm:time_to_first_token_seconds_count"] == 5
    assert got["vllm:inter_token_latency_seconds_count"] == 5 + 5 + 2 + 2 + 2  # the first step has none
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert got[f"vllm:{name}_seconds_count"] == 4
    assert abs(got["vllm:request_decode_time_seconds_sum"] - 4 * 0.004) < 1e-9
    assert abs(got["vllm:request_queue_time_seconds_sum"] - 4 * 0.001) < 1e-9
    assert got["vllm:time_to_first_token_seconds_bucket{le=+Inf}"] == 5
    calls = {k: v for k, v in got.items() if k.startswith("quickdraft_calls_total")}
    assert calls == {
        "quickdraft_calls_total{endpoint=chat,status=200}": 2,
        "quickdraft_calls_total{endpoint=chat,status=400}": 1,
        "quickdraft_calls_total{endpoint=chat,status=429}": 1,
        "quickdraft_calls_total{endpoint=chat,status=500}": 1,
        "quickdraft_calls_total{endpoint=completion,status=200}": 1,
    }


def test_a_client_that_leaves_and_a_timeout_are_aborts() -> None:
    engine = FakeEngine(reply="x" * 200, tokens_per_step=1, step_seconds=0.02)
    limits = Limits(request_seconds=0.3)
    with live_server(complete_app(engine, limits=limits), limits) as url:
        assert ask(url).status_code == 504
        body = {"model": "fake", "messages": USER, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, trust_env=False) as reply:
            next(reply.iter_lines())
        wait = threading.Event()
        for _ in range(500):
            got = scrape(url)
            if got["vllm:request_success_total{finished_reason=abort}"] == 2:
                break
            wait.wait(0.01)
    assert got["vllm:request_success_total{finished_reason=abort}"] == 2
    assert got["quickdraft_calls_total{endpoint=chat,status=499}"] == 1
    assert engine.running == set() and len(engine.aborted) == 2


def test_two_applications_do_not_meet() -> None:
    with live_server(complete_app(FakeEngine())) as first, live_server(complete_app(FakeEngine())) as second:
        assert ask(first).is_success
        assert scrape(first)["vllm:generation_tokens_total"] > 0
        assert scrape(second)["vllm:generation_tokens_total"] == 0
