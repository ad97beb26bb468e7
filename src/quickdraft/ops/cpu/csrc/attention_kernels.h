// kv_write and attention over one span. Keys [D, 16] make positions the lanes of q.k (one fma chain over d
// per position, no horizontal sums); values [16, D] make d the lanes of the weighted sum (positions
// ascending). A block is loaded and widened once for up to 6 query rows (8 with AVX-512). Slots past a row's
// own position may hold anything, NaN included: they are selected away before the softmax and never reach the
// weighted sum. Included only by kernels_*.cpp, inside their anonymous namespace.

template <class Type>
inline void kv_write_as(const float* key, const float* value, int head_dim, typename Type::Storage* keys,
                        typename Type::Storage* values) {
    for (int d = 0; d < head_dim; ++d) keys[d * block_tokens] = Type::narrow(key[d]);
    for (int d = 0; d < head_dim; ++d) values[d] = Type::narrow(value[d]);
}

void kv_write(KVType type, const float* key, const float* value, int head_dim, void* keys, void* values) {
    auto* k16 = static_cast<std::uint16_t*>(keys);
    auto* v16 = static_cast<std::uint16_t*>(values);
    switch (type) {
        case KVType::float32:
            return kv_write_as<Float32>(key, value, head_dim, static_cast<float*>(keys),
                                        static_cast<float*>(values));
        case KVType::float16:
            return kv_write_as<Float16>(key, value, head_dim, k16, v16);
        case KVType::bfloat16:
            return kv_write_as<BFloat16>(key, value, head_dim, k16, v16);
    }
}

