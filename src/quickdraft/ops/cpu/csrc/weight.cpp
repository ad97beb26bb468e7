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
    weight->bytes = AlignedBytes::unwritten(tiles * tile_bytes);
    weight->view = {format, outputs, inputs, tile_bytes, weight->bytes.data()};
    return weight;
}

// Calls pack(first output, outputs, tile) for every tile, tiles shared between the threads.
template <class Pack>
void each_tile(Engine& engine, PackedWeight& weight, const Pack& pack) {
    struct Job {
        const Pack& pack;
        PackedWeight& weight;
    } job{pack, weight};
    engine.pool().run(
        [](void* argument, Worker& worker) {
            const Job& job = *static_cast<Job*>(argument);
            const PackedView& view = job.weight.view;
            const Range mine = share((view.outputs + tile_outputs - 1) / tile_outputs, worker);
            for (int tile = mine.first; tile < mine.last; ++tile) {
                const int first = tile * tile_outputs, count = std::min(tile_outputs, view.outputs - first);
                std::uint8_t* packed = job.weight.bytes.data() + tile * view.tile_bytes;
                if (count < tile_outputs) std::memset(packed, 0, view.tile_bytes);
                job.pack(first, count, packed);
            }
        },
        &job);
}

template <class Element>
void pack_dense_as(Engine& engine, PackedWeight& weight, const Element* values) {
    const int inputs = weight.view.inputs;
    each_tile(engine, weight, [&](int first, int count, std::uint8_t* bytes) {
        auto* packed = reinterpret_cast<Element*>(bytes);
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

// `count` outputs into one tile; read(n, i, storage) gives the i-th span of output n.
template <class Read>
void pack_tile(const GroupLayout& layout, const Read& read, std::uint8_t* packed, int count, int spans) {
    SpanStorage storage;
    const int bytes = layout.bytes(), sharing = layout.sharing();
    for (int i = 0; i < spans; ++i) {
        std::uint8_t* groups = packed + layout.shared_bytes();
        for (int n = 0; n < count; ++n) {
            const Span span = read(n, i, storage);
            if (layout.two_level) {
                put_half(packed + 2 * n, span.scale);
                if (layout.minimum) put_half(packed + 2 * (tile_outputs + n), span.minimum);
            }
            for (int g = 0; g < sharing; ++g) {
                std::uint8_t* group = groups + g * bytes;
                put_codes(layout, group, n, span.codes + g * layout.inputs);
                std::uint8_t *scales = group + layout.scales_at(), *minimums = group + layout.minimums_at();
                if (layout.two_level) {
                    scales[n] = static_cast<std::uint8_t>(span.scale_steps[g]);
                    if (layout.minimum) minimums[n] = static_cast<std::uint8_t>(span.minimum_steps[g]);
                } else {
                    put_half(scales + 2 * n, span.scale);
                    if (layout.minimum) put_half(minimums + 2 * n, span.minimum);
                }
            }
        }
        packed = groups + sharing * bytes;
    }
}

// All tiles; read(output, i, storage) gives the i-th span of an output.
template <class Read>
void pack_tiles(Engine& engine, PackedWeight& weight, const Read& read) {
    const GroupLayout layout = layout_of(weight.view.format);
    const int outputs = weight.view.outputs, spans = weight.view.inputs / (layout.inputs * layout.sharing());
    each_tile(engine, weight, [&](int first, int count, std::uint8_t* packed) {
        pack_tile(
            layout, [&](int n, int i, SpanStorage& storage) { return read(first + n, i, storage); }, packed,
            count, spans);
    });
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
    const std::size_t width = inputs, groups = width / layout.inputs, spans = groups / layout.sharing();
    pack_tiles(engine, *weight, [&](int output, int i, SpanStorage&) -> Span {
        const std::size_t n = output, span = n * spans + i, group = n * groups + i * layout.sharing();
        return {source.codes + n * width + static_cast<std::size_t>(i) * layout.inputs * layout.sharing(),
                source.scales[span], source.minimums == nullptr ? std::uint16_t{0} : source.minimums[span],
                source.scale_steps == nullptr ? nullptr : source.scale_steps + group,
                source.minimum_steps == nullptr ? nullptr : source.minimum_steps + group};
    });
    return weight;
}

std::unique_ptr<PackedWeight> pack_blocks(Engine& engine, const BlockType& type,
                                          const std::vector<const std::uint8_t*>& rows, int inputs) {
    auto weight = allocate(type.format, static_cast<int>(rows.size()), inputs);
    pack_tiles(engine, *weight, [&](int output, int i, SpanStorage& storage) {
        return type.read(rows[output] + static_cast<std::size_t>(i) * type.bytes, storage);
    });
    return weight;
}

}  // namespace quickdraft
