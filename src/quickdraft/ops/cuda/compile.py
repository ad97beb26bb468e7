"""Ahead-of-time compilation: machine code of a kernel start for a card that is not here, and what it takes.

Registers and spills come from ptxas, shared memory from triton. `key_of` and `digest` say without compiling
whether the result could have changed. Needs no GPU; knows no op.
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, make_backend

from quickdraft.errors import UnsupportedError
from quickdraft.ops import cuda
from quickdraft.ops.cuda.launch import INTERPRETED, Started

ARCHITECTURES = (80, 86, 89, 90, 120)
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.float64: "*fp64",
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one kernel takes on one architecture."""

    registers: int  # per thread
    spill_bytes: int  # stored and loaded per thread
    shared_bytes: int  # per program
    code_bytes: int
    wide_copies: int  # instructions that copy 16 bytes a thread to shared memory ahead of their use


def source_of(started: Started) -> Any:
    """The kernel with the types its arguments have."""
    if INTERPRETED:
        raise UnsupportedError("the interpreter's kernels cannot be compiled", hint="unset TRITON_INTERPRET")
    signature, constants, attributes = _specialised(started)
    return ASTSource(fn=started.kernel, signature=signature, constexprs=constants, attrs=attributes)


def key_of(started: Started) -> str:
    """Equal for starts of the same machine code; nothing in it follows from the version of triton."""
    signature, constants, attributes = _specialised(started)
    numbers = {name: str(value) for name, value in constants.items()}
    aligned = [index for (index,) in attributes]
    return f"{started.kernel.__name__} {numbers} {signature} {aligned} {started.options}"


def _specialised(started: Started) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], Any]]:
    """Types, constants, and which arguments are multiples of 16, as triton takes them at a start."""
    kernel = started.kernel
    signature, constants, attributes = {}, dict(started.numbers), {}
    for index, (name, value) in enumerate(zip(kernel.arg_names, started.arguments, strict=False)):
        if value is None:
            signature[name], constants[name] = "constexpr", None
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and name not in (kernel.do_not_specialize or ()):
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return signature | dict.fromkeys(started.numbers, "constexpr"), constants, attributes


def label(started: Started) -> str:
    """The numbers that tell one configuration of a kernel from another."""
    hidden = ("OFFSET", "WIDE", "N")
    numbers = [f"{n} {getattr(v, 'name', v)}" for n, v in started.numbers.items() if n not in hidden]
    given = dict(zip(started.kernel.arg_names, started.arguments, strict=False))
    optional = ("offsets", "minimums", "residual", "order")
    numbers += [name for name in optional if given.get(name) is not None]
    for name in ("values", "keys", "scales"):
        if isinstance(given.get(name), torch.Tensor):
            numbers.append(f"{name} {given[name].dtype}".replace("torch.", ""))
    return ", ".join([*numbers, f"{started.options['num_warps']} warps"])


def compiler() -> str:
    """The version of triton that is installed."""
    return str(triton.__version__)


def digest(starts: Iterable[Started], version: str) -> str:
    """Of the text of all kernels, of the configurations of `starts` and of a version of triton."""
    modules = [
        importlib.import_module(f"{cuda.__name__}.{m.name}") for m in pkgutil.iter_modules(cuda.__path__)
    ]
    texts = {one.src for m in modules for one in vars(m).values() if isinstance(one, triton.JITFunction)}
    parts = [version, *sorted(texts), *sorted(map(key_of, starts))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def compile_start(started: Started, architecture: int) -> Compiled:
    """Compile for sm_`architecture` and read what ptxas says of it."""
    target = GPUTarget("cuda", architecture, 32)
    built = triton.compile(source_of(started), target=target, options=dict(started.options))
    registers, spills = _ptxas(built.asm["ptx"], architecture, bool(started.options["enable_fp_fusion"]))
    wide = len(re.findall(r"cp\.async\.cg\.shared\.global", built.asm["ptx"]))  # cg copies 16 bytes only
    return Compiled(registers, spills, int(built.metadata.shared), len(built.asm["cubin"]), wide)


def sum_layouts(started: Started, architecture: int) -> set[str]:
    """How numbers that are summed along the rows of a tile lie in threads and warps, and so in which order
    they are added: of starts whose sets are equal a row has the same bits. Stops before machine code."""
    target = GPUTarget("cuda", architecture, 32)
    backend, source = make_backend(target), source_of(started)
    options = backend.parse_options(dict(started.options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    made, metadata = source.make_ir(target, options, functions, modules, context), dict(options.__dict__)
    for stage in ("ttir", "ttgir"):
        made = stages[stage](made, metadata)
    text = str(made)
    del made  # before the context it lives in
    layouts = dict(re.findall(r"^(#\w+) = (#ttg.*)$", text, re.MULTILINE))
    sums = re.findall(r"tt\.reduce.*?\}\) : \(tensor<\d+x(\d+)xf32, (#\w+)>", text, re.DOTALL)
    return {_along_rows(int(width), layouts[name]) for width, name in sums}


def _along_rows(width: int, layout: str) -> str:
    """A layout without what it says of columns, and without warps that hold what others hold."""
    parts = {name: numbers.split(", ") for name, numbers in re.findall(r"(\w+) = \[([\d, ]+)\]", layout)}
    version = re.search(r"versionMajor = (\d+)", layout)
    each = int(parts["instrShape"][1]) if version else int(parts["sizePerThread"][1])
    threads = 1 if version else int(parts["threadsPerWarp"][1])
    warps = min(int(parts["warpsPerCTA"][1]), max(width // (each * threads), 1))
    kind = f"matrix instructions {version.group(1)}" if version else "threads"
    return f"{kind}: {width} as {each} x {threads} x {warps}"


def _ptxas(ptx: str, architecture: int, fused: bool) -> tuple[int, int]:
    """Registers and spilled bytes, with the options that triton gives ptxas."""
    tool = get_ptxas(architecture).path
    machine = re.search(r"\.target (\S+)", ptx)
    assert machine is not None, "PTX states its target"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        given = ["-v", "--regAllocOptLevel=2", *([] if fused else ["--fmad=false"]), "--gpu-name"]
        command = [tool, *given, machine.group(1).rstrip(","), path, "-o", path.with_suffix(".cubin")]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", said)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", said)]
    return max(registers), sum(spills)
