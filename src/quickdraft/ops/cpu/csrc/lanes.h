// Eight fp32 lanes, in AVX2 registers or as a plain loop, and sixteen, in one AVX-512 register or as two of
// eight. Included only by kernels_*.cpp, inside an anonymous namespace: no code compiled for one instruction
// set may be merged with another's by the linker, so nothing here calls into the standard library's
// templates.
//
// The two versions give equal bits: every operation is rounded by itself, fma is explicit, comparisons treat
// NaN alike (min/max return the second operand unless the first wins).

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define QUICKDRAFT_LANES_AVX2 1

struct F8 {
    __m256 v;
};
struct Mask8 {
    __m256 v;
};

inline F8 zero8() { return {_mm256_setzero_ps()}; }
inline F8 set8(float x) { return {_mm256_set1_ps(x)}; }
inline F8 load8(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store8(float* p, F8 a) { _mm256_storeu_ps(p, a.v); }
inline F8 operator+(F8 a, F8 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F8 operator-(F8 a, F8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F8 operator*(F8 a, F8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F8 operator/(F8 a, F8 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F8 fma8(F8 a, F8 b, F8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c
inline F8 max8(F8 a, F8 b) { return {_mm256_max_ps(a.v, b.v)}; }               // a > b ? a : b
inline F8 min8(F8 a, F8 b) { return {_mm256_min_ps(a.v, b.v)}; }               // a < b ? a : b
inline Mask8 above8(F8 a, F8 b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ)}; }
inline Mask8 equal8(F8 a, F8 b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)}; }
inline Mask8 nan8(F8 a) { return {_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q)}; }
inline Mask8 operator|(Mask8 a, Mask8 b) { return {_mm256_or_ps(a.v, b.v)}; }
inline unsigned bits(Mask8 a) { return static_cast<unsigned>(_mm256_movemask_ps(a.v)); }
inline F8 select8(Mask8 mask, F8 yes, F8 no) { return {_mm256_blendv_ps(no.v, yes.v, mask.v)}; }
inline Mask8 first_lanes8(int count) {  // lanes 0..count-1
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane))};
}
// The largest |x| bit pattern as a number: NaN beats everything.
inline F8 largest_magnitude8(F8 a, F8 x) {
    const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(x.v), _mm256_set1_epi32(0x7FFFFFFF));
    return {_mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a.v), magnitude))};
}
inline float largest_lane_bits8(F8 a) {
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(_mm256_castps_si256(a.v)),
                              _mm256_extracti128_si256(_mm256_castps_si256(a.v), 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1));
    return _mm_cvtss_f32(_mm_castsi128_ps(m));
}
inline F8 load8_half(const std::uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline F8 load8_int8(const std::int8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))};
}
inline F8 load8_bfloat(const std::uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
// p * 2^n, n = bits(shifted) - bits(magic), in two exact steps (n reaches -150..128).
inline F8 scale_by_power8(F8 p, F8 shifted, F8 magic) {
    const __m256i n = _mm256_sub_epi32(_mm256_castps_si256(shifted.v), _mm256_castps_si256(magic.v));
    const __m256i half = _mm256_srai_epi32(n, 1), bias = _mm256_set1_epi32(127);
    const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    const __m256i second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(n, half), bias), 23);
    return {_mm256_mul_ps(_mm256_mul_ps(p.v, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second))};
}
// p * 2^n for the same n within -126..127.
inline F8 scale_by_normal_power8(F8 p, F8 shifted, F8 magic) {
    const __m256i n = _mm256_sub_epi32(_mm256_castps_si256(shifted.v), _mm256_castps_si256(magic.v));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23);
    return {_mm256_mul_ps(p.v, _mm256_castsi256_ps(power))};
}

#else

struct F8 {
    float v[8];
};
struct Mask8 {
    bool v[8];
};

inline std::uint32_t bits_of(float x) {
    std::uint32_t u;
    __builtin_memcpy(&u, &x, 4);
    return u;
}
inline float from_bits(std::uint32_t u) {
    float x;
    __builtin_memcpy(&x, &u, 4);
    return x;
}

