#include "weight.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace quickdraft {

namespace {

std::size_t group_bytes(WeightFormat format) {
    switch (format) {
        case WeightFormat::int8:
            return 512 + 32;
        case WeightFormat::int4:
            return 256 + 32;
        case WeightFormat::int4_minimum:
            return 256 + 64;
        default:
            return 0;
    }
}

std::size_t element_bytes(WeightFormat format) { return format == WeightFormat::float32 ? 4 : 2; }

bool quantised(WeightFormat format) { return group_bytes(format) != 0; }

std::unique_ptr<PackedWeight> allocate(WeightFormat format, int outputs, int inputs) {
    require(outputs >= 1 && inputs >= 1, "a weight needs at least one output and one input; got " +
                                             std::to_string(outputs) + " x " + std::to_string(inputs));
    require(!quantised(format) || inputs % group_inputs == 0,
            "a quantised weight needs a multiple of 32 inputs; got " + std::to_string(inputs));
    const std::size_t tile_bytes =
        quantised(format) ? inputs / group_inputs * group_bytes(format)
                          : static_cast<std::size_t>(inputs) * tile_outputs * element_bytes(format);
    const std::size_t tiles = round_up(outputs, tile_outputs) / tile_outputs;
    auto weight = std::make_unique<PackedWeight>();
    weight->bytes = AlignedBytes(tiles * tile_bytes);
    weight->view = {format, outputs, inputs, tile_bytes, weight->bytes.data()};
    return weight;
}

// Calls pack(tile) for every tile, tiles shared between the threads.
template <class Pack>
void each_tile(Engine& engine, int outputs, const Pack& pack) {
    struct Job {
        const Pack& pack;
        int tiles;
    } job{pack, (outputs + tile_outputs - 1) / tile_outputs};
    engine.pool().run(
        [](void* argument, Worker& worker) {
            const Job& job = *static_cast<Job*>(argument);
            const Range mine = share(job.tiles, worker);
            for (int tile = mine.first; tile < mine.last; ++tile) job.pack(tile);
        },
        &job);
}

template <class Element>
void pack_dense_as(Engine& engine, PackedWeight& weight, const Element* values) {
    const int outputs = weight.view.outputs, inputs = weight.view.inputs;
    each_tile(engine, outputs, [&](int tile) {
        auto* packed = reinterpret_cast<Element*>(weight.bytes.data() + tile * weight.view.tile_bytes);
        const int first = tile * tile_outputs, count = std::min(tile_outputs, outputs - first);
        for (int n = 0; n < count; ++n) {
            const Element* row = values + static_cast<std::size_t>(first + n) * inputs;
            for (int i = 0; i < inputs; ++i) packed[i * tile_outputs + n] = row[i];
        }
    });
}

void put_half(std::uint8_t* at, std::uint16_t half) { std::memcpy(at, &half, sizeof half); }

}  // namespace

const char* name_of(WeightFormat format) {
    switch (format) {
        case WeightFormat::float32:
            return "float32";
        case WeightFormat::float16:
            return "float16";
        case WeightFormat::bfloat16:
            return "bfloat16";
        case WeightFormat::int8:
            return "int8";
        case WeightFormat::int4:
            return "int4";
        case WeightFormat::int4_minimum:
            return "int4+minimum";
    }
    return "";
}

std::unique_ptr<PackedWeight> pack_dense(Engine& engine, WeightFormat format, const void* values, int outputs,
                                         int inputs) {
    auto weight = allocate(format, outputs, inputs);
    if (format == WeightFormat::float32) {
        pack_dense_as(engine, *weight, static_cast<const float*>(values));
    } else {
        pack_dense_as(engine, *weight, static_cast<const std::uint16_t*>(values));
    }
    return weight;
}

std::unique_ptr<PackedWeight> pack_int8(Engine& engine, const std::int8_t* codes, const std::uint16_t* scales,
                                        int outputs, int inputs) {
    auto weight = allocate(WeightFormat::int8, outputs, inputs);
    const std::size_t groups = inputs / group_inputs, step = group_bytes(WeightFormat::int8);
    each_tile(engine, outputs, [&](int tile) {
        std::uint8_t* packed = weight->bytes.data() + tile * weight->view.tile_bytes;
        const int first = tile * tile_outputs, count = std::min(tile_outputs, outputs - first);
        for (std::size_t g = 0; g < groups; ++g, packed += step) {
            for (int n = 0; n < count; ++n) {
                const std::int8_t* source =
                    codes + static_cast<std::size_t>(first + n) * inputs + g * group_inputs;
                for (int j = 0; j < 8; ++j) std::memcpy(packed + j * 64 + n * 4, source + 4 * j, 4);
                put_half(packed + 512 + 2 * n, scales[(first + n) * groups + g]);
            }
        }
    });
    return weight;
}

std::unique_ptr<PackedWeight> pack_int4(Engine& engine, const std::uint8_t* codes,
                                        const std::uint16_t* scales, const std::uint16_t* minimums,
                                        int outputs, int inputs) {
    const auto format = minimums != nullptr ? WeightFormat::int4_minimum : WeightFormat::int4;
    auto weight = allocate(format, outputs, inputs);
    const std::size_t groups = inputs / group_inputs, step = group_bytes(format);
    std::atomic<bool> in_range{true};
    each_tile(engine, outputs, [&](int tile) {
        std::uint8_t* packed = weight->bytes.data() + tile * weight->view.tile_bytes;
        const int first = tile * tile_outputs, count = std::min(tile_outputs, outputs - first);
        unsigned seen = 0;
        for (std::size_t g = 0; g < groups; ++g, packed += step) {
            for (int n = 0; n < count; ++n) {
                const std::uint8_t* source =
                    codes + static_cast<std::size_t>(first + n) * inputs + g * group_inputs;
                for (int j = 0; j < 4; ++j) {
                    for (int b = 0; b < 4; ++b) {
                        const unsigned low = source[8 * j + b], high = source[8 * j + 4 + b];
                        seen |= low | high;
                        packed[j * 64 + n * 4 + b] = static_cast<std::uint8_t>(low | high << 4);
                    }
                }
                put_half(packed + 256 + 2 * n, scales[(first + n) * groups + g]);
                if (minimums != nullptr) put_half(packed + 288 + 2 * n, minimums[(first + n) * groups + g]);
            }
        }
        if (seen > 15) in_range.store(false);
    });
    require(in_range.load(), "int4 codes must be 0..15");
    return weight;
}

}  // namespace quickdraft
