// kv_write and attention over one span where keys and values are int8, with a scale per token and kv head.
// Products are of int16 pairs (madd) and sums int32, so they are exact: a stored code times a query row's
// int16 code in q.k, times an int16 code of (softmax weight x value scale) in the weighted sum. Integers have
// no NaN, so a masked position, whose weight's code is 0, drops out whatever its slot holds; its scales never
// pass the selects. Included only by kernels_*.cpp, inside their anonymous namespace, after
// activation_kernels.h and pair_lanes.h.
//
// One kv head of a block (int8_head_bytes): codes, then 16 float scales, one per slot.
//   keys    codes [D / 2][16 slots][2 dims]
//   values  codes [8 pairs of slots][D][2 slots]

constexpr float int16_levels = 32767.0f;

inline float largest_magnitude(const float* x, int count) {
    F8 largest = zero8();
    for (int i = 0; i < count; i += 8) largest = largest_magnitude8(largest, load8(x + i));
    return largest_lane_bits8(largest);
}

// codes = rint(x * (1 / s)), s = largest / 32767, which is returned; `largest` is that of all |x|. Codes need
// no clamp: s and 1 / s are each off by at most 2^-24. A magnitude too small for fp32 gives s and codes 0;
// NaN or infinity makes s so, and the codes do not matter.
inline float int16_codes(const float* x, int count, float largest, std::int16_t* codes) {
    const float scale = largest / int16_levels;
    const F8 inverse = set8(scale == 0.0f ? 0.0f : 1.0f / scale);
    for (int i = 0; i < count; i += 8) store_int16(load8(x + i) * inverse, codes + i);
    return scale;
}

inline void store_scale(void* head, int head_dim, int slot, float scale) {
    auto* scales = static_cast<std::uint8_t*>(head) + head_dim * block_tokens;
    __builtin_memcpy(scales + slot * sizeof(float), &scale, sizeof(float));
}

// int8 codes of one head of one token, as of activations: clamp(rint(x / s)), s = amax / 127.
inline float int8_codes(const float* x, int head_dim, std::int8_t* codes) {
    const float scale = largest_magnitude(x, head_dim) / 127.0f;
    for (int d = 0; d < head_dim; d += 8) {
        if (scale == 0.0f) {
            __builtin_memset(codes + d, 0, 8);
        } else {
            quantise8(load8(x + d), set8(scale), codes + d);
        }
    }
    return scale;
}

void kv_write_int8(const float* key, const float* value, int head_dim, int slot, void* keys, void* values) {
    std::int8_t codes[most_head_dim];
    store_scale(keys, head_dim, slot, int8_codes(key, head_dim, codes));
    auto* stored = static_cast<std::int8_t*>(keys);
    for (int d = 0; d < head_dim; ++d) stored[(d / 2 * block_tokens + slot) * 2 + d % 2] = codes[d];
    store_scale(values, head_dim, slot, int8_codes(value, head_dim, codes));
    stored = static_cast<std::int8_t*>(values);
    for (int d = 0; d < head_dim; ++d) stored[(slot / 2 * head_dim + d) * 2 + slot % 2] = codes[d];
}

inline const float* scales_of(const std::int8_t* head, int head_dim) {
    return reinterpret_cast<const float*>(head + head_dim * block_tokens);
}

// What the query rows of a span share: where its blocks lie, and their codes.
template <int queries>
struct Int8Span {
    const std::int8_t* keys[span_tokens / block_tokens];
    const std::int8_t* values[span_tokens / block_tokens];
    const std::int8_t* ahead[span_tokens / block_tokens];  // keys to fetch meanwhile, or the values again
    int first, hidden, blocks;  // the first block with a position that is seen, and its hidden positions
    alignas(64) std::int16_t query[queries][most_head_dim];
    float query_scale[queries];
    alignas(64) std::int16_t weights[queries][span_tokens];
    float weight_scale[queries];
};

