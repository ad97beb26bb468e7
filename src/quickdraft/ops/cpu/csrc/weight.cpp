#include "weight.h"

#include <algorithm>
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

// One output's codes of a group, four inputs at a time: a byte of a word is an input.
void put_codes(const GroupLayout& layout, std::uint8_t* packed, int n, const std::uint8_t* codes) {
    packed += 4 * n;
    if (layout.bits == 8) {
        for (int j = 0; j < layout.inputs / 4; ++j) std::memcpy(packed + j * 64, codes + 4 * j, 4);
        return;
    }
    constexpr std::uint32_t low_half = 0x0F0F0F0Fu;
    std::uint32_t high = 0;
    for (int j = 0; j < layout.inputs / 8; ++j) {
        std::uint32_t pair[2];
        std::memcpy(pair, codes + 8 * j, 8);
        const std::uint32_t low = (pair[0] & low_half) | (pair[1] & low_half) << 4;
        std::memcpy(packed + j * 64, &low, 4);
        for (int i = 0; i < 2; ++i) high |= (pair[i] >> 4 & low_half) << (2 * j + i) * layout.high_bits();
    }
    if (layout.bits > 4) std::memcpy(packed + layout.high_at(), &high, 4);
}

// Outputs first .. first + count - 1 into one tile.
void pack_tile(const GroupLayout& layout, const GroupSource& source, std::uint8_t* packed, int first,
               int count, int inputs) {
    const std::size_t groups = inputs / layout.inputs, sharing = layout.sharing(), shares = groups / sharing;
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
            put_codes(layout, packed, n, codes);
            if (layout.two_level) {
                scales[n] = static_cast<std::uint8_t>(source.scale_steps[at]);
                if (layout.minimum) minimums[n] = static_cast<std::uint8_t>(source.minimum_steps[at]);
            } else {
                put_half(scales + 2 * n, source.scales[at]);
                if (layout.minimum) put_half(minimums + 2 * n, source.minimums[at]);
            }
        }
    }
}

constexpr struct {
    WeightFormat format;
    const char* name;
} format_names[] = {
    {WeightFormat::float32, "float32"},
    {WeightFormat::float16, "float16"},
    {WeightFormat::bfloat16, "bfloat16"},
    {WeightFormat::int8, "int8"},
    {WeightFormat::int4, "int4"},
    {WeightFormat::int4_minimum, "int4+minimum"},
    {WeightFormat::int4_minimum_two_level, "int4+minimum, two levels"},
    {WeightFormat::int5, "int5"},
    {WeightFormat::int5_minimum, "int5+minimum"},
    {WeightFormat::int5_minimum_two_level, "int5+minimum, two levels"},
    {WeightFormat::int6_two_level_sixteen, "int6, two levels, groups of 16"},
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
    if (layout.bits < 8) {
        const std::size_t count = static_cast<std::size_t>(outputs) * inputs;
        const int largest = (1 << layout.bits) - 1;
        require(*std::max_element(source.codes, source.codes + count) <= largest,
                std::string(name_of(format)) + " codes must be 0.." + std::to_string(largest));
    }
    each_tile(engine, outputs, [&](int tile) {
        std::uint8_t* packed = weight->bytes.data() + tile * weight->view.tile_bytes;
        const int first = tile * tile_outputs, count = std::min(tile_outputs, outputs - first);
        pack_tile(layout, source, packed, first, count, inputs);
    });
    return weight;
}

}  // namespace quickdraft
