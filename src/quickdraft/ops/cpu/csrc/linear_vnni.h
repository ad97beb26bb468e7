// quantised_rows with AVX-512 VNNI: the 16 outputs of a tile in one register, four products a lane and
// instruction. The dots are exact integers and the chain over groups is that of linear_kernels.h, so the bits
// are those of the other objects. Included only by kernels_avx512.cpp, before linear_kernels.h.

inline __m512i load_codes16(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
inline __m512i four_inputs16(const std::int8_t* p) {
    int word;
    __builtin_memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
}

// The i-th high bits (1 or 2 of each byte) as bits 4 and up of a code.
template <int bits, int i>
inline __m512i high_part16(__m512i high) {
    constexpr int at = (bits - 4) * i;
    const __m512i moved =
        at < 4 ? _mm512_slli_epi16(high, at < 4 ? 4 - at : 0) : _mm512_srli_epi16(high, at < 4 ? 0 : at - 4);
    return _mm512_and_si512(moved, _mm512_set1_epi8(bits == 5 ? 0x10 : 0x30));
}

// sum[r] += the i-th four codes of every output times row r's inputs.
template <int i, int rows>
[[gnu::always_inline]] inline void add_dots(__m512i code, const std::int8_t* const (&x)[rows],
                                            __m512i (&sum)[rows]) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) sum[r] = _mm512_dpbusd_epi32(sum[r], code, four_inputs16(x[r] + 4 * i));
}

// Codes 2j and 2j + 1, which share their bytes, and all that follow.
template <int inputs, int bits, int j, int rows>
[[gnu::always_inline]] inline void add_pairs(const std::uint8_t* codes, __m512i high,
                                             const std::int8_t* const (&x)[rows], __m512i (&sum)[rows]) {
    if constexpr (j < inputs / 8) {
        const __m512i half = _mm512_set1_epi8(15), pair = load_codes16(codes + 64 * j);
        __m512i first = _mm512_and_si512(pair, half);
        __m512i second = _mm512_and_si512(_mm512_srli_epi16(pair, 4), half);
        if constexpr (bits > 4) {
            first = _mm512_or_si512(first, high_part16<bits, 2 * j>(high));
            second = _mm512_or_si512(second, high_part16<bits, 2 * j + 1>(high));
        }
        add_dots<2 * j>(first, x, sum);
        add_dots<2 * j + 1>(second, x, sum);
        add_pairs<inputs, bits, j + 1>(codes, high, x, sum);
    }
}

// Signed codes are made unsigned by adding 128; the rows' corrections take it off again.
template <int i, int inputs, int rows>
[[gnu::always_inline]] inline void add_bytes(const std::uint8_t* codes, const std::int8_t* const (&x)[rows],
                                             __m512i (&sum)[rows]) {
    if constexpr (i < inputs / 4) {
        const __m512i code = _mm512_xor_si512(load_codes16(codes + 64 * i), _mm512_set1_epi8(-128));
        add_dots<i>(code, x, sum);
        add_bytes<i + 1, inputs>(codes, x, sum);
    }
}

// Scales or minimums of a tile's outputs, see group_numbers.
template <bool two_level>
inline F16 group_numbers16(const std::uint8_t* numbers, const std::uint8_t* shared) {
    if constexpr (two_level) {  // exact: 11 bits by 7
        return load16_half(reinterpret_cast<const std::uint16_t*>(shared)) *
               load16_int8(reinterpret_cast<const std::int8_t*>(numbers));
    } else {
        return load16_half(reinterpret_cast<const std::uint16_t*>(numbers));
    }
}

// See group_scale and group_minimum.
template <WeightFormat format>
inline F16 group_scale16(const std::uint8_t* group, const std::uint8_t* shared) {
    constexpr GroupLayout layout = layout_of(format);
    const std::uint8_t* numbers = group + layout.scales_at();
    if constexpr (layout.bfloat16) {
        return load16_bfloat(reinterpret_cast<const std::uint16_t*>(numbers));
    } else {
        return group_numbers16<layout.two_level>(numbers, shared);
    }
}

