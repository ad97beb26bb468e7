"""Every way a quantised folder can be wrong is an error that names the file and the tensor or key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from quickdraft.errors import ModelFormatError, UnsupportedError
from tests.support.broken_folder import INDEX, WEIGHTS, config, edit, link, load, write
from tests.support.quant_folder import FORMATS, Format, quantised_folder, quantised_linear, quantised_tensors
from tests.support.tiny_folder import safetensors_bytes

Tensors = dict[str, Any]
Change = Callable[[Path, Format], object]
QUERY = "model.layers.1.self_attn.q_proj"
GPTQ, V2, ORDER, AWQ = "gptq", "auto-round native", "gptq in order", "awq"
CT, ASYMMETRIC, CT_ORDER = (
    "compressed-tensors",
    "compressed-tensors asymmetric",
    "compressed-tensors in order",
)


def tensors(change: Callable[[Tensors], object]) -> Change:
    def apply(folder: Path, form: Format) -> None:
        values, _ = quantised_tensors(form, "llama")
        change(values)
        (folder / WEIGHTS).write_bytes(safetensors_bytes(values, None))

    return apply


def put(suffix: str, change: Callable[[Any], Any]) -> Change:
    """Another value of a tensor of one linear."""
    name = f"{QUERY}.{suffix}"
    return tensors(lambda t: t.update({name: np.ascontiguousarray(change(t[name]))}))


def drop(suffix: str) -> Change:
    return tensors(lambda t: t.pop(f"{QUERY}.{suffix}"))


def quantisation(**changes: Any) -> Change:
    return lambda folder, form: config(quantization_config={**form.config(), **changes})(folder)


def scheme(**changes: Any) -> Change:
    """Another `weights` of compressed-tensors' only group, or (`beside`) something beside it."""

    def apply(folder: Path, form: Format) -> None:
        values = form.config()
        group = values["config_groups"]["group_0"]
        group.update(changes.pop("beside", {}))
        group["weights"].update(changes)
        config(quantization_config=values)(folder)

    return apply


def put_scale(value: float, kind: Any) -> Change:
    def change(scales: Any) -> Any:
        changed = scales.astype(kind)
        changed[1, 1] = value
        return changed

    return put("weight_scale", change)


def truncated(folder: Path, form: Format) -> None:
    quantised_folder(folder, form, shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-40])


def absent(folder: Path, form: Format) -> None:
    quantised_folder(folder, form, shards=2)
    (folder / WEIGHTS).unlink()
    edit(INDEX, lambda v: v["weight_map"].update({f"{QUERY}.qweight": "model-00003-of-00002.safetensors"}))(
        folder
    )


def pickled(folder: Path, form: Format) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def swap(values: Any) -> Any:
    """Two inputs of different groups change places, so that one group has an input too many."""
    changed = values.copy()
    changed[0] = (changed[0] + 1) % (changed.max() + 1)
    return changed


