// Activation quantisation: a row's codes, scales and corrections, in the blocks that linear reads
// (kernels.h). Included only by kernels_*.cpp, inside their anonymous namespace.

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
