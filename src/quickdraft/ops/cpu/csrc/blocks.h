// The types of tensors in model files and their blocks, as ggml's ggml-common.h lays them out.
//
// Reading changes no number: codes and steps as the block has them, halves as their 16 bits.
#pragma once

#include <string>

#include "kernels.h"

namespace quickdraft {

// The inputs of one output that share their half-precision numbers: a group, or 256 inputs with two levels.
struct Span {
    const std::uint8_t* codes;                       // a byte each: int8, or from 0 on with fewer than 8 bits
    std::uint16_t scale, minimum;                    // fp16; minimum 0 where the format has none
    const std::int8_t *scale_steps, *minimum_steps;  // of each group; not read where there is one level
};

// Where the span of a block is written out.
struct SpanStorage {
    std::uint8_t codes[256];
    std::int8_t scale_steps[16], minimum_steps[8];
};

struct BlockType {
    const char* name;
    WeightFormat format;
    int inputs, bytes;  // of a block, which is one span of the format
    // Null for dense types, whose blocks are single numbers.
    Span (*read)(const std::uint8_t* block, SpanStorage& storage);
};

const BlockType& block_type_named(const std::string& name);  // throws std::invalid_argument

}  // namespace quickdraft
