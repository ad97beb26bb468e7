// The Gumbel choice over part of a row, bit for bit the operations of ops/reference/gumbel.py: Philox4x32-10
// to a float64 in (0, 1), -log(-log(u)) with a stated logarithm, every float64 operation rounded by itself
// (no fma). Included only by kernels_*.cpp, inside their anonymous namespace.

constexpr std::uint64_t philox_m0 = 0xD2511F53u, philox_m1 = 0xCD9E8D57u;
constexpr std::uint32_t philox_w0 = 0x9E3779B9u, philox_w1 = 0xBB67AE85u;
constexpr int log_terms = 12;
constexpr double ln2 = 0.6931471805599453, sqrt_half = 0.7071067811865476;

// 1 / (2 t + 1), the coefficients of the logarithm's series.
constexpr double odd_reciprocals[log_terms + 1] = {1.0 / 1,  1.0 / 3,  1.0 / 5,  1.0 / 7,  1.0 / 9,
                                                   1.0 / 11, 1.0 / 13, 1.0 / 15, 1.0 / 17, 1.0 / 19,
                                                   1.0 / 21, 1.0 / 23, 1.0 / 25};

inline double stated_log(double x) {
    std::uint64_t u;
    __builtin_memcpy(&u, &x, 8);
    int exponent = static_cast<int>(u >> 52) - 1022;
    u = (u & 0x000FFFFFFFFFFFFFull) | 0x3FE0000000000000ull;
    double mantissa;
    __builtin_memcpy(&mantissa, &u, 8);
    if (mantissa < sqrt_half) {
        mantissa = mantissa * 2.0;
        exponent -= 1;
    }
    const double z = (mantissa - 1.0) / (mantissa + 1.0);
    const double square = z * z;
    double series = odd_reciprocals[log_terms];
    for (int term = log_terms - 1; term >= 0; --term) series = series * square + odd_reciprocals[term];
    return static_cast<double>(exponent) * ln2 + 2.0 * z * series;
}

inline double gumbel_noise(std::uint64_t id, std::uint64_t seed, std::uint64_t position) {
    std::uint64_t c0 = id & 0xFFFFFFFFu, c1 = id >> 32, c2 = position & 0xFFFFFFFFu, c3 = position >> 32;
    auto k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t p0 = philox_m0 * c0, p1 = philox_m1 * c2;
        c0 = (p1 >> 32) ^ c1 ^ k0;
        c1 = p1 & 0xFFFFFFFFu;
        c2 = (p0 >> 32) ^ c3 ^ k1;
        c3 = p0 & 0xFFFFFFFFu;
        k0 += philox_w0;
        k1 += philox_w1;
    }
    const auto high = static_cast<double>(c0 >> 6), low = static_cast<double>(c1 >> 6);
    const double u = (high * 67108864.0 + low + 0.5) * 0x1p-52;
    return -stated_log(-stated_log(u));
}

inline void consider(GumbelBest* best, double score, std::int64_t id) {
    best->nan |= score != score;
    if (score > best->score || (score == best->score && id < best->id)) {
        best->score = score;
        best->id = id;
    }
}

#if defined(QUICKDRAFT_LANES_AVX2)

inline __m256d stated_log4(__m256d x) {
    const __m256i u = _mm256_castpd_si256(x);
    const __m256d one = _mm256_set1_pd(1.0), two = _mm256_set1_pd(2.0);
    // The biased exponent as a float64: 2^52 + e has e in its low bits.
    const __m256i biased =
        _mm256_or_si256(_mm256_srli_epi64(u, 52), _mm256_set1_epi64x(0x4330000000000000ll));
    __m256d exponent = _mm256_sub_pd(_mm256_castsi256_pd(biased), _mm256_set1_pd(0x1p52 + 1022.0));
    __m256d mantissa =
        _mm256_castsi256_pd(_mm256_or_si256(_mm256_and_si256(u, _mm256_set1_epi64x(0x000FFFFFFFFFFFFFll)),
                                            _mm256_set1_epi64x(0x3FE0000000000000ll)));
    const __m256d low = _mm256_cmp_pd(mantissa, _mm256_set1_pd(sqrt_half), _CMP_LT_OQ);
    mantissa = _mm256_blendv_pd(mantissa, _mm256_mul_pd(mantissa, two), low);
    exponent = _mm256_sub_pd(exponent, _mm256_and_pd(low, one));
    const __m256d z = _mm256_div_pd(_mm256_sub_pd(mantissa, one), _mm256_add_pd(mantissa, one));
    const __m256d square = _mm256_mul_pd(z, z);
    __m256d series = _mm256_set1_pd(odd_reciprocals[log_terms]);
    for (int term = log_terms - 1; term >= 0; --term) {
        series = _mm256_add_pd(_mm256_mul_pd(series, square), _mm256_set1_pd(odd_reciprocals[term]));
    }
    return _mm256_add_pd(_mm256_mul_pd(exponent, _mm256_set1_pd(ln2)),
                         _mm256_mul_pd(_mm256_mul_pd(two, z), series));
}

