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
        case KVType::int8:
            break;  // attention_int8_kernels.h
    }
}

// sum += *x * value, one of `sums` running sums that all have to stay in registers: six of 16 lanes fill
// them. GCC moves sums about, and keeps what it broadcast for several sums, until something spills, which
// costs half the speed. So sums are pinned, and where registers are short an `x` used `again` is loaded
// again.
template <int sums, bool again>
[[gnu::always_inline]] inline void add_product(F16& sum, const float* x, F16 value) {
#if defined(QUICKDRAFT_LANES_AVX2) && !defined(QUICKDRAFT_LANES_AVX512)
    if constexpr (again && sums >= 6) asm volatile("" : "+r"(x));
    const F16 next = fma16(set16(*x), value, sum);
    __m256 low = next.low.v, high = next.high.v;
    asm volatile("" : "+x"(low));
    asm volatile("" : "+x"(high));
    sum = {{low}, {high}};
#else
    sum = fma16(set16(*x), value, sum);
#endif
}

// scores[r][16 b + lane] = scale * sum_d query[r][d] * keys[b][d, lane].
// Blocks lie anywhere, so the hardware cannot foresee them: as keys are read, the same lines of the values
// are fetched. Not inlined: among other code GCC runs out of registers in it.
template <class Type, int queries, int blocks>
[[gnu::noinline]] void score_blocks(const typename Type::Storage* const* keys,
                                    const typename Type::Storage* const* values, const float* const* query,
                                    int head_dim, float scale, float* const* scores) {
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
            __builtin_prefetch(values[b] + line * block_tokens);
        }
        for (int d = line; d < line + dims_per_line; ++d) {
#pragma GCC unroll 8
            for (int b = 0; b < blocks; ++b) {
                const F16 key = Type::load_wide(keys[b] + d * block_tokens);
#pragma GCC unroll 8
                for (int r = 0; r < queries; ++r)
                    add_product<queries * blocks, (blocks > 1)>(sum[r][b], query[r] + d, key);
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

// scores[hidden, visible) become exp(s - maximum); what is before, and the rest of the last block, becomes 0.
// The total has 16 lanes (position % 16), lanes i and i + 8 are added, then the tree of sum8.
inline void softmax_span(float* scores, int hidden, int visible, float* maximum, float* total) {
    const F8 lowest = set8(-__builtin_inff());
    for (int i = 0; i < hidden; ++i) scores[i] = -__builtin_inff();
    F8 largest[2] = {lowest, lowest};
    int i = 0;
    for (; i + block_tokens <= visible; i += block_tokens) {
        largest[0] = max8(largest[0], load8(scores + i));
        largest[1] = max8(largest[1], load8(scores + i + 8));
    }
    for (; i < visible; i += 8) {
        largest[0] = max8(largest[0], select8(first_lanes8(visible - i), load8(scores + i), lowest));
    }
    const float highest = largest8(max8(largest[0], largest[1]));
    F16 sums = zero16();
    const auto weigh_up = [&](int at, auto keep) {
        const F16 weights = keep(exp_below16(load16(scores + at) - set16(highest)));
        store16(scores + at, weights);
        sums = sums + weights;
    };
    i = 0;
    if (hidden > 0) {
        weigh_up(0, [&](F16 x) { return keep_first16(drop_first16(x, hidden), visible); });
        i = block_tokens;
    }
    for (; i + block_tokens <= visible; i += block_tokens) weigh_up(i, [](F16 x) { return x; });
    if (i < visible) weigh_up(i, [&](F16 x) { return keep_first16(x, visible - i); });
    *maximum = highest;
    *total = sum8(low_half(sums) + high_half(sums));
}

// out[r][d] += sum of weights[r][position] * values[position, d], for 16 * wides d's, over the positions of
// `count` blocks, or the positions from..to-1 of one. Over all d's and positions, the whole block at `ahead`
// is fetched.
template <class Type, int queries, int wides>
inline void weigh_wides(const typename Type::Storage* const* values,
                        const typename Type::Storage* const* ahead, int count, int head_dim, int d, int from,
                        int to, const float* const* weights, float* const* out) {
    F16 sum[queries][wides];
#pragma GCC unroll 8
    for (int r = 0; r < queries; ++r) {
#pragma GCC unroll 8
        for (int n = 0; n < wides; ++n) sum[r][n] = load16(out[r] + d + 16 * n);
    }
    for (int block = 0; block < count; ++block) {
        const typename Type::Storage* value_row = values[block] + from * head_dim + d;
        const typename Type::Storage* fetched = ahead[block] + d * block_tokens;
        for (int position = from; position < to; ++position, value_row += head_dim) {
            __builtin_prefetch(fetched + position * 16 * wides);
#pragma GCC unroll 8
            for (int n = 0; n < wides; ++n) {
                const F16 value = Type::load_wide(value_row + 16 * n);
#pragma GCC unroll 8
                for (int r = 0; r < queries; ++r) {
                    add_product<queries * wides, (wides > 1)>(
                        sum[r][n], weights[r] + block * block_tokens + position, value);
                }
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
inline void weigh_eight(const typename Type::Storage* const* values, int count, int head_dim, int d, int from,
                        int to, const float* const* weights, float* const* out) {
    F8 sum[queries];
#pragma GCC unroll 8
    for (int r = 0; r < queries; ++r) sum[r] = load8(out[r] + d);
    for (int block = 0; block < count; ++block) {
        for (int position = from; position < to; ++position) {
            const F8 value = Type::load(values[block] + position * head_dim + d);
#pragma GCC unroll 8
            for (int r = 0; r < queries; ++r) {
                sum[r] = fma8(set8(weights[r][block * block_tokens + position]), value, sum[r]);
            }
        }
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

constexpr int value_blocks = 4;  // weighed in one go

template <class Type, int queries>
inline void weigh(const typename Type::Storage* const* values, const typename Type::Storage* const* ahead,
                  int count, int head_dim, int from, int to, const float* const* weights, float* const* out) {
    constexpr int wides = wides_together(queries);
    int d = 0;
    for (; d + 16 * wides <= head_dim; d += 16 * wides) {
        weigh_wides<Type, queries, wides>(values, ahead, count, head_dim, d, from, to, weights, out);
    }
    for (; d + 16 <= head_dim; d += 16) {
        weigh_wides<Type, queries, 1>(values, ahead, count, head_dim, d, from, to, weights, out);
    }
    if (d < head_dim) weigh_eight<Type, queries>(values, count, head_dim, d, from, to, weights, out);
}

template <int n>
struct Count {
    static constexpr int value = n;
};

template <class Type, int queries>
inline void span_of(const SpanArguments& a, float* scratch) {
    using Storage = typename Type::Storage;
    const std::size_t head_size = static_cast<std::size_t>(a.head_dim) * block_tokens;
    const auto in_block = [&](const void* base, std::int32_t block, int kv_head) {
        return static_cast<const Storage*>(base) +
               (static_cast<std::size_t>(block) * a.kv_heads + kv_head) * head_size;
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
        const Storage *keys[n], *values[n];
        for (int b = 0; b < n; ++b) {
            keys[b] = in_block(a.keys, a.blocks[block + b], a.kv_head);
            values[b] = in_block(a.values, a.blocks[block + b], a.kv_head);
        }
        scores_from(block);
        score_blocks<Type, queries, n>(keys, values, a.query, a.head_dim, a.scale, scores);
        block += n;
    };
    while (block + together <= blocks) score(Count<together>());
    while (block < blocks) score(Count<1>());

#pragma GCC unroll 8
    for (int r = 0; r < queries; ++r) {
        if (a.visible[r] == 0) continue;
        float* state = a.state[r];
        for (int d = 0; d < a.head_dim; d += 8) store8(state + d, zero8());
        softmax_span(scratch + r * span_tokens + first_block * block_tokens, hidden,
                     a.visible[r] - first_block * block_tokens, state + a.head_dim, state + a.head_dim + 1);
    }

    // Several blocks at a time, as long as every query row sees all of them: sums stay in registers, and the
    // values in the first-level cache for the next d's.
    int shared = span_tokens;  // positions that every query row sees
#pragma GCC unroll 8
    for (int r = 0; r < queries; ++r) shared = a.visible[r] < shared ? a.visible[r] : shared;
    const int whole = shared / block_tokens;
    for (block = first_block; block < blocks;) {
        const Storage *values[value_blocks], *ahead[value_blocks];
        const int from = block == first_block ? hidden : 0;
        int count = from > 0 ? 1 : whole - block;
        count = count < 1 ? 1 : count > value_blocks ? value_blocks : count;
        for (int b = 0; b < count; ++b) {
            values[b] = in_block(a.values, a.blocks[block + b], a.kv_head);
            ahead[b] = block + b < a.next_count ? in_block(a.keys, a.next_blocks[block + b], a.next_kv_head)
                                                : values[b];
        }
        scores_from(block);
        int all = shared - block * block_tokens;  // positions of (each of) these blocks that all see
        all = all < from ? from : all > block_tokens ? block_tokens : all;
        if (all > from) weigh<Type, queries>(values, ahead, count, a.head_dim, from, all, scores, a.state);
        if (all < block_tokens) {
#pragma GCC unroll 8
            for (int r = 0; r < queries; ++r) {
                const int mine = a.visible[r] - block * block_tokens;
                const int to = mine < block_tokens ? mine : block_tokens;
                if (to > all) weigh<Type, 1>(values, ahead, 1, a.head_dim, all, to, scores + r, a.state + r);
            }
        }
        block += count;
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
        case KVType::int8:
            break;  // attention_int8_kernels.h
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
