"""/metrics after a live run over a tiny model: every count agrees with the others and with the answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quickdraft.engine.async_engine import AsyncEngine
from quickdraft.engine.opened import EngineConfig, open_model
from tests.support.live_server import complete_app, live_server
from tests.support.tiny import write_tiny_llama

REQUESTS = [
    {"prompt": "one two three " * 8, "speculation": "lookup@16"},
    {"prompt": "one two three " * 8, "speculation": "lookup+prediction", "prediction": "one two three"},
    {"prompt": [[5] * 40, [6, 7] * 9], "speculation": "auto"},
    {"prompt": [5] * 40, "speculation": "off", "temperature": 0},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, float], list[dict[str, int]]]]:
    """Sample -> value, labels but the source and the position summed up; and the answers' usages."""
    path: Path = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")
    engine = AsyncEngine(open_model(path, EngineConfig(threads=1, kv_memory_bytes=1 << 20)))
    with live_server(complete_app(engine)) as url:
        usages = []
        for fields in REQUESTS:
            if "prediction" in fields:
                fields = {**fields, "prediction": {"type": "content", "content": fields["prediction"]}}
            body = {"model": "tiny", "max_tokens": 20, "ignore_eos": True, "seed": 3, **fields}
            reply = httpx.post(f"{url}/v1/completions", json=body, timeout=30, trust_env=False)
            assert reply.is_success, reply.text
            usages.append(reply.json()["usage"])
        text = httpx.get(f"{url}/metrics", trust_env=False).text
    engine.shutdown()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    yield found, usages


def test_counts_add_up(run: tuple[dict[str, float], list[dict[str, int]]]) -> None:
    got, usages = run
    answers = 5
    prompt, generated = (sum(one[f"{kind}_tokens"] for one in usages) for kind in ("prompt", "completion"))
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usages)  # type: ignore[index]
    assert cached > 0
    assert got["vllm:prompt_tokens_total"] == got["vllm:prefix_cache_queries_total"] == prompt
    assert got["vllm:prefix_cache_hits_total"] == got["quickdraft_prefix_cache_hit_tokens_total"] == cached
    assert got["vllm:prefix_cache_hits"] == cached and got["vllm:prefix_cache_queries"] == prompt
    assert got["vllm:generation_tokens_total"] == generated == 20 * answers
    assert got["vllm:request_success_total"] == answers
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time",
                 "request_decode_time"):  # fmt: skip
        assert got[f"vllm:{name}_seconds_count"] == answers, name
    assert got["quickdraft_calls_total"] == len(REQUESTS)
    assert got["vllm:num_requests_running"] == got["vllm:num_requests_waiting"] == 0


def test_drafts_add_up(run: tuple[dict[str, float], list[dict[str, int]]]) -> None:
    got, _ = run
    for vllm, own in (("num_drafts", "drafts"), ("num_draft_tokens", "draft_tokens"),
                      ("num_accepted_tokens", "accepted_tokens")):  # fmt: skip
        assert got[f"vllm:spec_decode_{vllm}_total"] == got[f"quickdraft_{own}_total"], vllm
    accepted = got["vllm:spec_decode_num_accepted_tokens_total"]
    assert 0 < accepted < got["vllm:spec_decode_num_draft_tokens_total"]
    assert got["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == accepted
