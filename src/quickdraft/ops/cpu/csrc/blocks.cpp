#include "blocks.h"

#include <cstring>
#include <stdexcept>

namespace quickdraft {

namespace {

std::uint16_t half_at(const std::uint8_t* at) {
    std::uint16_t half;
    std::memcpy(&half, at, sizeof half);
    return half;
}

// `count` bytes: their low halves, then their high ones.
inline void split(const std::uint8_t* packed, int count, std::uint8_t* codes) {
    for (int i = 0; i < count; ++i) codes[i] = packed[i] & 15;
    for (int i = 0; i < count; ++i) codes[count + i] = packed[i] >> 4;
}

// Bit i of `bits` is the fifth bit of code i. Eight at a time: every byte gets all bits and keeps its own,
// which then moves to bit 4.
inline void add_fifth_bits(const std::uint8_t* bits, std::uint8_t* codes) {
    for (int i = 0; i < 4; ++i) {
        const std::uint64_t kept = bits[i] * 0x0101010101010101u & 0x8040201008040201u;
        std::uint64_t eight;
        std::memcpy(&eight, codes + 8 * i, 8);
        // adding 0x7F carries into bit 7 of each byte that has its bit; bit 7 itself is or-ed in
        eight |= (((kept & 0x7F7F7F7F7F7F7F7Fu) + 0x7F7F7F7F7F7F7F7Fu) | kept) >> 3 & 0x1010101010101010u;
        std::memcpy(codes + 8 * i, &eight, 8);
    }
}

template <bool minimum>
Span read_four_bits(const std::uint8_t* block, SpanStorage& storage) {
    split(block + (minimum ? 4 : 2), 16, storage.codes);
    return {storage.codes, half_at(block), minimum ? half_at(block + 2) : std::uint16_t{0}, nullptr, nullptr};
}

template <bool minimum>
Span read_five_bits(const std::uint8_t* block, SpanStorage& storage) {
    const int at = minimum ? 4 : 2;
    split(block + at + 4, 16, storage.codes);
    add_fifth_bits(block + at, storage.codes);
    return {storage.codes, half_at(block), minimum ? half_at(block + 2) : std::uint16_t{0}, nullptr, nullptr};
}

Span read_eight_bits(const std::uint8_t* block, SpanStorage&) {
    return {block + 2, half_at(block), 0, nullptr, nullptr};
}

// Q4_K and Q5_K: d, dmin, then 8 + 8 steps of 6 bits in 12 bytes. A minimum is -dmin * step.
Span k_numbers(const std::uint8_t* block, SpanStorage& storage) {
    const std::uint8_t *low = block + 4, *high = block + 8, *rest = block + 12;
    for (int i = 0; i < 4; ++i) {
        storage.scale_steps[i] = static_cast<std::int8_t>(low[i] & 63);
        storage.minimum_steps[i] = static_cast<std::int8_t>(high[i] & 63);
        storage.scale_steps[4 + i] = static_cast<std::int8_t>((rest[i] & 15) | (low[i] >> 2 & 0x30));
        storage.minimum_steps[4 + i] = static_cast<std::int8_t>((rest[i] >> 4) | (high[i] >> 2 & 0x30));
    }
    const auto minimum = static_cast<std::uint16_t>(half_at(block + 2) ^ 0x8000u);
    return {storage.codes, half_at(block), minimum, storage.scale_steps, storage.minimum_steps};
}

Span read_q4_k(const std::uint8_t* block, SpanStorage& storage) {
    for (int pair = 0; pair < 4; ++pair) split(block + 16 + 32 * pair, 32, storage.codes + 64 * pair);
    return k_numbers(block, storage);
}

Span read_q5_k(const std::uint8_t* block, SpanStorage& storage) {
    for (int pair = 0; pair < 4; ++pair) split(block + 48 + 32 * pair, 32, storage.codes + 64 * pair);
    for (int group = 0; group < 8; ++group) {  // bit g of byte i is the fifth bit of input i of group g
        std::uint8_t* codes = storage.codes + 32 * group;
        for (int i = 0; i < 32; ++i) {
            codes[i] |= static_cast<std::uint8_t>((block[16 + i] >> group & 1) << 4);
        }
    }
    return k_numbers(block, storage);
}

Span read_q6_k(const std::uint8_t* block, SpanStorage& storage) {
    for (int half = 0; half < 2; ++half) {
        std::uint8_t* codes = storage.codes + 128 * half;
        split(block + 64 * half, 64, codes);
        const std::uint8_t* high = block + 128 + 32 * half;  // two bits of a code of each quarter
        for (int quarter = 0; quarter < 4; ++quarter) {
            for (int i = 0; i < 32; ++i) {
                codes[32 * quarter + i] |= static_cast<std::uint8_t>((high[i] >> 2 * quarter & 3) << 4);
            }
        }
    }
    const auto* steps = reinterpret_cast<const std::int8_t*>(block + 192);
    return {storage.codes, half_at(block + 208), 0, steps, nullptr};
}

constexpr BlockType block_types[] = {
    {"F32", WeightFormat::float32, 1, 4, nullptr},
    {"F16", WeightFormat::float16, 1, 2, nullptr},
    {"BF16", WeightFormat::bfloat16, 1, 2, nullptr},
    {"Q4_0", WeightFormat::int4, 32, 18, read_four_bits<false>},
    {"Q4_1", WeightFormat::int4_minimum, 32, 20, read_four_bits<true>},
    {"Q5_0", WeightFormat::int5, 32, 22, read_five_bits<false>},
    {"Q5_1", WeightFormat::int5_minimum, 32, 24, read_five_bits<true>},
    {"Q8_0", WeightFormat::int8, 32, 34, read_eight_bits},
    {"Q4_K", WeightFormat::int4_minimum_two_level, 256, 144, read_q4_k},
    {"Q5_K", WeightFormat::int5_minimum_two_level, 256, 176, read_q5_k},
    {"Q6_K", WeightFormat::int6_two_level_sixteen, 256, 210, read_q6_k},
};

}  // namespace

const BlockType& block_type_named(const std::string& name) {
    for (const BlockType& known : block_types) {
        if (known.name == name) return known;
    }
    throw std::invalid_argument("unknown block type '" + name + "'");
}

}  // namespace quickdraft
