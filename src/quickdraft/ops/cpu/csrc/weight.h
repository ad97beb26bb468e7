// PackedWeight: a weight in tile layout (see PackedView), packed once, in parallel, when a model loads.
#pragma once

#include "op.h"

namespace quickdraft {

struct PackedWeight {
    PackedView view;
    AlignedBytes bytes;
};

const char* name_of(WeightFormat format);

// values [outputs, inputs] in the format's own storage type (float32, float16 or bfloat16).
std::unique_ptr<PackedWeight> pack_dense(Engine& engine, WeightFormat format, const void* values, int outputs,
                                         int inputs);
// codes int8 [outputs, inputs], fp16 scales [outputs, inputs / 32].
std::unique_ptr<PackedWeight> pack_int8(Engine& engine, const std::int8_t* codes, const std::uint16_t* scales,
                                        int outputs, int inputs);
// codes 0..15, one per byte; `minimums` may be null. A code above 15 throws std::invalid_argument.
std::unique_ptr<PackedWeight> pack_int4(Engine& engine, const std::uint8_t* codes,
                                        const std::uint16_t* scales, const std::uint16_t* minimums,
                                        int outputs, int inputs);

}  // namespace quickdraft
