#include "sketch.h"

#include <atomic>
#include <cstring>

namespace quickdraft {

namespace {

constexpr GroupLayout from = layout_of(WeightFormat::int8), to = layout_of(WeightFormat::int5);
constexpr std::uint16_t half_infinity = 0x7C00;

std::uint32_t word_at(const std::uint8_t* at) {
    std::uint32_t word;
    std::memcpy(&word, at, sizeof word);
    return word;
}

// The high bits of four codes, from 0 on: (code + 128) / 8.
std::uint32_t high_bits(std::uint32_t codes) {
    return (codes ^ 0x80808080u) >> sketch_low_bits & 0x1F1F1F1Fu;
}

// A half, not negative, times 2^sketch_low_bits; at least half_infinity when that is no number. A subnormal's
// bits shift into the exponent.
std::uint16_t scaled(std::uint16_t half) {
    for (int i = 0; i < sketch_low_bits && half < half_infinity; ++i) half += half < 0x400 ? half : 0x400;
    return half;
}

// One group of a tile; whether all its scales can be sketched.
bool sketch_group(const std::uint8_t* group, std::uint8_t* packed) {
    for (int n = 0; n < tile_outputs; ++n) {
        std::uint32_t fifth = 0;
        for (int j = 0; j < from.inputs / 8; ++j) {
            const std::uint8_t* codes = group + 128 * j + 4 * n;
            const std::uint32_t first = high_bits(word_at(codes)), second = high_bits(word_at(codes + 64));
            const std::uint32_t low = (first & 0x0F0F0F0Fu) | (second & 0x0F0F0F0Fu) << 4;
            std::memcpy(packed + 64 * j + 4 * n, &low, sizeof low);
            fifth |= (first >> 4 & 0x01010101u) << 2 * j | (second >> 4 & 0x01010101u) << (2 * j + 1);
        }
        std::memcpy(packed + to.high_at() + 4 * n, &fifth, sizeof fifth);
        std::uint16_t half;
        std::memcpy(&half, group + from.scales_at() + 2 * n, sizeof half);
        const std::uint16_t larger = scaled(half);  // a negative one is above half_infinity already
        if (larger >= half_infinity) return false;
        std::memcpy(packed + to.scales_at() + 2 * n, &larger, sizeof larger);
    }
    return true;
}

}  // namespace

std::unique_ptr<Sketch> sketch_of(Engine& engine, const PackedWeight& weight) {
    const PackedView& head = weight.view;
    if (head.format != WeightFormat::int8) return nullptr;
    const int groups = head.inputs / from.inputs, tiles = (head.outputs + tile_outputs - 1) / tile_outputs;
    const std::size_t tile_bytes = static_cast<std::size_t>(groups) * to.bytes();
    auto sketch = std::make_unique<Sketch>();
    sketch->weight.memory = engine.weights().take(tiles * tile_bytes);
    std::uint8_t* packed = sketch->weight.memory.data;
    sketch->weight.view = {WeightFormat::int5, head.outputs, head.inputs, tile_bytes, packed};
    struct Job {
        const PackedView& head;
        std::uint8_t* packed;
        int groups, tiles;
        std::atomic<bool> fine{true};
    } job{head, packed, groups, tiles};
    engine.pool().run(
        [](void* argument, Worker& worker) {
            Job& job = *static_cast<Job*>(argument);
            const Range mine = share(job.tiles, worker);
            bool fine = true;
            for (int tile = mine.first; tile < mine.last; ++tile) {
                const std::uint8_t* group = job.head.data + tile * job.head.tile_bytes;
                std::uint8_t* packed = job.packed + static_cast<std::size_t>(tile) * job.groups * to.bytes();
                for (int g = 0; g < job.groups; ++g) {
                    fine &= sketch_group(group + g * from.bytes(), packed + g * to.bytes());
                }
            }
            if (!fine) job.fine = false;
        },
        &job);
    return job.fine ? std::move(sketch) : nullptr;
}

}  // namespace quickdraft
