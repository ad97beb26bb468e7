// Sketch: the high bits of an int8 weight whose scales are not negative, as an int5 weight. A code is
// 8 * high + low with low in 0..7, so what the sketch leaves out can only add, and at most
// 7 * (sum of the positive inputs) to a group's dot, in units of the weight's own scale.
#pragma once

#include "weight.h"

namespace quickdraft {

constexpr int sketch_low_bits = 3;

struct Sketch {
    PackedWeight weight;  // scales are 2^sketch_low_bits times the other's, exactly
};

// Null when the weight is of another format or has a scale that is negative or too large.
std::unique_ptr<Sketch> sketch_of(Engine& engine, const PackedWeight& weight);

}  // namespace quickdraft
