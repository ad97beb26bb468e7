// Linear, activation quantisation and embed. Outputs are the lanes; K is never split; every output is one
// fp32 chain over groups (or inputs) in ascending order, so the number of rows in a call changes no bit.
// Included only by kernels_*.cpp, inside their anonymous namespace.

constexpr int row_chunk = 64;  // rows that pass over a weight tile while it is in the first-level cache

// The code of one output and input of a group, as it is stored.
template <int inputs, int bits>
inline int code_at(const std::uint8_t* codes, int output, int input) {
    if constexpr (bits == 8) {
        return static_cast<std::int8_t>(codes[input / 4 * 64 + output * 4 + input % 4]);
    } else {
        const int byte = output * 4 + input % 4;
        const int pair = codes[input / 8 * 64 + byte], low = input % 8 < 4 ? pair & 15 : pair >> 4;
        if constexpr (bits == 4) return low;
        constexpr int high_bits = bits - 4;
        const int high = codes[inputs * 8 + byte] >> (input / 4 * high_bits);
        return low | (high & ((1 << high_bits) - 1)) << 4;
    }
}

// ---- exact integer dots of one group: `rows` rows x 16 outputs
// ----------------------------------------------------

#if defined(QUICKDRAFT_LANES_AVX2)

inline __m256i load_codes(const std::uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline __m256i four_inputs(const std::int8_t* p) {
    int word;
    __builtin_memcpy(&word, p, 4);
    return _mm256_set1_epi32(word);
}

// Pins a running sum to a register. Without it GCC computes every product of a group first, keeps them all on
// the stack, and adds them up at the end.
inline void pin(__m256i& sum) { asm volatile("" : "+x"(sum)); }

// Sums stay in int16 for the whole group: |code| <= 15, |x| <= 127, 16 products a lane: at most 30480.
template <int rows>
inline void dot_int4(const std::uint8_t* codes, const std::int8_t* x, F8 (&dot)[rows][2]) {
    const __m256i low_half = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i sum[rows][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        // Low halves of all rows first: with 4 rows, everything that is alive just fits the 16 registers.
        const __m256i a = load_codes(codes + j * 64), b = load_codes(codes + j * 64 + 32);
        const __m256i a_low = _mm256_and_si256(a, low_half), b_low = _mm256_and_si256(b, low_half);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            const __m256i inputs = four_inputs(x + r * 32 + 8 * j);
            sum[r][0] = _mm256_add_epi16(sum[r][0], _mm256_maddubs_epi16(a_low, inputs));
            sum[r][1] = _mm256_add_epi16(sum[r][1], _mm256_maddubs_epi16(b_low, inputs));
            pin(sum[r][0]);
            pin(sum[r][1]);
        }
        const __m256i a_high = _mm256_and_si256(_mm256_srli_epi16(a, 4), low_half);
        const __m256i b_high = _mm256_and_si256(_mm256_srli_epi16(b, 4), low_half);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            const __m256i inputs = four_inputs(x + r * 32 + 8 * j + 4);
            sum[r][0] = _mm256_add_epi16(sum[r][0], _mm256_maddubs_epi16(a_high, inputs));
            sum[r][1] = _mm256_add_epi16(sum[r][1], _mm256_maddubs_epi16(b_high, inputs));
            pin(sum[r][0]);
            pin(sum[r][1]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int half = 0; half < 2; ++half) {
            dot[r][half] = {_mm256_cvtepi32_ps(_mm256_madd_epi16(sum[r][half], ones))};
        }
    }
}

