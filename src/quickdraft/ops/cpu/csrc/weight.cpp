#include "weight.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace quickdraft {

namespace {

std::size_t element_bytes(WeightFormat format) { return format == WeightFormat::float32 ? 4 : 2; }

std::unique_ptr<PackedWeight> allocate(Engine& engine, WeightFormat format, int outputs, int inputs) {
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
    weight->memory = engine.weights().take(tiles * tile_bytes);
    weight->view = {format, outputs, inputs, tile_bytes, weight->memory.data};
    return weight;
}

void set_order(PackedWeight& weight, const std::int32_t* order) {
    if (order == nullptr) return;
    const int inputs = weight.view.inputs;
    std::vector<bool> seen(inputs);
    for (int i = 0; i < inputs; ++i) {
        require(order[i] >= 0 && order[i] < inputs && !seen[order[i]],
                "the order of the inputs is no permutation at " + std::to_string(i));
        seen[order[i]] = true;
    }
    weight.order.assign(order, order + inputs);
    weight.view.order = weight.order.data();
}

// Calls pack(first output, outputs, tile, thread) -> bool for every tile, tiles shared between the threads;
// whether all of them returned true.
template <class Pack>
bool each_tile(Engine& engine, PackedWeight& weight, const Pack& pack) {
    struct Job {
        const Pack& pack;
        PackedWeight& weight;
        std::atomic<bool> fine{true};
    } job{pack, weight};
    engine.pool().run(
        [](void* argument, Worker& worker) {
            Job& job = *static_cast<Job*>(argument);
            const PackedView& view = job.weight.view;
            const Range mine = share((view.outputs + tile_outputs - 1) / tile_outputs, worker);
            bool fine = true;
            for (int tile = mine.first; tile < mine.last; ++tile) {
                const int first = tile * tile_outputs, count = std::min(tile_outputs, view.outputs - first);
                std::uint8_t* packed = job.weight.memory.data + tile * view.tile_bytes;
                if (count < tile_outputs) std::memset(packed, 0, view.tile_bytes);
                fine &= job.pack(first, count, packed, worker.thread());
            }
            if (!fine) job.fine = false;
        },
        &job);
    return job.fine;
}

// Whether no number of a span or a row is infinite or NaN: not all bits of its exponent are set.
template <class Element>
bool finite(Element bits, Element exponent) {
    return (bits & exponent) != exponent;
}
constexpr std::uint16_t half_exponent = 0x7C00;
bool finite(const Span& span) {
    return finite(span.scale, half_exponent) && finite(span.minimum, half_exponent);
}

// `width` inputs of one output into their places, `tile_outputs` apart; whether all are finite.
template <class Element>
inline bool put_dense(const std::uint8_t* row, Element* packed, int width, Element exponent) {
    Element broken = 0;  // as wide as an element, for the compiler to take many at once
    for (int i = 0; i < width; ++i) {
        Element bits;
        std::memcpy(&bits, row + i * sizeof bits, sizeof bits);
        broken |= static_cast<Element>(!finite(bits, exponent));
    }
    for (int i = 0; i < width; ++i) {
        std::memcpy(packed + i * tile_outputs, row + i * sizeof(Element), sizeof(Element));
    }
    return broken == 0;
}

// open(first, count, thread) gives these rows, one after the other, or null when they cannot be had.
template <class Element, class Open>
bool pack_dense_as(Engine& engine, PackedWeight& weight, const Open& open, Element exponent) {
    constexpr int step = 256 / sizeof(Element);  // inputs at a time, a number the compiler knows
    const int inputs = weight.view.inputs, whole = inputs / step * step;
    return each_tile(engine, weight, [&](int first, int count, std::uint8_t* tile, int thread) {
        const std::uint8_t* rows = open(first, count, thread);
        if (rows == nullptr) return false;
        const auto at = [&](int n, int i) {
            return rows + (static_cast<std::size_t>(n) * inputs + i) * sizeof(Element);
        };
        auto* packed = reinterpret_cast<Element*>(tile);
        bool fine = true;
        for (int i = 0; i < whole; i += step) {
            for (int n = 0; n < count; ++n) {
                fine &= put_dense<Element>(at(n, i), packed + i * tile_outputs + n, step, exponent);
            }
        }
        for (int n = 0; n < count; ++n) {
            Element* last = packed + whole * tile_outputs + n;
            fine &= put_dense<Element>(at(n, whole), last, inputs - whole, exponent);
        }
        return fine;
    });
}

template <class Open>
bool pack_dense_rows(Engine& engine, PackedWeight& weight, const Open& open) {
    switch (weight.view.format) {
        case WeightFormat::float32:
            return pack_dense_as<std::uint32_t>(engine, weight, open, 0x7F800000u);
        case WeightFormat::float16:
            return pack_dense_as<std::uint16_t>(engine, weight, open, half_exponent);
        default:
            return pack_dense_as<std::uint16_t>(engine, weight, open, 0x7F80);
    }
}

void put_half(std::uint8_t* at, std::uint16_t half) { std::memcpy(at, &half, sizeof half); }

// One output's codes of a group, four inputs at a time: a byte of a word is an input.
template <WeightFormat format>
void put_codes(std::uint8_t* packed, int n, const std::uint8_t* codes) {
    constexpr GroupLayout layout = layout_of(format);
    packed += 4 * n;
    if constexpr (layout.bits == 8) {
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
        if constexpr (layout.bits > 4) {
            for (int i = 0; i < 2; ++i) high |= (pair[i] >> 4 & low_half) << (2 * j + i) * layout.high_bits();
        }
    }
    if constexpr (layout.bits > 4) std::memcpy(packed + layout.high_at(), &high, 4);
}

// One output's groups of a span; the fp16 numbers that groups share lie at `shared`.
template <WeightFormat format>
void put_span(const Span& span, std::uint8_t* shared, std::uint8_t* groups, int n) {
    constexpr GroupLayout layout = layout_of(format);
    if constexpr (layout.two_level) {
        put_half(shared + 2 * n, span.scale);
        if constexpr (layout.minimum) put_half(shared + 2 * (tile_outputs + n), span.minimum);
    }
    for (int g = 0; g < layout.sharing(); ++g) {
        std::uint8_t* group = groups + g * layout.bytes();
        put_codes<format>(group, n, span.codes + g * layout.inputs);
        std::uint8_t *scales = group + layout.scales_at(), *minimums = group + layout.minimums_at();
        if constexpr (layout.two_level) {
            scales[n] = static_cast<std::uint8_t>(span.scale_steps[g]);
            if constexpr (layout.minimum) minimums[n] = static_cast<std::uint8_t>(span.minimum_steps[g]);
        } else {
            put_half(scales + 2 * n, span.scale);
            if constexpr (layout.minimums_bytes() == tile_outputs) {
                minimums[n] = static_cast<std::uint8_t>(*span.minimum_steps);
            } else if constexpr (layout.minimum) {
                put_half(minimums + 2 * n, span.minimum);
            }
        }
    }
}

// open is that of pack_dense_as; read(what it gave, first, n, i, storage) gives the i-th span of output
// first + n. Whether all rows were there and all numbers are finite.
template <WeightFormat format, class Open, class Read>
bool pack_tiles_as(Engine& engine, PackedWeight& weight, const Open& open, const Read& read) {
    constexpr GroupLayout layout = layout_of(format);
    const int spans = weight.view.inputs / (layout.inputs * layout.sharing());
    return each_tile(engine, weight, [&](int first, int count, std::uint8_t* packed, int thread) {
        const std::uint8_t* rows = open(first, count, thread);
        if (rows == nullptr) return false;
        SpanStorage storage;
        bool fine = true;
        for (int i = 0; i < spans; ++i) {
            std::uint8_t* groups = packed + layout.shared_bytes();
            for (int n = 0; n < count; ++n) {
                const Span span = read(rows, first, n, i, storage);
                fine &= finite(span);
                put_span<format>(span, packed, groups, n);
            }
            packed = groups + layout.sharing() * layout.bytes();
        }
        return fine;
    });
}

template <class Open, class Read>
bool pack_tiles(Engine& engine, PackedWeight& weight, const Open& open, const Read& read) {
    switch (weight.view.format) {
        case WeightFormat::int8:
            return pack_tiles_as<WeightFormat::int8>(engine, weight, open, read);
        case WeightFormat::int8_zero:
            return pack_tiles_as<WeightFormat::int8_zero>(engine, weight, open, read);
        case WeightFormat::int8_zero_bfloat16:
            return pack_tiles_as<WeightFormat::int8_zero_bfloat16>(engine, weight, open, read);
        case WeightFormat::int4_zero:
            return pack_tiles_as<WeightFormat::int4_zero>(engine, weight, open, read);
        case WeightFormat::int4_zero_bfloat16:
            return pack_tiles_as<WeightFormat::int4_zero_bfloat16>(engine, weight, open, read);
        case WeightFormat::int4:
            return pack_tiles_as<WeightFormat::int4>(engine, weight, open, read);
        case WeightFormat::int4_minimum:
            return pack_tiles_as<WeightFormat::int4_minimum>(engine, weight, open, read);
        case WeightFormat::int4_minimum_two_level:
            return pack_tiles_as<WeightFormat::int4_minimum_two_level>(engine, weight, open, read);
        case WeightFormat::int5:
            return pack_tiles_as<WeightFormat::int5>(engine, weight, open, read);
        case WeightFormat::int5_minimum:
            return pack_tiles_as<WeightFormat::int5_minimum>(engine, weight, open, read);
        case WeightFormat::int5_minimum_two_level:
            return pack_tiles_as<WeightFormat::int5_minimum_two_level>(engine, weight, open, read);
        case WeightFormat::int6_two_level_sixteen:
            return pack_tiles_as<WeightFormat::int6_two_level_sixteen>(engine, weight, open, read);
        default:
            throw std::logic_error("a dense format has no groups");
    }
}

}  // namespace

