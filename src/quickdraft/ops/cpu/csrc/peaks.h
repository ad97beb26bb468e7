// Loops that do arithmetic in registers and nothing else: the compute roof of a CPU, per kind of arithmetic.
#pragma once

#include <cstdint>

namespace quickdraft {

// All operands are one, so `run` returns the multiply-adds it has done: exactly
// iterations * multiply_adds, while int16 sums do not wrap (2 per iteration and lane: iterations < 16384).
struct PeakLoop {
    const char* name;          // "int8, int16 sums", ...
    const char* instructions;  // "avx2", ..., "plain C++"
    bool integer;              // int8 multiply-adds, else fp32
    int multiply_adds;         // of one iteration
    std::int64_t (*run)(std::int64_t iterations);
    bool (*supported)();
};

// Null where the build has no such object.
const PeakLoop* x86_peaks(int& count);

// Makes a value opaque to the compiler at no cost: a product of it can be neither hoisted nor merged.
#define QUICKDRAFT_OPAQUE(value, where) asm volatile("" : "+" where(value))

}  // namespace quickdraft