// |w| is the unsigned operand and w's sign goes to x, so a pair is at most 128 * 127 * 2 = 32512; it is
// widened to int32 at once. (w + 128 as the unsigned operand would saturate.)
template <int rows>
inline void dot_int8(const std::uint8_t* codes, const std::int8_t* x, F8 (&dot)[rows][2]) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum[rows][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
        const __m256i a = load_codes(codes + j * 64), b = load_codes(codes + j * 64 + 32);
        const __m256i a_size = _mm256_abs_epi8(a), b_size = _mm256_abs_epi8(b);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            const __m256i inputs = four_inputs(x + r * 32 + 4 * j);
            const __m256i pa = _mm256_maddubs_epi16(a_size, _mm256_sign_epi8(inputs, a));
            const __m256i pb = _mm256_maddubs_epi16(b_size, _mm256_sign_epi8(inputs, b));
            sum[r][0] = _mm256_add_epi32(sum[r][0], _mm256_madd_epi16(pa, ones));
            sum[r][1] = _mm256_add_epi32(sum[r][1], _mm256_madd_epi16(pb, ones));
            pin(sum[r][0]);
            pin(sum[r][1]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int half = 0; half < 2; ++half) dot[r][half] = {_mm256_cvtepi32_ps(sum[r][half])};
    }
}

// The i-th high bits (1 or 2 of each byte) as bits 4 and up of a code.
template <int bits, int i>
inline __m256i high_part(__m256i high) {
    constexpr int at = (bits - 4) * i;
    const __m256i moved = at < 4 ? _mm256_slli_epi16(high, 4 - at) : _mm256_srli_epi16(high, at - 4);
    return _mm256_and_si256(moved, _mm256_set1_epi8(bits == 5 ? 0x10 : 0x30));
}

// The i-th codes, four inputs of 8 outputs, times each row's inputs: `sum` starts with them or grows by them.
template <int inputs, int bits, int i, int rows>
[[gnu::always_inline]] inline void add_products(__m256i low, __m256i high, const std::int8_t* x,
                                                __m256i (&sum)[rows]) {
    const __m256i code =
        _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi8(15)), high_part<bits, i>(high));
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
        const __m256i product = _mm256_maddubs_epi16(code, four_inputs(x + r * inputs + 4 * i));
        sum[r] = i % (inputs / 8) == 0 ? product : _mm256_add_epi16(sum[r], product);
        pin(sum[r]);
    }
}

// Half of a group's inputs for 8 outputs: four codes of 5 bits, or two of 6, deep.
template <int inputs, int bits, int first, int rows>
[[gnu::always_inline]] inline void half_group(const std::uint8_t* codes, __m256i high, const std::int8_t* x,
                                              __m256i (&sum)[rows]) {
    __m256i pair = load_codes(codes + first * 32);
    add_products<inputs, bits, first>(pair, high, x, sum);
    add_products<inputs, bits, first + 1>(_mm256_srli_epi16(pair, 4), high, x, sum);
    if constexpr (bits == 5) {
        pair = load_codes(codes + first * 32 + 64);
        add_products<inputs, bits, first + 2>(pair, high, x, sum);
        add_products<inputs, bits, first + 3>(_mm256_srli_epi16(pair, 4), high, x, sum);
    }
}

// Codes of 4 + 1 bits, 32 inputs, or 4 + 2 bits, 16 inputs. Sums stay in int16 for half a group: at most
// 31 * 127 * 2 * 4 = 31496, or 63 * 127 * 2 * 2 = 32004.
template <int inputs, int bits, int rows>
[[gnu::always_inline]] inline void dot_high(const std::uint8_t* codes, const std::int8_t* x,
                                            F8 (&dot)[rows][2]) {
    static_assert((bits == 5 && inputs == 32) || (bits == 6 && inputs == 16));
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        // Without this GCC keeps the inputs of the first half on the stack, which costs more than the loads.
        asm volatile("" : "+r"(x));
        const __m256i high = load_codes(codes + inputs * 8 + 32 * half);
        __m256i part[rows], sum[rows];
        half_group<inputs, bits, 0>(codes + 32 * half, high, x, part);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            sum[r] = _mm256_madd_epi16(part[r], ones);
            pin(sum[r]);
        }
        half_group<inputs, bits, inputs / 8>(codes + 32 * half, high, x, part);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(part[r], ones));
            dot[r][half] = {_mm256_cvtepi32_ps(sum[r])};
        }
    }
}

#else

