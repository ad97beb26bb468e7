// Exact integer dots of one group of a quantised tile: up to 4 rows x 16 outputs, each row's inputs side by
// side (linear_vnni.h has those of AVX-512), and the code of one input as it is stored. Included only by
// kernels_*.cpp, inside their anonymous namespace.

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