std::unique_ptr<PackedWeight> pack_dense(Engine& engine, WeightFormat format, const void* values, int outputs,
                                         int inputs) {
    auto weight = allocate(engine, format, outputs, inputs);
    const auto* bytes = static_cast<const std::uint8_t*>(values);
    const std::size_t row_bytes = inputs * element_bytes(format);
    pack_dense_rows(engine, *weight, [&](int first, int, int) { return bytes + first * row_bytes; });
    return weight;
}

std::unique_ptr<PackedWeight> pack_groups(Engine& engine, WeightFormat format, const GroupSource& source,
                                          int outputs, int inputs) {
    auto weight = allocate(engine, format, outputs, inputs);
    const GroupLayout layout = layout_of(format);
    if (layout.bits < 8 && !source.paired) {
        const std::size_t count = static_cast<std::size_t>(outputs) * inputs;
        const int largest = (1 << layout.bits) - 1;
        require(*std::max_element(source.codes, source.codes + count) <= largest,
                std::string(name_of(format)) + " codes must be 0.." + std::to_string(largest));
    }
    set_order(*weight, source.order);
    const std::size_t width = inputs, groups = width / layout.inputs, spans = groups / layout.sharing();
    const std::size_t stored = spans / source.repeat;
    const auto open = [&](int, int, int) { return source.codes; };
    const auto read = [&](const std::uint8_t* codes, int first, int n, int i, SpanStorage& storage) -> Span {
        const std::size_t output = first + n, span = output * stored + i / source.repeat;
        const std::size_t group = layout.two_level ? output * groups + i * layout.sharing() : span;
        const std::size_t at =
            output * width + static_cast<std::size_t>(i) * layout.inputs * layout.sharing();
        if (source.paired) {
            for (int pair = 0; pair < layout.inputs / 2; ++pair) {
                storage.codes[2 * pair] = codes[at / 2 + pair] & 15;
                storage.codes[2 * pair + 1] = codes[at / 2 + pair] >> 4;
            }
        }
        return {source.paired ? storage.codes : codes + at, source.scales[span],
                source.minimums == nullptr ? std::uint16_t{0} : source.minimums[span],
                source.scale_steps == nullptr ? nullptr : source.scale_steps + group,
                source.minimum_steps == nullptr ? nullptr : source.minimum_steps + group};
    };
    pack_tiles(engine, *weight, open, read);
    return weight;
}

std::unique_ptr<PackedWeight> pack_blocks(Engine& engine, const BlockType& type,
                                          const std::vector<FilePart>& parts, int inputs) {
    int outputs = 0;
    for (const FilePart& part : parts) outputs += part.rows;
    auto weight = allocate(engine, type.format, outputs, inputs);
    const std::size_t row_bytes = static_cast<std::size_t>(inputs / type.inputs) * type.bytes;
    FileRows rows(parts, row_bytes, engine.pool().threads());
    const auto open = [&](int first, int count, int thread) { return rows.read(first, count, thread); };
    if (type.read == nullptr) return pack_dense_rows(engine, *weight, open) ? std::move(weight) : nullptr;
    const auto read = [&](const std::uint8_t* tile, int, int n, int i, SpanStorage& storage) {
        return type.read(tile + n * row_bytes + static_cast<std::size_t>(i) * type.bytes, storage);
    };
    return pack_tiles(engine, *weight, open, read) ? std::move(weight) : nullptr;
}

}  // namespace quickdraft
