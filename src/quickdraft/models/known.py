"""The models that are known by name without a file; see describe.py for what a description is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quickdraft.models.describe import DenseSizes, Description
from quickdraft.models.describe_hybrid import DFlash2Sizes, HybridSizes

QWEN_27B: Final = HybridSizes(
    width=5120, layers=64, heads=24, kv_heads=4, head_dim=256, feed_forward=17408,
    vocabulary=248320, context=262144, eos_ids=(248046, 248044),
    key_heads=16, value_heads=48, key_dim=128, value_dim=128, mrope_section=(11, 11, 10),
    drafter=DFlash2Sizes(
        width=5120, layers=5, heads=32, kv_heads=8, head_dim=128, feed_forward=17408,
        vocabulary=248320, taps=5, block=8, window=2048, rank=256, conv_group=16,
    ),
)  # fmt: skip
TINY_HYBRID: Final = HybridSizes(
    width=128, layers=8, heads=4, kv_heads=2, head_dim=64, feed_forward=256,
    vocabulary=320, context=4096, eos_ids=(258, 256), byte_tokenizer=True,
    key_heads=2, value_heads=6, key_dim=64, value_dim=64, mrope_section=(3, 3, 2),
)  # fmt: skip
TINY_LLAMA: Final = DenseSizes(
    width=128, layers=2, heads=4, kv_heads=2, head_dim=32, feed_forward=256,
    vocabulary=320, context=4096, eos_ids=(258, 256), byte_tokenizer=True,
)  # fmt: skip
KNOWN: Final[Mapping[str, Description]] = {
    "qwen3.8-27b": QWEN_27B, "tiny-hybrid": TINY_HYBRID, "tiny-llama": TINY_LLAMA,
}  # fmt: skip