template <WeightFormat format>
inline F16 group_minimum16(const std::uint8_t* group, const std::uint8_t* shared, F16 scale) {
    constexpr GroupLayout layout = layout_of(format);
    const std::uint8_t* numbers = group + layout.minimums_at();
    if constexpr (layout.zero && layout.bits < 8) {
        return scale * load16_int8(reinterpret_cast<const std::int8_t*>(numbers));
    } else if constexpr (layout.zero) {
        return scale * load16_half(reinterpret_cast<const std::uint16_t*>(numbers));
    } else {
        return group_numbers16<layout.two_level>(numbers, shared + 2 * tile_outputs);
    }
}

// dot[r] -= 128 * the sum of row r's inputs, where no correction of the row says it (zero points).
template <int inputs, int rows>
inline void take_off_128(const std::int8_t* const (&x)[rows], __m512i (&dot)[rows]) {
    __m512i sum[rows];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) sum[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = 0; i < inputs / 4; ++i) {
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            sum[r] = _mm512_dpbusd_epi32(sum[r], _mm512_set1_epi8(1), four_inputs16(x[r] + 4 * i));
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) dot[r] = _mm512_sub_epi32(dot[r], _mm512_slli_epi32(sum[r], 7));
}

// Bias, then residual, once at the end; outputs beyond the last are padding of the tile.
inline void finish_tile16(const LinearArguments& a, int row, int tile, F16 sum) {
    const int output = tile * tile_outputs, left = a.weight.outputs - output;
    const auto mask = static_cast<__mmask16>(left >= 16 ? 0xFFFF : (1 << left) - 1);
    const std::size_t at = row * a.stride + output;
    __m512 value = sum.v;
    if (a.bias != nullptr) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, a.bias + output));
    if (a.residual != nullptr) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, a.residual + at));
    _mm512_mask_storeu_ps(a.out + at, mask, value);
}

template <WeightFormat format, int rows>
inline void quantised_rows(const LinearArguments& a, int row, int tile) {
    constexpr GroupLayout layout = layout_of(format);
    constexpr int group_inputs = layout.inputs, bytes = layout.bytes(), sharing = layout.sharing();
    constexpr int shared_bytes = layout.shared_bytes();
    const std::size_t inputs = a.weight.inputs, groups = inputs / group_inputs;
    const std::uint8_t* group = a.weight.data + tile * a.weight.tile_bytes;
    const std::uint8_t* shared = nullptr;
    const std::int8_t* x[rows];
    const float *scales[rows], *corrections[rows];
    F16 sum[rows];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
        const std::size_t block = (row + r) / row_block * groups * row_block, lane = r % row_block;
        x[r] = a.codes + block * group_inputs + lane * group_inputs;
        scales[r] = a.scales + block + lane;
        corrections[r] = a.corrections + block + lane;
        sum[r] = zero16();
    }
    for (std::size_t g = 0; g < groups; ++g) {
        if constexpr (layout.two_level) {
            if (g % sharing == 0) {
                __builtin_prefetch(group + a.weight.tile_bytes);
                shared = group;
                group += shared_bytes;
            }
        }
        // The same group of the next tile, see linear_kernels.h.
#pragma GCC unroll 10
        for (int line = 0; line < bytes; line += 64) {
            __builtin_prefetch(group + a.weight.tile_bytes + line);
        }
        __m512i dot[rows];
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) dot[r] = _mm512_setzero_si512();
        if constexpr (layout.bits == 8) {
            add_bytes<0, group_inputs>(group, x, dot);
            if constexpr (layout.zero) take_off_128<group_inputs>(x, dot);
        } else {
            __m512i high = _mm512_setzero_si512();
            if constexpr (layout.bits > 4) high = load_codes16(group + layout.high_at());
            add_pairs<group_inputs, layout.bits, 0>(group, high, x, dot);
        }
        const F16 scale = group_scale16<format>(group, shared);
        F16 minimum = zero16();
        if constexpr (layout.minimum) minimum = group_minimum16<format>(group, shared, scale);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            const std::size_t at = g * row_block;
            F16 exact = {_mm512_cvtepi32_ps(dot[r])};
            if constexpr (layout.unsigned_offset() != 0) exact = exact - set16(corrections[r][at]);
            sum[r] = fma16(scale * set16(scales[r][at]), exact, sum[r]);
            if constexpr (layout.minimum) sum[r] = fma16(minimum, set16(corrections[r][at]), sum[r]);
            x[r] += row_block * group_inputs;
        }
        group += bytes;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) finish_tile16(a, row + r, tile, sum[r]);
}