template <int rows>
inline void dot_int4(const std::uint8_t* codes, const std::int8_t* x, F8 (&dot)[rows][2]) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
        for (int output = 0; output < 16; ++output) {
            int sum = 0;
            for (int j = 0; j < 4; ++j) {
                for (int b = 0; b < 4; ++b) {
                    const int pair = codes[j * 64 + output * 4 + b];
                    sum += (pair & 15) * x[r * 32 + 8 * j + b] + (pair >> 4) * x[r * 32 + 8 * j + 4 + b];
                }
            }
            dot[r][output / 8].v[output % 8] = static_cast<float>(sum);
        }
    }
}

template <int rows>
inline void dot_int8(const std::uint8_t* codes, const std::int8_t* x, F8 (&dot)[rows][2]) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
        for (int output = 0; output < 16; ++output) {
            int sum = 0;
            for (int j = 0; j < 8; ++j) {
                for (int b = 0; b < 4; ++b) {
                    sum += static_cast<std::int8_t>(codes[j * 64 + output * 4 + b]) * x[r * 32 + 4 * j + b];
                }
            }
            dot[r][output / 8].v[output % 8] = static_cast<float>(sum);
        }
    }
}

template <int inputs, int bits, int rows>
inline void dot_high(const std::uint8_t* codes, const std::int8_t* x, F8 (&dot)[rows][2]) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
        for (int output = 0; output < 16; ++output) {
            int sum = 0;
            for (int i = 0; i < inputs; ++i) {
                sum += code_at<inputs, bits>(codes, output, i) * x[r * inputs + i];
            }
            dot[r][output / 8].v[output % 8] = static_cast<float>(sum);
        }
    }
}

#endif

// ---- tiles
// --------------------------------------------------------------------------------------------------------

// Bias, then residual, once at the end; outputs beyond the last are padding of the tile.
inline void finish_tile(const LinearArguments& a, int row, int tile, const F8 (&sum)[2]) {
#pragma GCC unroll 8
    for (int half = 0; half < 2; ++half) {
        const int output = tile * tile_outputs + half * 8;
        const int count = a.weight.outputs - output < 8 ? a.weight.outputs - output : 8;
        if (count <= 0) return;
        const std::size_t at = row * a.stride + output;
        F8 value = sum[half];
        if (count == 8) {
            if (a.bias != nullptr) value = value + load8(a.bias + output);
            if (a.residual != nullptr) value = value + load8(a.residual + at);
            store8(a.out + at, value);
        } else {
            if (a.bias != nullptr) value = value + load8_first(a.bias + output, count);
            if (a.residual != nullptr) value = value + load8_first(a.residual + at, count);
            store8_first(a.out + at, value, count);
        }
    }
}

// Scales or minimums of 8 outputs: `numbers` points at the group's, `shared` at what they multiply.
template <bool two_level>
inline F8 group_numbers(const std::uint8_t* numbers, const std::uint8_t* shared, int half) {
    if constexpr (two_level) {  // exact: 11 bits by 7
        return load8_half(reinterpret_cast<const std::uint16_t*>(shared) + 8 * half) *
               load8_int8(reinterpret_cast<const std::int8_t*>(numbers) + 8 * half);
    } else {
        return load8_half(reinterpret_cast<const std::uint16_t*>(numbers) + 8 * half);
    }
}

#if !defined(QUICKDRAFT_LANES_AVX512)