// Exact for 0 <= x < 2^52.
inline __m256d to_double4(__m256i x) {
    const __m256i two52 = _mm256_set1_epi64x(0x4330000000000000ll);
    return _mm256_sub_pd(_mm256_castsi256_pd(_mm256_or_si256(x, two52)), _mm256_set1_pd(0x1p52));
}

inline __m256d gumbel_noise4(__m256i id, std::uint64_t seed, std::uint64_t position) {
    const __m256i low32 = _mm256_set1_epi64x(0xFFFFFFFFll);
    const __m256i m0 = _mm256_set1_epi64x(philox_m0), m1 = _mm256_set1_epi64x(philox_m1);
    __m256i c0 = _mm256_and_si256(id, low32), c1 = _mm256_srli_epi64(id, 32);
    __m256i c2 = _mm256_set1_epi64x(static_cast<long long>(position & 0xFFFFFFFFu));
    __m256i c3 = _mm256_set1_epi64x(static_cast<long long>(position >> 32));
    auto k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const __m256i p0 = _mm256_mul_epu32(m0, c0), p1 = _mm256_mul_epu32(m1, c2);
        c0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), c1), _mm256_set1_epi64x(k0));
        c1 = _mm256_and_si256(p1, low32);
        c2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), c3), _mm256_set1_epi64x(k1));
        c3 = _mm256_and_si256(p0, low32);
        k0 += philox_w0;
        k1 += philox_w1;
    }
    const __m256d high = to_double4(_mm256_srli_epi64(c0, 6)), low = to_double4(_mm256_srli_epi64(c1, 6));
    const __m256d sum = _mm256_add_pd(_mm256_add_pd(_mm256_mul_pd(high, _mm256_set1_pd(67108864.0)), low),
                                      _mm256_set1_pd(0.5));
    const __m256d minus = _mm256_set1_pd(-0.0);
    const __m256d inner = stated_log4(_mm256_mul_pd(sum, _mm256_set1_pd(0x1p-52)));
    return _mm256_xor_pd(stated_log4(_mm256_xor_pd(inner, minus)), minus);
}

#endif

// Best of row[from, to): ties go to the lowest id. `nan` tells whether any score was not a number.
GumbelBest gumbel(const float* row, const std::int64_t* ids, int from, int to, double temperature,
                  std::uint64_t seed, std::uint64_t position) {
    const double lowest = -__builtin_inf();
    GumbelBest best = {lowest, INT64_MAX, false};
    int i = from;
#if defined(QUICKDRAFT_LANES_AVX2)
    for (; i + 4 <= to; i += 4) {
        const __m256d logits = _mm256_cvtps_pd(_mm_loadu_ps(row + i));
        const __m256d scaled = _mm256_div_pd(logits, _mm256_set1_pd(temperature));
        // Four masked tokens need no noise, unless nothing has been seen that could win.
        const int masked = _mm256_movemask_pd(_mm256_cmp_pd(scaled, _mm256_set1_pd(lowest), _CMP_EQ_OQ));
        if (masked == 15 && best.score > lowest) continue;
        const __m256i id = ids != nullptr
                               ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ids + i))
                               : _mm256_add_epi64(_mm256_set1_epi64x(i), _mm256_setr_epi64x(0, 1, 2, 3));
        const __m256d score = _mm256_add_pd(scaled, gumbel_noise4(id, seed, position));
        if (_mm256_movemask_pd(_mm256_cmp_pd(score, _mm256_set1_pd(best.score), _CMP_NLT_UQ)) == 0) continue;
        double scores[4];
        _mm256_storeu_pd(scores, score);
        for (int k = 0; k < 4; ++k) consider(&best, scores[k], ids != nullptr ? ids[i + k] : i + k);
    }
#endif
    for (; i < to; ++i) {
        const std::int64_t id = ids != nullptr ? ids[i] : i;
        const double noise = gumbel_noise(static_cast<std::uint64_t>(id), seed, position);
        consider(&best, static_cast<double>(row[i]) / temperature + noise, id);
    }
    return best;
}
