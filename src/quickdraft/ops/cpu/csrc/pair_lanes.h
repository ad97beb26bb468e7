// Lanes for exact sums of products of int16: eight int32 sums, each fed by a pair of products, in AVX2
// registers or as plain loops with equal results. Included only by kernels_*.cpp, inside their anonymous
// namespace, after lanes.h.

// Eight int32 sums, and eight pairs of int16.
#if defined(QUICKDRAFT_LANES_AVX2)

struct Sums8 {
    __m256i v;
};
struct Pairs8 {
    __m256i v;
};

inline Sums8 no_sums8() { return {_mm256_setzero_si256()}; }
inline Pairs8 load_pairs8(const std::int8_t* p) {
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Pairs8 set_pairs8(const std::int16_t* p) {
    int pair;
    __builtin_memcpy(&pair, p, 4);
    return {_mm256_set1_epi32(pair)};
}
// The sum is pinned to a register: left alone, GCC computes many products first and keeps them on the stack.
inline void add_pairs8(Sums8& sum, Pairs8 a, Pairs8 b) {
    sum.v = _mm256_add_epi32(sum.v, _mm256_madd_epi16(a.v, b.v));
    asm volatile("" : "+x"(sum.v));
}
inline F8 as_floats(Sums8 sum) { return {_mm256_cvtepi32_ps(sum.v)}; }
inline void store_int16(F8 x, std::int16_t* codes) {
    const __m256i wide = _mm256_cvtps_epi32(x.v);
    const __m128i low = _mm256_castsi256_si128(wide), high = _mm256_extracti128_si256(wide, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm_packs_epi32(low, high));
}

#else

struct Sums8 {
    std::int32_t v[8];
};
struct Pairs8 {
    std::int16_t v[16];
};

inline Sums8 no_sums8() { return {}; }
inline Pairs8 load_pairs8(const std::int8_t* p) {
    Pairs8 r;
    for (int i = 0; i < 16; ++i) r.v[i] = p[i];
    return r;
}
inline Pairs8 set_pairs8(const std::int16_t* p) {
    Pairs8 r;
    for (int i = 0; i < 16; ++i) r.v[i] = p[i % 2];
    return r;
}
inline void add_pairs8(Sums8& sum, Pairs8 a, Pairs8 b) {
    for (int i = 0; i < 8; ++i) sum.v[i] += a.v[2 * i] * b.v[2 * i] + a.v[2 * i + 1] * b.v[2 * i + 1];
}
inline F8 as_floats(Sums8 sum) {
    return each8([&](int i) { return static_cast<float>(sum.v[i]); });
}
inline void store_int16(F8 x, std::int16_t* codes) {
    const F8 magic = set8(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const F8 rounded = (x + magic) - magic;
    for (int i = 0; i < 8; ++i) {
        codes[i] = rounded.v[i] == rounded.v[i] ? static_cast<std::int16_t>(rounded.v[i]) : std::int16_t{0};
    }
}

#endif