template <WeightFormat format, int rows>
inline void quantised_rows(const LinearArguments& a, int row, int tile) {
    constexpr GroupLayout layout = layout_of(format);
    constexpr int group_inputs = layout.inputs, bytes = layout.bytes(), sharing = layout.sharing();
    constexpr int scales_at = layout.scales_at(), minimums_at = layout.minimums_at(),
                  offset = layout.offset();
    constexpr int shared_bytes = layout.shared_bytes();
    const std::size_t inputs = a.weight.inputs, groups = inputs / group_inputs;
    const std::uint8_t* group = a.weight.data + tile * a.weight.tile_bytes;
    const std::uint8_t* shared = nullptr;
    const std::size_t first = row * groups;  // row is the first of its block
    const std::int8_t* x = a.codes + first * group_inputs;
    const float* scales = a.scales + first;
    const float* corrections = a.corrections + first;
    F8 sum[rows][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) sum[r][0] = sum[r][1] = zero8();
    for (std::size_t g = 0; g < groups; ++g) {
        if constexpr (layout.two_level) {
            if (g % sharing == 0) {
                __builtin_prefetch(group + a.weight.tile_bytes);
                shared = group;
                group += shared_bytes;
            }
        }
        // The same group of the next tile: far enough ahead to hide memory, and in a chunk of many rows the
        // first passes over this tile bring in the next one.
#pragma GCC unroll 10
        for (int line = 0; line < bytes; line += 64) {
            __builtin_prefetch(group + a.weight.tile_bytes + line);
        }
        F8 dot[rows][2];
        if constexpr (layout.bits == 8) {
            dot_int8<rows>(group, x, dot);
        } else if constexpr (layout.bits == 4) {
            dot_int4<rows>(group, x, dot);
        } else {
            dot_high<group_inputs, layout.bits, rows>(group, x, dot);
        }
#pragma GCC unroll 8
        for (int half = 0; half < 2; ++half) {
            const F8 scale = group_numbers<layout.two_level>(group + scales_at, shared, half);
            F8 minimum = zero8();
            if constexpr (layout.minimum) {
                minimum =
                    group_numbers<layout.two_level>(group + minimums_at, shared + 2 * tile_outputs, half);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                const F8 both = scale * set8(scales[r]);
                if constexpr (offset != 0) {  // exact: dot of (code - offset)
                    dot[r][half] = dot[r][half] - set8(corrections[r]);
                }
                sum[r][half] = fma8(both, dot[r][half], sum[r][half]);
                if constexpr (layout.minimum) {
                    sum[r][half] = fma8(minimum, set8(corrections[r]), sum[r][half]);
                }
            }
        }
        group += bytes;
        x += row_block * group_inputs;
        scales += row_block;
        corrections += row_block;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) finish_tile(a, row + r, tile, sum[r]);
}

#endif

template <WeightFormat format>
inline void quantised_linear(const LinearArguments& a, int first_tile, int last_tile) {
    for (int start = 0; start < a.rows; start += row_chunk) {
        const int end = start + row_chunk < a.rows ? start + row_chunk : a.rows;
        for (int tile = first_tile; tile < last_tile; ++tile) {
            int row = start;
#if defined(QUICKDRAFT_LANES_AVX512)
            for (; row + 8 <= end; row += 8) quantised_rows<format, 8>(a, row, tile);
#endif
            for (; row + 4 <= end; row += 4) quantised_rows<format, 4>(a, row, tile);
            switch (end - row) {
                case 3:
                    quantised_rows<format, 3>(a, row, tile);
                    break;
                case 2:
                    quantised_rows<format, 2>(a, row, tile);
                    break;
                case 1:
                    quantised_rows<format, 1>(a, row, tile);
                    break;
            }
        }
    }
}

// rows x tiles x 2 independent chains hide the latency of fma.
template <class Type, int rows, int tiles>
inline void dense_rows(const LinearArguments& a, int row, int tile) {
    const int inputs = a.weight.inputs;
    const typename Type::Storage* weight[tiles];
#pragma GCC unroll 8
    for (int t = 0; t < tiles; ++t) {
        weight[t] =
            reinterpret_cast<const typename Type::Storage*>(a.weight.data + (tile + t) * a.weight.tile_bytes);
    }
    const float* x = a.x + static_cast<std::size_t>(row) * inputs;
    F8 sum[rows][tiles][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int t = 0; t < tiles; ++t) sum[r][t][0] = sum[r][t][1] = zero8();
    }
    for (int i = 0; i < inputs; ++i) {
#pragma GCC unroll 8
        for (int t = 0; t < tiles; ++t) {
            const F8 a0 = Type::load(weight[t] + 16 * i), a1 = Type::load(weight[t] + 16 * i + 8);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                const F8 input = set8(x[static_cast<std::size_t>(r) * inputs + i]);
                sum[r][t][0] = fma8(input, a0, sum[r][t][0]);
                sum[r][t][1] = fma8(input, a1, sum[r][t][1]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int t = 0; t < tiles; ++t) finish_tile(a, row + r, tile + t, sum[r][t]);
    }
}

