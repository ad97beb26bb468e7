// PackedWeight: a weight in tile layout (see PackedView), packed once, in parallel, when a model loads.
#pragma once

#include <vector>

#include "blocks.h"
#include "file_rows.h"
#include "op.h"

namespace quickdraft {

struct PackedWeight {
    PackedView view;
    AlignedBytes bytes;
    std::vector<std::int32_t> order;  // what view.order points at
};

const char* name_of(WeightFormat format);
WeightFormat format_named(const std::string& name);  // throws std::invalid_argument

// values [outputs, inputs] in the format's own storage type (float32, float16 or bfloat16).
std::unique_ptr<PackedWeight> pack_dense(Engine& engine, WeightFormat format, const void* values, int outputs,
                                         int inputs);
// What fills the groups of a quantised weight: codes a byte each, [outputs, inputs]: int8, or from 0 on
// where they have fewer than 8 bits. Formats with one level
// have 16-bit numbers [outputs, inputs / group / repeat] and no steps; those with two have steps of that
// shape, and fp16 numbers [outputs, inputs / 256], and repeat is 1. With zero points, -zero lies where the
// minimums would: 4 bits as steps, 8 bits as fp16.
struct GroupSource {
    const std::uint8_t* codes;
    const std::uint16_t *scales, *minimums;  // minimums: null where the format has none
    const std::int8_t *scale_steps, *minimum_steps;
    int repeat = 1;                       // neighbouring groups that have the same numbers
    const std::int32_t* order = nullptr;  // see PackedView; a permutation, or null
    // Two codes of 4 bits a byte, [outputs, inputs / 2], the first input in the low half; one level only.
    bool paired = false;
};
// A code that does not fit the format's bits, and an order that is no permutation, throw
// std::invalid_argument.
std::unique_ptr<PackedWeight> pack_groups(Engine& engine, WeightFormat format, const GroupSource& source,
                                          int outputs, int inputs);
// Straight from files, inputs / type.inputs blocks a row; null when rows cannot be read or a number is not
// finite.
std::unique_ptr<PackedWeight> pack_blocks(Engine& engine, const BlockType& type,
                                          const std::vector<FilePart>& parts, int inputs);

}  // namespace quickdraft