// scores[r][16 b + lane] = scale * sum_d query[r][d] * keys[b][d, lane].
// Blocks lie anywhere, so the hardware cannot foresee them: as one block is read, the same lines of the keys
// that come next and of the values are fetched.
template <class Type, int queries, int blocks>
inline void score_blocks(const typename Type::Storage* const* keys,
                         const typename Type::Storage* const* next_keys,
                         const typename Type::Storage* const* values, const float* const* query, int head_dim,
                         float scale, float* const* scores) {
    constexpr int dims_per_line = 64 / (block_tokens * sizeof(typename Type::Storage));
    F16 sum[queries][blocks];
#pragma GCC unroll 8
    for (int r = 0; r < queries; ++r) {
#pragma GCC unroll 8
        for (int b = 0; b < blocks; ++b) sum[r][b] = zero16();
    }
    for (int line = 0; line < head_dim; line += dims_per_line) {
#pragma GCC unroll 8
        for (int b = 0; b < blocks; ++b) {
            __builtin_prefetch(next_keys[b] + line * block_tokens);
            __builtin_prefetch(values[b] + line * block_tokens);
        }
        for (int d = line; d < line + dims_per_line; ++d) {
#pragma GCC unroll 8
            for (int b = 0; b < blocks; ++b) {
                const F16 key = Type::load_wide(keys[b] + d * block_tokens);
#pragma GCC unroll 8
                for (int r = 0; r < queries; ++r) sum[r][b] = fma16(set16(query[r][d]), key, sum[r][b]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < queries; ++r) {
#pragma GCC unroll 8
        for (int b = 0; b < blocks; ++b) {
            store16(scores[r] + b * block_tokens, sum[r][b] * set16(scale));
        }
    }
}

// scores[0, visible) become exp(s - maximum); the rest of the last block becomes 0. The total has 16 lanes
// (position % 16), lanes i and i + 8 are added, then the tree of sum8.
inline void softmax_span(float* scores, int visible, float* maximum, float* total) {
    const F8 lowest = set8(-__builtin_inff());
    F8 largest = lowest;
    for (int i = 0; i < visible; i += 8) {
        largest = max8(largest, select8(first_lanes8(visible - i), load8(scores + i), lowest));
    }
    const float highest = largest8(largest);
    F16 sums = zero16();
    for (int i = 0; i < visible; i += block_tokens) {
        const F16 masked = keep_first16(exp16(load16(scores + i) - set16(highest)), visible - i);
        store16(scores + i, masked);
        sums = sums + masked;
    }
    *maximum = highest;
    *total = sum8(low_half(sums) + high_half(sums));
}

// out[r][d] += sum over positions from..to-1 of weights[r][position] * values[position, d], for 16 * wides
// d's.
template <class Type, int queries, int wides>
inline void weigh_wides(const typename Type::Storage* values, int head_dim, int d, int from, int to,
                        const float* const* weights, float* const* out) {
    F16 sum[queries][wides];
#pragma GCC unroll 8
    for (int r = 0; r < queries; ++r) {
#pragma GCC unroll 8
        for (int n = 0; n < wides; ++n) sum[r][n] = load16(out[r] + d + 16 * n);
    }
    for (int position = from; position < to; ++position) {
#pragma GCC unroll 8
        for (int n = 0; n < wides; ++n) {
            const F16 value = Type::load_wide(values + position * head_dim + d + 16 * n);
#pragma GCC unroll 8
            for (int r = 0; r < queries; ++r) {
                sum[r][n] = fma16(set16(weights[r][position]), value, sum[r][n]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < queries; ++r) {
#pragma GCC unroll 8
        for (int n = 0; n < wides; ++n) store16(out[r] + d + 16 * n, sum[r][n]);
    }
}

// The same for the last 8 d's of a head that is no multiple of 16.
template <class Type, int queries>
inline void weigh_eight(const typename Type::Storage* values, int head_dim, int d, int from, int to,
                        const float* const* weights, float* const* out) {
    F8 sum[queries];
#pragma GCC unroll 8
    for (int r = 0; r < queries; ++r) sum[r] = load8(out[r] + d);
    for (int position = from; position < to; ++position) {
        const F8 value = Type::load(values + position * head_dim + d);
#pragma GCC unroll 8
        for (int r = 0; r < queries; ++r) sum[r] = fma8(set8(weights[r][position]), value, sum[r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < queries; ++r) store8(out[r] + d, sum[r]);
}

// As many sums as the registers hold, so that no fma waits for the one before it.
constexpr int wides_together(int queries) {
#if defined(QUICKDRAFT_LANES_AVX512)
    return queries <= 4 ? 4 : 2;
#else
    return queries == 1 ? 4 : queries <= 3 ? 2 : 1;
#endif
}
constexpr int blocks_together(int queries) {
#if defined(QUICKDRAFT_LANES_AVX512)
    return queries == 1 ? 8 : queries <= 3 ? 4 : queries == 4 ? 2 : 1;
#else
    return queries == 1 ? 4 : queries <= 3 ? 2 : 1;
#endif
}

template <class Type, int queries>
inline void weigh(const typename Type::Storage* values, int head_dim, int from, int to,
                  const float* const* weights, float* const* out) {
    constexpr int wides = wides_together(queries);
    int d = 0;
    for (; d + 16 * wides <= head_dim; d += 16 * wides) {
        weigh_wides<Type, queries, wides>(values, head_dim, d, from, to, weights, out);
    }
    for (; d + 16 <= head_dim; d += 16) {
        weigh_wides<Type, queries, 1>(values, head_dim, d, from, to, weights, out);
    }
    if (d < head_dim) weigh_eight<Type, queries>(values, head_dim, d, from, to, weights, out);
}

template <int n>
struct Count {
    static constexpr int value = n;
};

template <class Type, int queries>
inline void span_of(const SpanArguments& a, float* scratch) {
    using Storage = typename Type::Storage;
    const std::size_t head_size = static_cast<std::size_t>(a.head_dim) * block_tokens;
    const auto in_block = [&](const void* base, int block) {
        return static_cast<const Storage*>(base) +
               (static_cast<std::size_t>(a.blocks[block]) * a.kv_heads + a.kv_head) * head_size;
    };
    int longest = 0;
#pragma GCC unroll 8
    for (int r = 0; r < queries; ++r) longest = a.visible[r] > longest ? a.visible[r] : longest;
    const int blocks = (longest + block_tokens - 1) / block_tokens;

    float* scores[queries];
    const auto scores_from = [&](int block) {
#pragma GCC unroll 8
        for (int r = 0; r < queries; ++r) scores[r] = scratch + r * span_tokens + block * block_tokens;
    };
    constexpr int together = blocks_together(queries);
    const int first_block = a.hidden / block_tokens, hidden = a.hidden % block_tokens;
    int block = first_block;
    const auto score = [&](auto count) {
        constexpr int n = decltype(count)::value;
        const Storage *keys[n], *next_keys[n], *values[n];
        for (int b = 0; b < n; ++b) {
            const int next = block + n + b;
            keys[b] = in_block(a.keys, block + b);
            next_keys[b] = in_block(a.keys, next < blocks ? next : block + b);
            values[b] = in_block(a.values, block + b);
        }
        scores_from(block);
        score_blocks<Type, queries, n>(keys, next_keys, values, a.query, a.head_dim, a.scale, scores);
        block += n;
    };
    while (block + together <= blocks) score(Count<together>());
    while (block < blocks) score(Count<1>());

#pragma GCC unroll 8
    for (int r = 0; r < queries; ++r) {
        if (a.visible[r] == 0) continue;
        float* state = a.state[r];
        for (int d = 0; d < a.head_dim; d += 8) store8(state + d, zero8());
        float* seen = scratch + r * span_tokens + first_block * block_tokens;
        for (int i = 0; i < hidden; ++i) seen[i] = -__builtin_inff();  // exp of it is 0
        softmax_span(seen, a.visible[r] - first_block * block_tokens, state + a.head_dim,
                     state + a.head_dim + 1);
    }

    for (block = first_block; block < blocks; ++block) {
        const Storage* values = in_block(a.values, block);
        const int first = block * block_tokens;
        int all = block_tokens;  // positions of this block that every query row sees
#pragma GCC unroll 8
        for (int r = 0; r < queries; ++r) {
            const int mine = a.visible[r] - first;
            all = mine < all ? mine : all;
        }
        const int from = block == first_block ? hidden : 0;
        all = all > from ? all : from;
        scores_from(block);
        if (all > from) weigh<Type, queries>(values, a.head_dim, from, all, scores, a.state);
#pragma GCC unroll 8
        for (int r = 0; r < queries; ++r) {
            const int mine = a.visible[r] - first < block_tokens ? a.visible[r] - first : block_tokens;
            if (mine > all) weigh<Type, 1>(values, a.head_dim, all, mine, scores + r, a.state + r);
        }
    }
}

template <class Type>
inline void span_as(const SpanArguments& a, float* scratch) {
    switch (a.queries) {
        case 1:
            return span_of<Type, 1>(a, scratch);
        case 2:
            return span_of<Type, 2>(a, scratch);
        case 3:
            return span_of<Type, 3>(a, scratch);
        case 4:
            return span_of<Type, 4>(a, scratch);
        case 5:
            return span_of<Type, 5>(a, scratch);
        case 6:
            return span_of<Type, 6>(a, scratch);
#if defined(QUICKDRAFT_LANES_AVX512)
        case 7:
            return span_of<Type, 7>(a, scratch);
        case 8:
            return span_of<Type, 8>(a, scratch);
#endif
    }
}

void attention_span(const SpanArguments& a, float* scratch) {
    switch (a.type) {
        case KVType::float32:
            return span_as<Float32>(a, scratch);
        case KVType::float16:
            return span_as<Float16>(a, scratch);
        case KVType::bfloat16:
            return span_as<BFloat16>(a, scratch);
    }
}

// (o, m, l) of earlier spans and of the next one: m' = max, each side times exp(m_side - m').
void attention_merge(float* state, const float* span, int head_dim) {
    float* numbers = state + head_dim;
    const float* next = span + head_dim;
    const float merged = numbers[0] > next[0] ? numbers[0] : next[0];
    float factors[8];
    const float exponents[8] = {numbers[0] - merged, next[0] - merged};
    store8(factors, exp8(load8(exponents)));
    const F8 old = set8(factors[0]), fresh = set8(factors[1]);
    numbers[1] = __builtin_fmaf(numbers[1], factors[0], next[1] * factors[1]);
    numbers[0] = merged;
    for (int d = 0; d < head_dim; d += 8) {
        store8(state + d, fma8(load8(state + d), old, load8(span + d) * fresh));
    }
}

void attention_finish(const float* state, int head_dim, float* out) {
    const F8 total = set8(state[head_dim + 1]);
    for (int d = 0; d < head_dim; d += 8) store8(out + d, load8(state + d) / total);
}
