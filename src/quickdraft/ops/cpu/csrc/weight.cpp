#include "weight.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace quickdraft {

namespace {

std::size_t element_bytes(WeightFormat format) { return format == WeightFormat::float32 ? 4 : 2; }

std::unique_ptr<PackedWeight> allocate(WeightFormat format, int outputs, int inputs) {
    require(outputs >= 1 && inputs >= 1, "a weight needs at least one output and one input; got " +
                                             std::to_string(outputs) + " x " + std::to_string(inputs));
    const GroupLayout layout = layout_of(format);
    std::size_t tile_bytes = static_cast<std::size_t>(inputs) * tile_outputs * element_bytes(format);
    if (layout.inputs != 0) {
        const int multiple = layout.inputs * layout.sharing(), spans = inputs / multiple;
        require(inputs % multiple == 0, std::string(name_of(format)) + " needs a multiple of " +
                                            std::to_string(multiple) + " inputs; got " +
                                            std::to_string(inputs));
        tile_bytes =
            static_cast<std::size_t>(spans) * (layout.shared_bytes() + layout.sharing() * layout.bytes());
    }
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

// One output's codes of a group; returns their bitwise or.
unsigned put_int8(std::uint8_t* packed, int n, const std::uint8_t* codes, int inputs) {
    for (int j = 0; j < inputs / 4; ++j) std::memcpy(packed + j * 64 + n * 4, codes + 4 * j, 4);
    return 0;
}
unsigned put_int4(std::uint8_t* packed, int n, const std::uint8_t* codes, int inputs) {
    unsigned seen = 0;
    for (int j = 0; j < inputs / 8; ++j) {
        for (int b = 0; b < 4; ++b) {
            const unsigned low = codes[8 * j + b], high = codes[8 * j + 4 + b];
            seen |= low | high;
            packed[j * 64 + n * 4 + b] = static_cast<std::uint8_t>(low | high << 4);
        }
    }
    return seen;
}

// Outputs first .. first + count - 1 into one tile; returns the bitwise or of int4 codes.
unsigned pack_tile(const GroupLayout& layout, const GroupSource& source, std::uint8_t* packed, int first,
                   int count, int inputs) {
    const std::size_t groups = inputs / layout.inputs, sharing = layout.sharing(), shares = groups / sharing;
    unsigned seen = 0;
    for (std::size_t g = 0; g < groups; ++g, packed += layout.bytes()) {
        if (layout.two_level && g % sharing == 0) {
            for (int n = 0; n < count; ++n) {
                const std::size_t at = (first + n) * shares + g / sharing;
                put_half(packed + 2 * n, source.scales[at]);
                if (layout.minimum) put_half(packed + 2 * (tile_outputs + n), source.minimums[at]);
            }
            packed += layout.shared_bytes();
        }
        std::uint8_t *scales = packed + layout.scales_at(), *minimums = packed + layout.minimums_at();
        for (int n = 0; n < count; ++n) {
            const std::uint8_t* codes =
                source.codes + static_cast<std::size_t>(first + n) * inputs + g * layout.inputs;
            const std::size_t at = (first + n) * groups + g;
            seen |= (layout.bits == 4 ? put_int4 : put_int8)(packed, n, codes, layout.inputs);
            if (layout.two_level) {
                scales[n] = static_cast<std::uint8_t>(source.scale_steps[at]);
                if (layout.minimum) minimums[n] = static_cast<std::uint8_t>(source.minimum_steps[at]);
            } else {
                put_half(scales + 2 * n, source.scales[at]);
                if (layout.minimum) put_half(minimums + 2 * n, source.minimums[at]);
            }
        }
    }
    return seen;
}

constexpr struct {
    WeightFormat format;
    const char* name;
} format_names[] = {
    {WeightFormat::float32, "float32"},
    {WeightFormat::float16, "float16"},
    {WeightFormat::bfloat16, "bfloat16"},
    {WeightFormat::int8, "int8"},
    {WeightFormat::int8_minimum, "int8+minimum"},
    {WeightFormat::int8_minimum_two_level, "int8+minimum, two levels"},
    {WeightFormat::int8_two_level_sixteen, "int8, two levels, groups of 16"},
    {WeightFormat::int4, "int4"},
    {WeightFormat::int4_minimum, "int4+minimum"},
    {WeightFormat::int4_minimum_two_level, "int4+minimum, two levels"},
};

}  // namespace

const char* name_of(WeightFormat format) {
    for (const auto& known : format_names) {
        if (known.format == format) return known.name;
    }
    return "";
}

WeightFormat format_named(const std::string& name) {
    for (const auto& known : format_names) {
        if (known.name == name) return known.format;
    }
    throw std::invalid_argument("unknown weight format '" + name + "'");
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

std::unique_ptr<PackedWeight> pack_groups(Engine& engine, WeightFormat format, const GroupSource& source,
                                          int outputs, int inputs) {
    auto weight = allocate(format, outputs, inputs);
    const GroupLayout layout = layout_of(format);
    std::atomic<bool> in_range{true};
    each_tile(engine, outputs, [&](int tile) {
        std::uint8_t* packed = weight->bytes.data() + tile * weight->view.tile_bytes;
        const int first = tile * tile_outputs, count = std::min(tile_outputs, outputs - first);
        if (pack_tile(layout, source, packed, first, count, inputs) > 15) in_range.store(false);
    });
    require(in_range.load(), "int4 codes must be 0..15");
    return weight;
}

}  // namespace quickdraft