template <class Type>
inline void dense_linear(const LinearArguments& a, int first_tile, int last_tile) {
    for (int start = 0; start < a.rows; start += row_chunk) {
        const int end = start + row_chunk < a.rows ? start + row_chunk : a.rows;
        const int four = start + (end - start) / 4 * 4;
        for (int tile = first_tile; tile < last_tile; ++tile) {
            for (int row = start; row < four; row += 4) dense_rows<Type, 4, 1>(a, row, tile);
        }
        for (int row = four; row < end; ++row) {
            int tile = first_tile;
            for (; tile + 4 <= last_tile; tile += 4) dense_rows<Type, 1, 4>(a, row, tile);
            for (; tile < last_tile; ++tile) dense_rows<Type, 1, 1>(a, row, tile);
        }
    }
}

void linear(const LinearArguments& a, int first_tile, int last_tile) {
    switch (a.weight.format) {
        case WeightFormat::float32:
            return dense_linear<Float32>(a, first_tile, last_tile);
        case WeightFormat::float16:
            return dense_linear<Float16>(a, first_tile, last_tile);
        case WeightFormat::bfloat16:
            return dense_linear<BFloat16>(a, first_tile, last_tile);
        case WeightFormat::int8:
            return quantised_linear<WeightFormat::int8>(a, first_tile, last_tile);
        case WeightFormat::int4:
            return quantised_linear<WeightFormat::int4>(a, first_tile, last_tile);
        case WeightFormat::int4_minimum:
            return quantised_linear<WeightFormat::int4_minimum>(a, first_tile, last_tile);
        case WeightFormat::int5:
            return quantised_linear<WeightFormat::int5>(a, first_tile, last_tile);
        case WeightFormat::int5_minimum:
            return quantised_linear<WeightFormat::int5_minimum>(a, first_tile, last_tile);
        case WeightFormat::int5_minimum_two_level:
            return quantised_linear<WeightFormat::int5_minimum_two_level>(a, first_tile, last_tile);
        case WeightFormat::int6_two_level_sixteen:
            return quantised_linear<WeightFormat::int6_two_level_sixteen>(a, first_tile, last_tile);
        case WeightFormat::int4_minimum_two_level:
            return quantised_linear<WeightFormat::int4_minimum_two_level>(a, first_tile, last_tile);
    }
}

// ---- activations
// --------------------------------------------------------------------------------------------------

// Codes of 8 inputs and their sum; clamped before rounding, so NaN becomes -127 (its scale is NaN already).
inline int quantise8(F8 x, F8 scale, std::int8_t* codes) {
    const F8 bounded = min8(max8(x / scale, set8(-127.0f)), set8(127.0f));
#if defined(QUICKDRAFT_LANES_AVX2)
    const __m256i wide = _mm256_cvtps_epi32(bounded.v);
    const __m128i low = _mm256_castsi256_si128(wide), high = _mm256_extracti128_si256(wide, 1);
    const __m128i words = _mm_packs_epi32(low, high);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(codes), _mm_packs_epi16(words, words));
    __m128i sum = _mm_add_epi32(low, high);
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1)));
#else
    const F8 magic = set8(12582912.0f);
    const F8 rounded = (bounded + magic) - magic;
    int sum = 0;
    for (int i = 0; i < 8; ++i) {
        const int code = static_cast<int>(rounded.v[i]);
        codes[i] = static_cast<std::int8_t>(code);
        sum += code;
    }
    return sum;
#endif
}

template <int group_inputs>
inline void quantise_groups(int offset, const float* x, int inputs, std::int8_t* codes, float* scales,
                            float* corrections) {
    for (int g = 0; g < inputs / group_inputs; ++g) {
        F8 largest = zero8();
        for (int i = 0; i < group_inputs; i += 8) largest = largest_magnitude8(largest, load8(x + i));
        const float scale = largest_lane_bits8(largest) / 127.0f;
        *scales = scale;
        int sum = 0;
        if (scale == 0.0f) {
            for (int i = 0; i < group_inputs; ++i) codes[i] = 0;
        } else {
            for (int i = 0; i < group_inputs; i += 8) sum += quantise8(load8(x + i), set8(scale), codes + i);
        }
        const float total = static_cast<float>(sum);
        *corrections = (offset != 0 ? static_cast<float>(offset) : scale) * total;
        x += group_inputs;
        codes += row_block * group_inputs;
        scales += row_block;
        corrections += row_block;
    }
}

