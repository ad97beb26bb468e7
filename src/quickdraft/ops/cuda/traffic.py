"""Bytes that ops move: formulas of sizes, one for each op, equal to what their kernels touch.

`least` is every input read once and every output written once (the copies in 16 bits that norms and gates
write for linears are outputs, and what those linears read); `beyond` is what kernels move between their
starts or read again. Bytes are distinct ones of each start: what a start reads twice counts once. A test
meters the kernels in Triton's interpreter and demands these numbers. Steps are of one sequence. Knows no
time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quickdraft.ops.cuda import choose
from quickdraft.ops.cuda.launch import Started, ceil_divide
from quickdraft.ops.cuda.weights import PackedDense, PackedGroups
from quickdraft.ops.interface import BLOCK_TOKENS

FLOAT = INT = 4
HALF = 2
KEY = 8  # of a number and its id


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one call of an op."""

    least: int
    beyond: int = 0

    @property
    def moved(self) -> int:
        return self.least + self.beyond


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step of one sequence, those that fill a captured shape up not counted: `first` is the
    position of the first one."""

    count: int
    first: int
    replayed: int
    drafted: int

    @property
    def end(self) -> int:
        return self.first + self.count


def rows_of(count: int, width: int, read: int, copies: int = 0, written: int = 1, once: int = 0) -> Traffic:
    """Rows of `width` floats, of which `read` are read and `written` are written; `once`: floats read once
    whatever the rows."""
    return Traffic(count * width * (FLOAT * (read + written) + HALF * copies) + FLOAT * once)


def rope(count: int, heads: int, turned: int) -> Traffic:
    """`turned` numbers of each head, an angle for every two, and positions."""
    return Traffic(count * (2 * FLOAT * heads * turned + FLOAT * turned + INT))


def gathered(count: int, width: int, copies: int) -> Traffic:
    return Traffic(count * ((2 * FLOAT + HALF * copies) * width + INT))


def embedded(count: int, table: PackedGroups | PackedDense, instead: bool) -> Traffic:
    """Rows of a table of `count` tokens that differ."""
    width = table.inputs
    if isinstance(table, PackedDense):
        row = width * table.values.element_size()
    else:
        blocks = ceil_divide(width, table.block_inputs)
        row = blocks * table.sub * table.words.element_size()
        row += ceil_divide(blocks * table.high_bits, 2) * table.sub
        numbers = (table.scales, table.offsets, table.minimums)
        groups = ceil_divide(width, table.group)
        row += groups * sum(part.element_size() for part in numbers if part is not None)
        above = (table.scale_shares, table.minimum_shares)
        row += ceil_divide(groups, table.steps) * sum(s.element_size() for s in above if s is not None)
    once = FLOAT * width if instead else 0
    if isinstance(table, PackedGroups) and table.order is not None:
        once += INT * width
    return Traffic(count * (row + FLOAT * width + INT) + once)


def main_linear(starts: tuple[Started, ...]) -> Started:
    """The start that reads the weight."""
    return next(one for one in starts if one.kernel.__name__ in ("grouped_linear", "dense_linear"))


def linear(
    count: int, weight: PackedGroups | PackedDense, bias: bool, residual: bool, starts: tuple[Started, ...]
) -> Traffic:
    """The weight, inputs in the type that meets it, outputs; beyond: a cast of the inputs, inputs of rows
    that fill up a tile, sums of inputs for minimums, pieces of the sum written and read."""
    inputs, outputs = weight.inputs, weight.outputs
    cast = starts[0].kernel.__name__ == "cast_rows"
    main = main_linear(starts)
    given = dict(zip(main.kernel.arg_names, main.arguments, strict=False))
    single = isinstance(weight, PackedDense) and weight.values.element_size() == FLOAT
    size, padded = (FLOAT if single else HALF), given["padded"]
    read = FLOAT if cast else size
    least = weight.nbytes + FLOAT * outputs * (count * (1 + residual) + bias) + count * inputs * read
    tall = main.grid[2] * main.numbers["M"] if isinstance(weight, PackedGroups) else count
    beyond = tall * size * padded - (0 if cast else count * size * inputs)
    if cast:
        beyond += count * size * padded
    if given.get("sums") is not None:
        groups = len(given["scales"])
        beyond += count * size * padded + FLOAT * groups * (count + tall)
    if given["partial"] is not None:
        beyond += 2 * given["partial"].nbytes
    return Traffic(least, beyond)


def written_keys(step: StepRows, kv: Any) -> Traffic:
    """Keys and values of the rows; where they lie."""
    heads, dim = kv.kv_heads, kv.head_dim
    scales = FLOAT if kv.dtype == "int8" else 0
    a_head = dim * (FLOAT + kv.key_tensor.element_size()) + scales
    where = INT * (2 * step.count + _blocks(step.first, step.end) + 1)
    return Traffic(step.count * 2 * heads * a_head + where)


def attention(
    step: StepRows, heads: int, kv: Any, window: int, block: bool, span: int, starts: tuple[Started, ...]
) -> Traffic:
    """Queries, keys and values of the positions seen, results; beyond: spans written and read again, keys
    and values read again where rows are many."""
    form = step, window, block, span
    reads, beyond = [], 0
    for start in starts:
        if start.kernel.__name__ == "attend_span":
            given = dict(zip(start.kernel.arg_names, start.arguments, strict=False))
            rows = given["first_row"], min(given["last_row"], step.count)
            if rows[0] >= rows[1]:  # rows that fill the shape up
                continue
            reads.append(_kept_bytes(form, kv, rows))
            pairs = _pairs_of_spans(form, heads // kv.kv_heads, rows, start.numbers["M"])
            beyond += FLOAT * (kv.head_dim + 2) * (pairs * kv.kv_heads + _merged_spans(form, rows) * heads)
            beyond += INT * (2 * (rows[1] - rows[0]) + 2 + (window > 0))
    rows_bytes = 2 * FLOAT * step.count * heads * kv.head_dim
    return Traffic(max(reads) + rows_bytes, beyond + sum(reads) - max(reads))


Form = tuple[StepRows, int, bool, int]  # window or 0, whether rows see one another, positions of a span


def _seen(form: Form, row: int) -> tuple[int, int]:
    """The positions that a row sees: the first, and one behind the last."""
    step, window, block, _ = form
    position = step.first + row
    return max(position - window + 1, 0) if window else 0, step.end if block else position + 1


def _kept_bytes(form: Form, kv: Any, rows: tuple[int, int]) -> int:
    """Keys and values that these rows see, whole blocks of keys; where they lie."""
    low, end = _seen(form, rows[0])[0], _seen(form, rows[1] - 1)[1]
    blocks, size, scales = _blocks(low, end), kv.key_tensor.element_size(), 0
    keys = values = blocks * BLOCK_TOKENS
    if kv.dtype == "int8":
        scales = FLOAT
    else:
        values = end - low
    per_token = kv.kv_heads * (kv.head_dim * size + scales)
    where = rows[1] - rows[0] + blocks + 3 + (form[2] and rows[1] < form[0].count)
    return int((keys + values) * per_token + INT * where)


def _pairs_of_spans(form: Form, group: int, rows: tuple[int, int], height: int) -> int:
    """Of one kv head: (row, head) pairs times the spans their tile sees, each of which is written."""
    total = (rows[1] - rows[0]) * group
    found = 0
    for first in range(0, total, height):
        last = min(first + height, total)
        low = _seen(form, rows[0] + first // group)[0]
        end = _seen(form, rows[0] + (last - 1) // group)[1]
        found += (last - first) * ((end - 1) // form[3] - low // form[3] + 1)
    return found


def _merged_spans(form: Form, rows: tuple[int, int]) -> int:
    """Of one head: the spans that each row sees."""
    seen = (_seen(form, row) for row in range(*rows))
    return sum((end - 1) // form[3] - low // form[3] + 1 for low, end in seen)


def _blocks(first: int, end: int) -> int:
    """Blocks that positions first..end-1 lie in."""
    return (end - 1) // BLOCK_TOKENS - first // BLOCK_TOKENS + 1


def convolved(step: StepRows, channels: int) -> Traffic:
    """Rows, four taps, the three inputs before the rows, the window, and what may be replayed."""
    return Traffic(FLOAT * channels * (2 * step.count + 4 + 3 + 3 + step.drafted) + 5 * INT)


def delta(step: StepRows, shape: Any, keys: int, starts: tuple[Started, ...]) -> Traffic:
    """The state, read and written, rows, what is replayed and what may be; beyond: the last ones are read
    again to be kept. `keys`: of a row, all key heads'."""
    state = 2 * shape.heads * shape.key_dim * shape.value_dim
    kept = shape.channels - keys + 2 * shape.heads
    row = shape.channels + 2 * shape.heads + shape.heads * shape.value_dim
    floats = state + step.count * row + (step.replayed + step.drafted) * kept + 2 * shape.heads
    beyond = FLOAT * step.drafted * kept + INT * (2 + (step.drafted > 0)) if len(starts) > 1 else 0
    return Traffic(FLOAT * floats + 5 * INT, beyond)


def grouped_conv(count: int, width: int, groups: int, residual: bool, copies: int) -> Traffic:
    """Rows, two taps of each channel and of each row and group; the first row has no row before it."""
    past = count > 1
    floats = count * width * (2 + residual) + (1 + past) * width + (2 * count - 1) * groups
    return Traffic(FLOAT * floats + HALF * copies * count * width + INT * (count + 1))


def best(count: int, width: int) -> Traffic:
    """Logits and ids; beyond: the best of each piece."""
    pieces = ceil_divide(width, choose.PIECE)
    return Traffic(count * (FLOAT * width + INT), 2 * KEY * count * pieces)


def several_best(count: int, width: int, k: int) -> Traffic:
    pieces = ceil_divide(width, choose.TOP_PIECE)
    return Traffic(count * (FLOAT * width + k * (INT + FLOAT)), 2 * KEY * count * pieces * k)