# name -> (format, change, the file named, the cause)
CASES: dict[str, tuple[str, Change, str, str]] = {
    "no scales": (GPTQ, drop("scales"), WEIGHTS, f"{QUERY}.scales is missing"),
    "no zero points": (GPTQ, drop("qzeros"), WEIGHTS, f"{QUERY}.qzeros is missing"),
    "no codes": (GPTQ, drop("qweight"), WEIGHTS, f"{QUERY}.qweight is missing"),
    "no groups of inputs": (ORDER, drop("g_idx"), WEIGHTS, f"{QUERY}.g_idx is missing"),
    "no packed weight": (CT, drop("weight_packed"), WEIGHTS, f"{QUERY}.weight_packed is missing"),
    "no shape": (CT, drop("weight_shape"), WEIGHTS, f"{QUERY}.weight_shape is missing"),
    "not symmetric, no zero points": (
        ASYMMETRIC, drop("weight_zero_point"), WEIGHTS, f"{QUERY}.weight_zero_point is missing"),
    "a whole linear is missing": (
        GPTQ, tensors(lambda t: [t.pop(n) for n in list(t) if n.startswith(QUERY)]), "m",
        f"{QUERY}.weight is missing"),
    "codes are bytes": (GPTQ, put("qweight", lambda t: t.astype(np.int64)), WEIGHTS, "wrong type; got I64"),
    "scales are integers": (
        GPTQ, put("scales", lambda t: t.astype(np.int32)), WEIGHTS,
        f"{QUERY}.scales has a wrong type; got I32"),
    "packed is float": (
        CT, put("weight_packed", lambda t: t.astype(np.float32)), WEIGHTS,
        "weight_packed has a wrong type; got F32"),
    "shape is float": (
        CT, put("weight_shape", lambda t: t.astype(np.float32)), WEIGHTS,
        "weight_shape has a wrong type; got F32"),
    "another shape": (
        CT, put("weight_shape", lambda t: t * 2), WEIGHTS, f"{QUERY}.weight_shape is wrong; got [128, 128]"),
    "zero points of half the outputs": (
        GPTQ, put("qzeros", lambda t: t[:, :3]), WEIGHTS, f"{QUERY}.qzeros cannot be used"),
    "zero points of another shape": (
        AWQ, put("qzeros", lambda t: t[:1]), WEIGHTS, f"{QUERY}.qzeros has a wrong shape; got (1, 8)"),
    "zero points turned": (
        ASYMMETRIC, put("weight_zero_point", lambda t: t.T), WEIGHTS,
        "weight_zero_point has a wrong shape; got (2, 8)"),
    "scales in one dimension": (
        GPTQ, put("scales", lambda t: t[0]), WEIGHTS, f"{QUERY}.scales has a wrong shape"),
    "fewer outputs": (
        GPTQ, put("qweight", lambda t: t[:, :32]), WEIGHTS, f"{QUERY}.qweight has a wrong shape"),
    "fewer inputs": (GPTQ, put("qweight", lambda t: t[:4]), WEIGHTS, "wrong shape"),
    "another group size": (
        GPTQ, quantisation(group_size=64), WEIGHTS,
        "in 2 groups of 64 inputs; expected 4 bits in groups of 64"),
    "other bits": (GPTQ, quantisation(bits=8), WEIGHTS, "expected 8 bits in groups of 32"),
    "groups of another size": (
        CT, scheme(group_size=128), WEIGHTS, "weight_scale is of no scheme"),
    "groups of 48": (
        CT, scheme(group_size=48), WEIGHTS, "got groups of 48 inputs; expected a multiple of 32"),
    "channels said": (CT, scheme(strategy="channel"), WEIGHTS, "got 4 bits in 2 groups of 64 inputs"),
    "symmetric said": (
        "gptq asymmetric", quantisation(sym=True), WEIGHTS,
        "qzeros holds zero points that are not symmetric"),
    "symmetric said of AWQ": (
        AWQ, quantisation(zero_point=False), WEIGHTS, "qzeros holds zero points that are not"),
    "symmetric said of compressed-tensors": (
        ASYMMETRIC, scheme(symmetric=True), WEIGHTS,
        "weight_zero_point holds zero points that are not symmetric"),
    "AWQ said of GPTQ": (
        GPTQ, lambda f, _: quantisation()(f, FORMATS[AWQ]), WEIGHTS,
        "qweight is packed as gptq; expected awq"),
    "GPTQ said of AWQ": (
        AWQ, lambda f, _: quantisation()(f, FORMATS[GPTQ]), WEIGHTS, "qweight is packed as awq"),
    "group out of range": (ORDER, put("g_idx", lambda t: t + 1), WEIGHTS, f"{QUERY}.g_idx names groups 1..2"),
    "group below 0": (
        CT_ORDER, put("weight_g_idx", lambda t: t - 1), WEIGHTS, "weight_g_idx names groups -1..0"),
    "uneven groups": (
        ORDER, put("g_idx", swap), WEIGHTS, f"{QUERY}.g_idx does not give every group 32 inputs"),
    "scale that is not finite": (
        GPTQ, put("scales", lambda t: t + np.float16(np.inf)), WEIGHTS,
        f"{QUERY}.scales holds values that are not"),
    "scale of 24 bits": (
        CT, put_scale(1 / 3, np.float32), WEIGHTS, f"{QUERY}.weight_scale holds scales that neither"),
    "scale too small": (
        CT, put_scale(1e-36, ml_dtypes.bfloat16), WEIGHTS, "weight_scale holds a scale as small as 1.0e-36"),
    "plain and quantised": (
        GPTQ, tensors(lambda t: t.update({f"{QUERY}.weight": np.zeros((64, 64), np.float32)})), "m",
        f"nobody uses; got {QUERY}.g_idx"),
    "quantised twice": (
        GPTQ, tensors(lambda t: t.update({f"{QUERY}.{n}": v for n, v in quantised_linear(FORMATS[CT], 64,
        64)[0].items()})),
        WEIGHTS, f"{QUERY} is quantised in two ways"),
    "no config": (
        GPTQ, lambda f, _: config(quantization_config=None)(f), "m", "quantised, but nothing says how"),
    "config is text": (GPTQ, lambda f, _: config(quantization_config="gptq")(f), "config.json", "got 'gptq'"),
    "unknown method": (GPTQ, quantisation(quant_method="fp8"), "config.json", "quant_method; got 'fp8'"),
    "method is a list": (
        GPTQ, quantisation(quant_method=["gptq"]), "config.json", "quant_method; got ['gptq']"),
    "a version that is a list": (
        GPTQ, quantisation(checkpoint_format=[]), "config.json", "checkpoint_format; got []"),
    "marlin": (
        GPTQ, quantisation(checkpoint_format="marlin"), "config.json", "checkpoint_format; got 'marlin'"),
    "AWQ for vectors": (AWQ, quantisation(version="gemv"), "config.json", "version; got 'gemv'"),
    "unknown packing": (V2, quantisation(packing_format="x"), "config.json", "packing_format; got 'x'"),
    "floats": (V2, quantisation(data_type="mx_fp"), "config.json", "data_type; got 'mx_fp'"),
    "bits are text": (GPTQ, quantisation(bits="4"), "config.json", "bits; got '4'"),
    "no group size": (GPTQ, quantisation(group_size=0), "config.json", "group_size; got 0"),
    "sym is a number": (GPTQ, quantisation(sym=1), "config.json", "sym; got 1"),
    "overrides are a list": (GPTQ, quantisation(dynamic=["x"]), "config.json", "dynamic; expected an object"),
    "no groups of config": (CT, quantisation(config_groups={}), "config.json", "config_groups"),
    "another format": (
        CT, quantisation(format="float-quantized"), "config.json", "format; got 'float-quantized'"),
    "activations too": (
        CT, scheme(beside={"input_activations": {"num_bits": 8}}), "config.json", "input_activations; got"),
    "float codes": (CT, scheme(type="float"), "config.json", "weights.type; got 'float'"),
    "one scale": (CT, scheme(strategy="tensor"), "config.json", "strategy; got 'tensor'"),
    "quantised KV": (CT, quantisation(kv_cache_scheme={"num_bits": 8}), "config.json", "kv_cache_scheme"),
    "2:4 sparse": (CT, quantisation(sparsity_config={"format": "x"}), "config.json", "sparsity_config"),
    "cut shard": (GPTQ, truncated, "model-00002-of-00002.safetensors", "ends outside the file"),
    "index names a file that is not there": (
        GPTQ, absent, "model-00003-of-00002.safetensors", "No such file"),
    "pickles": (GPTQ, pickled, "pytorch_model.bin", "pickle are not read"),
    "extra file leads nowhere": (
        GPTQ, lambda f, _: link("model_extra_tensors.safetensors", "x")(f), "model_extra", "No such file"),
    "extra file is cut": (
        GPTQ, lambda f, _: write("model_extra_tensors.safetensors", b"x")(f), "model_extra",
        "not a safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_named(tmp_path: Path, case: str) -> None:
    name, change, file, cause = CASES[case]
    folder = tmp_path / "m"
    quantised_folder(folder, FORMATS[name])
    change(folder, FORMATS[name])
    if (folder / INDEX).exists():
        (folder / WEIGHTS).unlink(missing_ok=True)
    with pytest.raises((ModelFormatError, UnsupportedError)) as error:
        load(folder)
    message = str(error.value)
    assert message.startswith(str(folder)) and file in message.partition(": ")[0], message
    assert cause in message, message


def test_three_bits_are_refused_by_name(tmp_path: Path) -> None:
    quantised_folder(tmp_path, FORMATS[CT])
    put("weight_packed", lambda t: t[:, :6])(tmp_path, FORMATS[CT])
    with pytest.raises(UnsupportedError, match=f"{QUERY}.weight_packed cannot be used; got 3 bits"):
        load(tmp_path)
