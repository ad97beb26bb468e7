// PackedWeight: a weight in tile layout (see PackedView), packed once, in parallel, when a model loads.
#pragma once

#include <algorithm>
#include <vector>

#include "blocks.h"
#include "file_rows.h"
#include "op.h"

namespace quickdraft {

struct PackedWeight {
    PackedView view;
    WeightMemory::Part memory;
    std::vector<std::int32_t> order;  // what view.order points at
};

// The tiles of a weight that are this thread's.
inline Range tiles_of(const PackedView& weight, const Worker& worker) {
    return share((weight.outputs + tile_outputs - 1) / tile_outputs, worker);
}
// Asks for the first of them: as much as half a first-level cache holds.
inline void fetch_tiles(const PackedView& weight, const Worker& worker) {
    constexpr std::size_t most = 16384;
    const Range tiles = tiles_of(weight, worker);
    const std::uint8_t* from = weight.data + tiles.first * weight.tile_bytes;
    const std::size_t size = std::min((tiles.last - tiles.first) * weight.tile_bytes, most);
    for (std::size_t at = 0; at < size; at += 64) __builtin_prefetch(from + at);
}

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
