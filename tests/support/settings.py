"""One SamplingParams per sampling parameter: the rows of the losslessness matrix."""

from __future__ import annotations

from quickdraft.types import SamplingParams

SETTINGS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.7, seed=11),
    "hot": SamplingParams(temperature=1.5, seed=12),
    "top_k": SamplingParams(temperature=0.8, top_k=5, seed=13),
    "top_p": SamplingParams(temperature=0.8, top_p=0.7, seed=14),
    "min_p": SamplingParams(temperature=0.9, min_p=0.1, seed=15),
    "top_k_top_p_min_p": SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, seed=16),
    "presence": SamplingParams(temperature=0.0, presence_penalty=0.6),
    "frequency": SamplingParams(temperature=0.5, frequency_penalty=0.4, seed=17),
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.15),
    "logit_bias": SamplingParams(temperature=0.6, logit_bias={5: 3.0, 9: -100.0}, seed=18),
    "min_tokens": SamplingParams(temperature=0.9, min_tokens=24, seed=19),
    "stop_ids": SamplingParams(temperature=0.0, stop_token_ids=(3, 7, 19), ignore_eos=True),
    "logprobs": SamplingParams(temperature=0.7, logprobs=3, seed=20),
}
