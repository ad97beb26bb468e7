"""Triton's interpreter, made quick and steady enough for tests. Import before starting a kernel.

It patches triton.language again for each call of each function, which takes most of its time; here every
module is patched once and stays so. And its tl.dot is numpy's, whose order of a sum depends on the number
of rows; a card's does not, so here every sum goes along the inputs in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
from triton.runtime import interpreter

assert triton.knobs.runtime.interpret, "tests/__init__.py sets TRITON_INTERPRET before triton is imported"

_patch: Any = interpreter._patch_lang
_patched: set[tuple[bool, bool]] = set()


def _patch_once(function: Any) -> Any:
    known = function.__globals__
    seen = "tl" in known, "core" in known  # the names by which kernels and triton's own functions know it
    if seen not in _patched:
        _patched.add(seen)
        _patch(function)  # the scope it gives is dropped, not restored
    return interpreter._LangPatchScope()


def _dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    assert a.data.dtype in (np.float16, np.float32), "bfloat16 is bits here"
    with np.errstate(all="ignore"):  # rows behind the last one of a tile hold anything
        products = a.data.astype(np.float32)[:, :, None] * b.data.astype(np.float32)[None]
        sums = np.add.reduce(products, axis=1) + d.data
    return interpreter.TensorHandle(sums, d.dtype.scalar)


interpreter._patch_lang = _patch_once
interpreter.InterpreterBuilder.create_dot = _dot