void quantise_row(int group, int offset, const float* x, int inputs, std::int8_t* codes, float* scales,
                  float* corrections) {
    if (group == 16) {
        quantise_groups<16>(offset, x, inputs, codes, scales, corrections);
    } else {
        quantise_groups<32>(offset, x, inputs, codes, scales, corrections);
    }
}

// ---- embed
// --------------------------------------------------------------------------------------------------------

template <class Type>
inline void embed_dense(const typename Type::Storage* tile, int lane, int inputs, float* out) {
    const int half = lane / 8 * 8;
    for (int i = 0; i < inputs; ++i) {
        float values[8];
        store8(values, Type::load(tile + 16 * i + half));
        out[i] = values[lane - half];
    }
}

template <WeightFormat format>
inline void embed_quantised(const std::uint8_t* group, int lane, int inputs, float* out) {
    constexpr GroupLayout layout = layout_of(format);
    constexpr int group_inputs = layout.inputs, bytes = layout.bytes(), sharing = layout.sharing();
    constexpr int scales_at = layout.scales_at(), minimums_at = layout.minimums_at(),
                  offset = layout.offset();
    constexpr int shared_bytes = layout.shared_bytes();
    const int half = lane / 8;
    const std::uint8_t* shared = nullptr;
    for (int g = 0; g < inputs / group_inputs; ++g, group += bytes, out += group_inputs) {
        if (layout.two_level && g % sharing == 0) {
            shared = group;
            group += shared_bytes;
        }
        float scales[8], minimums[8] = {};
        store8(scales, group_numbers<layout.two_level>(group + scales_at, shared, half));
        if constexpr (layout.minimum) {
            store8(minimums,
                   group_numbers<layout.two_level>(group + minimums_at, shared + 2 * tile_outputs, half));
        }
        const float scale = scales[lane % 8], minimum = minimums[lane % 8];
        for (int i = 0; i < group_inputs; ++i) {
            const auto code = static_cast<float>(code_at<group_inputs, layout.bits>(group, lane, i) - offset);
            out[i] = layout.minimum ? scale * code + minimum : scale * code;
        }
    }
}

void embed_row(const PackedView& table, int row, float* out) {
    const std::uint8_t* tile = table.data + row / tile_outputs * table.tile_bytes;
    const int lane = row % tile_outputs, inputs = table.inputs;
    const auto* sixteen_bit = reinterpret_cast<const std::uint16_t*>(tile);
    switch (table.format) {
        case WeightFormat::float32:
            return embed_dense<Float32>(reinterpret_cast<const float*>(tile), lane, inputs, out);
        case WeightFormat::float16:
            return embed_dense<Float16>(sixteen_bit, lane, inputs, out);
        case WeightFormat::bfloat16:
            return embed_dense<BFloat16>(sixteen_bit, lane, inputs, out);
        case WeightFormat::int8:
            return embed_quantised<WeightFormat::int8>(tile, lane, inputs, out);
        case WeightFormat::int4:
            return embed_quantised<WeightFormat::int4>(tile, lane, inputs, out);
        case WeightFormat::int4_minimum:
            return embed_quantised<WeightFormat::int4_minimum>(tile, lane, inputs, out);
        case WeightFormat::int5:
            return embed_quantised<WeightFormat::int5>(tile, lane, inputs, out);
        case WeightFormat::int5_minimum:
            return embed_quantised<WeightFormat::int5_minimum>(tile, lane, inputs, out);
        case WeightFormat::int5_minimum_two_level:
            return embed_quantised<WeightFormat::int5_minimum_two_level>(tile, lane, inputs, out);
        case WeightFormat::int6_two_level_sixteen:
            return embed_quantised<WeightFormat::int6_two_level_sixteen>(tile, lane, inputs, out);
        case WeightFormat::int4_minimum_two_level:
            return embed_quantised<WeightFormat::int4_minimum_two_level>(tile, lane, inputs, out);
    }
}