template <class Function>
inline F8 each8(Function function) {
    F8 r;
    for (int i = 0; i < 8; ++i) r.v[i] = function(i);
    return r;
}
template <class Function>
inline Mask8 test8(Function function) {
    Mask8 r;
    for (int i = 0; i < 8; ++i) r.v[i] = function(i);
    return r;
}

inline F8 set8(float x) {
    return each8([&](int) { return x; });
}
inline F8 zero8() { return set8(0.0f); }
inline F8 load8(const float* p) {
    return each8([&](int i) { return p[i]; });
}
inline void store8(float* p, F8 a) {
    for (int i = 0; i < 8; ++i) p[i] = a.v[i];
}
inline F8 operator+(F8 a, F8 b) {
    return each8([&](int i) { return a.v[i] + b.v[i]; });
}
inline F8 operator-(F8 a, F8 b) {
    return each8([&](int i) { return a.v[i] - b.v[i]; });
}
inline F8 operator*(F8 a, F8 b) {
    return each8([&](int i) { return a.v[i] * b.v[i]; });
}
inline F8 operator/(F8 a, F8 b) {
    return each8([&](int i) { return a.v[i] / b.v[i]; });
}
inline F8 fma8(F8 a, F8 b, F8 c) {
    return each8([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
inline F8 max8(F8 a, F8 b) {
    return each8([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F8 min8(F8 a, F8 b) {
    return each8([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Mask8 above8(F8 a, F8 b) {
    return test8([&](int i) { return a.v[i] > b.v[i]; });
}
inline Mask8 equal8(F8 a, F8 b) {
    return test8([&](int i) { return a.v[i] == b.v[i]; });
}
inline Mask8 nan8(F8 a) {
    return test8([&](int i) { return a.v[i] != a.v[i]; });
}
inline Mask8 operator|(Mask8 a, Mask8 b) {
    return test8([&](int i) { return a.v[i] || b.v[i]; });
}
inline unsigned bits(Mask8 a) {
    unsigned r = 0;
    for (int i = 0; i < 8; ++i) r |= static_cast<unsigned>(a.v[i]) << i;
    return r;
}
inline F8 select8(Mask8 mask, F8 yes, F8 no) {
    return each8([&](int i) { return mask.v[i] ? yes.v[i] : no.v[i]; });
}
inline Mask8 first_lanes8(int count) {
    return test8([&](int i) { return i < count; });
}
inline F8 largest_magnitude8(F8 a, F8 x) {
    return each8([&](int i) {
        const std::uint32_t magnitude = bits_of(x.v[i]) & 0x7FFFFFFFu;
        return bits_of(a.v[i]) > magnitude ? a.v[i] : from_bits(magnitude);
    });
}
inline float largest_lane_bits8(F8 a) {
    std::uint32_t best = 0;
    for (int i = 0; i < 8; ++i) best = bits_of(a.v[i]) > best ? bits_of(a.v[i]) : best;
    return from_bits(best);
}
inline float half_to_float(std::uint16_t h) {
    const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
    const std::uint32_t exponent = (h >> 10) & 31u, mantissa = h & 1023u;
    if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24 is exact and normal in fp32
        return from_bits(sign | bits_of(static_cast<float>(mantissa) * 0x1p-24f));
    }
    if (exponent == 31) {  // infinity, or NaN made quiet
        return from_bits(sign | 0x7F800000u | (mantissa << 13) | (mantissa ? 0x00400000u : 0u));
    }
    return from_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}
inline F8 load8_half(const std::uint16_t* p) {
    return each8([&](int i) { return half_to_float(p[i]); });
}
inline F8 load8_int8(const std::int8_t* p) {
    return each8([&](int i) { return static_cast<float>(p[i]); });
}
inline F8 load8_bfloat(const std::uint16_t* p) {
    return each8([&](int i) { return from_bits(static_cast<std::uint32_t>(p[i]) << 16); });
}
inline F8 scale_by_power8(F8 p, F8 shifted, F8 magic) {
    return each8([&](int i) {
        const auto n = static_cast<std::int32_t>(bits_of(shifted.v[i]) - bits_of(magic.v[i]));
        const std::int32_t half = n >> 1;
        const auto power = [](std::int32_t e) {
            return from_bits(static_cast<std::uint32_t>(e + 127) << 23);
        };
        return p.v[i] * power(half) * power(n - half);
    });
}
inline F8 scale_by_normal_power8(F8 p, F8 shifted, F8 magic) {
    return each8([&](int i) {
        const std::uint32_t n = bits_of(shifted.v[i]) - bits_of(magic.v[i]);
        return p.v[i] * from_bits((n + 127u) << 23);
    });
}

#endif

// Sixteen lanes: one AVX-512 register, or two of eight. Lane i is the same number either way.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
#define QUICKDRAFT_LANES_AVX512 1

struct F16 {
    __m512 v;
};

inline F16 zero16() { return {_mm512_setzero_ps()}; }
inline F16 set16(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load16(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store16(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 fma16(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 max16(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F8 low_half(F16 a) { return {_mm512_castps512_ps256(a.v)}; }
inline F8 high_half(F16 a) { return {_mm512_extractf32x8_ps(a.v, 1)}; }
inline F16 keep_first16(F16 a, int count) {  // lanes from `count` on become 0
    const unsigned mask = count >= 16 ? 0xFFFFu : count <= 0 ? 0u : (1u << count) - 1u;
    return {_mm512_maskz_mov_ps(static_cast<__mmask16>(mask), a.v)};
}
inline F16 drop_first16(F16 a, int count) {
    const auto lanes = static_cast<__mmask16>(count >= 16 ? 0u : 0xFFFFu << (count > 0 ? count : 0));
    return {_mm512_maskz_mov_ps(lanes, a.v)};
}
inline F16 load16_half(const std::uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline F16 load16_int8(const std::int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline F16 load16_bfloat(const std::uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline F16 scale_by_normal_power16(F16 p, F16 shifted, F16 magic) {
    const __m512i n = _mm512_sub_epi32(_mm512_castps_si512(shifted.v), _mm512_castps_si512(magic.v));
    const __m512i power = _mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23);
    return {_mm512_mul_ps(p.v, _mm512_castsi512_ps(power))};
}

#else

struct F16 {
    F8 low, high;
};

inline F16 zero16() { return {zero8(), zero8()}; }
inline F16 set16(float x) {
    const F8 all = set8(x);
    return {all, all};
}
inline F16 load16(const float* p) { return {load8(p), load8(p + 8)}; }
inline void store16(float* p, F16 a) {
    store8(p, a.low);
    store8(p + 8, a.high);
}
inline F16 operator+(F16 a, F16 b) { return {a.low + b.low, a.high + b.high}; }
inline F16 operator-(F16 a, F16 b) { return {a.low - b.low, a.high - b.high}; }
inline F16 operator*(F16 a, F16 b) { return {a.low * b.low, a.high * b.high}; }
inline F16 fma16(F16 a, F16 b, F16 c) { return {fma8(a.low, b.low, c.low), fma8(a.high, b.high, c.high)}; }
inline F16 max16(F16 a, F16 b) { return {max8(a.low, b.low), max8(a.high, b.high)}; }
inline F8 low_half(F16 a) { return a.low; }
inline F8 high_half(F16 a) { return a.high; }
inline F16 keep_first16(F16 a, int count) {
    return {select8(first_lanes8(count), a.low, zero8()), select8(first_lanes8(count - 8), a.high, zero8())};
}
inline F16 drop_first16(F16 a, int count) {
    return {select8(first_lanes8(count), zero8(), a.low), select8(first_lanes8(count - 8), zero8(), a.high)};
}
inline F16 load16_half(const std::uint16_t* p) { return {load8_half(p), load8_half(p + 8)}; }
inline F16 load16_bfloat(const std::uint16_t* p) { return {load8_bfloat(p), load8_bfloat(p + 8)}; }
inline F16 scale_by_normal_power16(F16 p, F16 shifted, F16 magic) {
    return {scale_by_normal_power8(p.low, shifted.low, magic.low),
            scale_by_normal_power8(p.high, shifted.high, magic.high)};
}

#endif

// Lanes 0..count-1 of p, the rest zero.
inline F8 load8_first(const float* p, int count) {
    float padded[8] = {};
    for (int i = 0; i < count; ++i) padded[i] = p[i];
    return load8(padded);
}
inline void store8_first(float* p, F8 a, int count) {
    float padded[8];
    store8(padded, a);
    for (int i = 0; i < count; ++i) p[i] = padded[i];
}

// Fixed tree: (i, i+4), then (i, i+2), then (0, 1).
inline float sum8(F8 a) {
    float v[8];
    store8(v, a);
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}
inline float largest8(F8 a) {
    float v[8];
    store8(v, a);
    float best = v[0];
    for (int i = 1; i < 8; ++i) best = best > v[i] ? best : v[i];
    return best;
}

// exp(x) to about 2 units in the last place: x = n ln2 + r, a degree 6 polynomial in r (Cephes expf), times
// 2^n. NaN stays NaN, exp(0) is exactly 1.
template <class Lanes, class Set, class Fma, class Scale>
inline Lanes exp_lanes(Lanes x, Set set, Fma fma, Scale scale) {
    const Lanes magic = set(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const Lanes shifted = fma(x, set(1.44269504088896341f), magic);
    const Lanes n = shifted - magic;
    Lanes r = fma(n, set(-0.693359375f), x);
    r = fma(n, set(2.12194440e-4f), r);
    Lanes p = set(1.9875691500e-4f);
    p = fma(p, r, set(1.3981999507e-3f));
    p = fma(p, r, set(8.3334519073e-3f));
    p = fma(p, r, set(4.1665795894e-2f));
    p = fma(p, r, set(1.6666665459e-1f));
    p = fma(p, r, set(5.0000001201e-1f));
    p = fma(p, r * r, r) + set(1.0f);
    return scale(p, shifted, magic);
}
// Below -104 the result flushes to 0, above 89 it overflows to infinity.
inline F8 exp8(F8 x) {
    return exp_lanes(min8(set8(89.0f), max8(set8(-104.0f), x)), set8, fma8, scale_by_power8);
}
// For x <= 0, in fewer steps: below -87 the result stays at exp(-87), which is 1.6e-38.
inline F8 exp_below8(F8 x) { return exp_lanes(max8(set8(-87.0f), x), set8, fma8, scale_by_normal_power8); }
inline F16 exp_below16(F16 x) {
    return exp_lanes(max16(set16(-87.0f), x), set16, fma16, scale_by_normal_power16);
}

// Storage types of weights and KV caches. `store` rounds to nearest even.
struct Float32 {
    using Storage = float;
    static F8 load(const float* p) { return load8(p); }
    static F16 load_wide(const float* p) { return load16(p); }
    static float narrow(float x) { return x; }
};
struct Float16 {
    using Storage = std::uint16_t;
    static F8 load(const std::uint16_t* p) { return load8_half(p); }
    static F16 load_wide(const std::uint16_t* p) { return load16_half(p); }
    static std::uint16_t narrow(float x) {
#if defined(QUICKDRAFT_LANES_AVX2)
        return static_cast<std::uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
        const std::uint32_t u = bits_of(x), magnitude = u & 0x7FFFFFFFu;
        const auto sign = static_cast<std::uint16_t>((u >> 16) & 0x8000u);
        if (magnitude > 0x7F800000u) {
            return static_cast<std::uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
        }
        if (magnitude >= 0x477FF000u)
            return static_cast<std::uint16_t>(sign | 0x7C00u);  // rounds to infinity
        if (magnitude < 0x38800000u) {                          // subnormal or zero
            if (magnitude < 0x33000000u) return sign;
            const std::uint32_t shift = 126u - (magnitude >> 23);  // 14..24
            const std::uint32_t mantissa = (magnitude & 0x7FFFFFu) | 0x800000u;
            const std::uint32_t half = 1u << (shift - 1);
            const std::uint32_t rounded = (mantissa + (half - 1u) + ((mantissa >> shift) & 1u)) >> shift;
            return static_cast<std::uint16_t>(sign | rounded);
        }
        const std::uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
        return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
#endif
    }
};
struct BFloat16 {
    using Storage = std::uint16_t;
    static F8 load(const std::uint16_t* p) { return load8_bfloat(p); }
    static F16 load_wide(const std::uint16_t* p) { return load16_bfloat(p); }
    static std::uint16_t narrow(float x) {
        std::uint32_t u;
        __builtin_memcpy(&u, &x, 4);
        if ((u & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<std::uint16_t>((u >> 16) | 0x0040u);
        return static_cast<std::uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
    }
};