// scores[r][16 b + lane] = f32(sum over d of query code * key code) * (query scale * key scale), the softmax
// scale being part of the query's. As one block is read, the same lines of the keys that come next and of the
// values are fetched.
template <int queries, int count>
[[gnu::noinline]] void score_int8(const Int8Span<queries>& span, int first, int head_dim, float* scores) {
    constexpr int line_bytes = 64, ahead = count < 4 ? 4 : 2 * count;
    const std::int8_t *keys[count], *next_keys[count], *values[count];
    Sums8 sum[queries][count][2];
#pragma GCC unroll 8
    for (int b = 0; b < count; ++b) {
        const int next = first + ahead + b;
        keys[b] = span.keys[first + b];
        next_keys[b] = span.keys[next < span.blocks ? next : first + b];
        values[b] = span.values[first + b];
#pragma GCC unroll 8
        for (int r = 0; r < queries; ++r) sum[r][b][0] = sum[r][b][1] = no_sums8();
    }
    for (int line = 0; line < head_dim / 4; ++line) {
#pragma GCC unroll 8
        for (int b = 0; b < count; ++b) {
            __builtin_prefetch(next_keys[b] + line * line_bytes);
            __builtin_prefetch(values[b] + line * line_bytes);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            const int pair = 2 * line + i;
#pragma GCC unroll 8
            for (int b = 0; b < count; ++b) {
                const Pairs8 low = load_pairs8(keys[b] + pair * 32);
                const Pairs8 high = load_pairs8(keys[b] + pair * 32 + 16);
#pragma GCC unroll 8
                for (int r = 0; r < queries; ++r) {
                    const Pairs8 query = set_pairs8(span.query[r] + 2 * pair);
                    add_pairs8(sum[r][b][0], low, query);
                    add_pairs8(sum[r][b][1], high, query);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int b = 0; b < count; ++b) {
        __builtin_prefetch(scales_of(next_keys[b], head_dim));
        __builtin_prefetch(scales_of(values[b], head_dim));
        const float* scales = scales_of(keys[b], head_dim);
#pragma GCC unroll 8
        for (int r = 0; r < queries; ++r) {
            float* out = scores + r * span_tokens + (first + b) * block_tokens;
            const F8 factor = set8(span.query_scale[r]);
            store8(out, as_floats(sum[r][b][0]) * (factor * load8(scales)));
            store8(out + 8, as_floats(sum[r][b][1]) * (factor * load8(scales + 8)));
        }
    }
}

// scores[0, visible) become softmax weights x value scales, and then codes; the rest of the span's blocks is
// 0. The total has 16 lanes (position % 16), lanes i and i + 8 are added, then the tree of sum8.
template <int queries>
[[gnu::noinline]] void weights_int8(Int8Span<queries>& span, int r, int visible, int head_dim, float* scores,
                                    float* maximum, float* total) {
    const F8 lowest = set8(-__builtin_inff());
    const int start = span.first * block_tokens;
    for (int i = start; i < start + span.hidden; ++i) scores[i] = -__builtin_inff();
    F8 highest_lanes = lowest;
    for (int i = start; i < visible; i += 8) {
        highest_lanes = max8(highest_lanes, select8(first_lanes8(visible - i), load8(scores + i), lowest));
    }
    const float highest = largest8(highest_lanes);
    F8 sum[2] = {zero8(), zero8()}, largest[2] = {zero8(), zero8()};
    const auto weigh = [&](int block, int half, auto keep) {
        float* mine = scores + block * block_tokens + 8 * half;
        const F8 weight = exp_below8(load8(mine) - set8(highest));
        const F8 scaled = keep(weight * load8(scales_of(span.values[block], head_dim) + 8 * half));
        sum[half] = sum[half] + keep(weight);
        largest[half] = largest_magnitude8(largest[half], scaled);
        store8(mine, scaled);
    };
    const int full = visible / block_tokens;
    int block = span.first;
    if (span.hidden > 0) {
        for (int half = 0; half < 2; ++half) {
            const Mask8 seen = first_lanes8(visible - start - 8 * half);
            const Mask8 unseen = first_lanes8(span.hidden - 8 * half);
            weigh(block, half, [&](F8 x) { return select8(unseen, zero8(), select8(seen, x, zero8())); });
        }
        ++block;
    }
    for (; block < full; ++block) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) weigh(block, half, [](F8 x) { return x; });
    }
    for (; block < span.blocks; ++block) {
        for (int half = 0; half < 2; ++half) {
            const Mask8 mask = first_lanes8(visible - block * block_tokens - 8 * half);
            weigh(block, half, [&](F8 x) { return select8(mask, x, zero8()); });
        }
    }
    *maximum = highest;
    *total = sum8(sum[0] + sum[1]);
    const float most = largest_lane_bits8(largest_magnitude8(largest[0], largest[1]));
    span.weight_scale[r] =
        int16_codes(scores + start, span.blocks * block_tokens - start, most, span.weights[r] + start);
}

// state[r][d] = f32(sum over the span's positions of weight code * value code) * weight scale, for 8 * eights
// d's. A sum of 256 products stays below 2^31: 256 * 127 * 32767.
template <int queries, int eights>
[[gnu::noinline]] void weigh_int8(const Int8Span<queries>& span, int head_dim, int d, float* const* state) {
    Sums8 sum[queries][eights];
#pragma GCC unroll 8
    for (int r = 0; r < queries; ++r) {
#pragma GCC unroll 8
        for (int n = 0; n < eights; ++n) sum[r][n] = no_sums8();
    }
    for (int b = span.first; b < span.blocks; ++b) {
        const std::int8_t *values = span.values[b] + 2 * d, *ahead = span.ahead[b] + d * block_tokens;
        for (int pair = 0; pair < block_tokens / 2; ++pair) {
            for (int line = 0; line < 16 * eights; line += 64) {
                __builtin_prefetch(ahead + pair * 16 * eights + line);
            }
            Pairs8 value[eights];
#pragma GCC unroll 8
            for (int n = 0; n < eights; ++n) value[n] = load_pairs8(values + (pair * head_dim + 8 * n) * 2);
#pragma GCC unroll 8
            for (int r = 0; r < queries; ++r) {
                const Pairs8 weight = set_pairs8(span.weights[r] + b * block_tokens + 2 * pair);
#pragma GCC unroll 8
                for (int n = 0; n < eights; ++n) add_pairs8(sum[r][n], value[n], weight);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < queries; ++r) {
        const F8 scale = set8(span.weight_scale[r]);
#pragma GCC unroll 8
        for (int n = 0; n < eights; ++n) store8(state[r] + d + 8 * n, as_floats(sum[r][n]) * scale);
    }
}

template <int queries>
inline void span_int8(const SpanArguments& a, float* scores) {
    Int8Span<queries> span;
    int longest = 0;
#pragma GCC unroll 8
    for (int r = 0; r < queries; ++r) longest = a.visible[r] > longest ? a.visible[r] : longest;
    span.first = a.hidden / block_tokens;
    span.hidden = a.hidden % block_tokens;
    span.blocks = (longest + block_tokens - 1) / block_tokens;
    const auto head_at = [&](std::int32_t block, int kv_head) {
        return (static_cast<std::size_t>(block) * a.kv_heads + kv_head) * int8_head_bytes(a.head_dim);
    };
    for (int b = 0; b < span.blocks; ++b) {
        const std::size_t at = head_at(a.blocks[b], a.kv_head);
        span.keys[b] = static_cast<const std::int8_t*>(a.keys) + at;
        span.values[b] = static_cast<const std::int8_t*>(a.values) + at;
        span.ahead[b] = b < a.next_count ? static_cast<const std::int8_t*>(a.keys) +
                                               head_at(a.next_blocks[b], a.next_kv_head)
                                         : span.values[b];
    }
    for (int r = 0; r < queries; ++r) {
        const float largest = largest_magnitude(a.query[r], a.head_dim);
        span.query_scale[r] = int16_codes(a.query[r], a.head_dim, largest, span.query[r]) * a.scale;
    }

    constexpr int together = queries == 1 ? 4 : queries <= 3 ? 2 : 1;  // as many sums as the registers hold
    int block = span.first;
    for (; block + together <= span.blocks; block += together) {
        score_int8<queries, together>(span, block, a.head_dim, scores);
    }
    for (; block < span.blocks; ++block) score_int8<queries, 1>(span, block, a.head_dim, scores);

    float unused[most_head_dim + state_extra];
    float* state[queries];
    for (int r = 0; r < queries; ++r) {
        state[r] = a.visible[r] > 0 ? a.state[r] : unused;
        float* numbers = state[r] + a.head_dim;
        weights_int8(span, r, a.visible[r], a.head_dim, scores + r * span_tokens, numbers, numbers + 1);
    }

    constexpr int eights = queries == 1 ? 8 : queries <= 3 ? 4 : 2;
    int d = 0;
    for (; d + 8 * eights <= a.head_dim; d += 8 * eights) {
        weigh_int8<queries, eights>(span, a.head_dim, d, state);
    }
    for (; d < a.head_dim; d += 8) weigh_int8<queries, 1>(span, a.head_dim, d, state);
}

void attention_span_int8(const SpanArguments& a, float* scratch) {
    switch (a.queries) {
        case 1:
            return span_int8<1>(a, scratch);
        case 2:
            return span_int8<2>(a, scratch);
        case 3:
            return span_int8<3>(a, scratch);
        case 4:
            return span_int8<4>(a, scratch);
        case 5:
            return span_int8<5>(a, scratch);
        case 6:
            return span_int8<6>(a, scratch);
#if defined(QUICKDRAFT_LANES_AVX512)
        case 7:
            return span_int8<7>(a, scratch);
        case 8:
            return span_int8<8>(a, scratch);
#endif
    }
}
