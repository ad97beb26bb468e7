// Peak loops for x86-64, each compiled for its own instruction set by function attribute; never called where
// the CPU lacks it.
//
// Twelve independent sums hide the latency of a fused multiply-add (4 to 5 cycles, two a cycle) and fit into
// 16 registers with two operands. They are variables and no array, which compilers would keep in memory.
#include "peaks.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#include <cstddef>

namespace quickdraft {

namespace {

constexpr int sums = 12;

#define FOR_AVX2 __attribute__((target("avx2,fma")))
#define TWELVE(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define ALL_SUMS sum0, sum1, sum2, sum3, sum4, sum5, sum6, sum7, sum8, sum9, sum10, sum11

// The sum of all lanes, which lie at `data` in memory.
template <class Lane>
std::int64_t total_of(const void* data, std::size_t bytes) {
    double total = 0;
    for (std::size_t at = 0; at < bytes; at += sizeof(Lane)) {
        Lane lane;
        __builtin_memcpy(&lane, static_cast<const char*>(data) + at, sizeof(Lane));
        total += static_cast<double>(lane);
    }
    return static_cast<std::int64_t>(total);
}

// maddubs, then add: 32 multiply-adds in two instructions. A kernel may do this while its int16 sums hold.
FOR_AVX2 std::int64_t int8_narrow(std::int64_t iterations) {
    __m256i a = _mm256_set1_epi8(1), b = a, zero = _mm256_setzero_si256();
#define START(i) __m256i sum##i = zero;
#define STEP(i)                \
    QUICKDRAFT_OPAQUE(a, "x"); \
    sum##i = _mm256_add_epi16(sum##i, _mm256_maddubs_epi16(a, b));
    TWELVE(START)
    for (; iterations > 0; --iterations) {
        TWELVE(STEP)
    }
#undef STEP
    const __m256i all[] = {ALL_SUMS};
    return total_of<std::int16_t>(all, sizeof(all));
}

// maddubs, madd by ones, add: 32 multiply-adds in three instructions, sums in int32.
FOR_AVX2 std::int64_t int8_wide(std::int64_t iterations) {
    __m256i a = _mm256_set1_epi8(1), b = a, ones = _mm256_set1_epi16(1), zero = _mm256_setzero_si256();
#define STEP(i)                \
    QUICKDRAFT_OPAQUE(a, "x"); \
    sum##i = _mm256_add_epi32(sum##i, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
    TWELVE(START)
    for (; iterations > 0; --iterations) {
        TWELVE(STEP)
    }
#undef STEP
    const __m256i all[] = {ALL_SUMS};
    return total_of<std::int32_t>(all, sizeof(all));
}

FOR_AVX2 std::int64_t fp32_fma(std::int64_t iterations) {
    __m256 a = _mm256_set1_ps(1.0f), b = a, zero = _mm256_setzero_ps();
    QUICKDRAFT_OPAQUE(b, "x");
#undef START
#define START(i) __m256 sum##i = zero;
#define STEP(i)                \
    QUICKDRAFT_OPAQUE(a, "x"); \
    sum##i = _mm256_fmadd_ps(a, b, sum##i);
    TWELVE(START)
    for (; iterations > 0; --iterations) {
        TWELVE(STEP)
    }
#undef STEP
    const __m256 all[] = {ALL_SUMS};
    return total_of<float>(all, sizeof(all));
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define QUICKDRAFT_VNNI_PEAKS 1

__attribute__((target("avx2,fma,avxvnni"))) std::int64_t int8_avx_vnni(std::int64_t iterations) {
    __m256i a = _mm256_set1_epi8(1), b = a, zero = _mm256_setzero_si256();
#undef START
#define START(i) __m256i sum##i = zero;
#define STEP(i)                \
    QUICKDRAFT_OPAQUE(a, "x"); \
    sum##i = _mm256_dpbusd_avx_epi32(sum##i, a, b);
    TWELVE(START)
    for (; iterations > 0; --iterations) {
        TWELVE(STEP)
    }
#undef STEP
    const __m256i all[] = {ALL_SUMS};
    return total_of<std::int32_t>(all, sizeof(all));
}

__attribute__((target("avx512f,avx512vnni"))) std::int64_t int8_avx512_vnni(std::int64_t iterations) {
    __m512i a = _mm512_set1_epi32(0x01010101), b = a, zero = _mm512_setzero_si512();
#undef START
#define START(i) __m512i sum##i = zero;
#define STEP(i)                \
    QUICKDRAFT_OPAQUE(a, "v"); \
    sum##i = _mm512_dpbusd_epi32(sum##i, a, b);
    TWELVE(START)
    for (; iterations > 0; --iterations) {
        TWELVE(STEP)
    }
#undef STEP
    const __m512i all[] = {ALL_SUMS};
    return total_of<std::int32_t>(all, sizeof(all));
}

__attribute__((target("avx512f"))) std::int64_t fp32_avx512(std::int64_t iterations) {
    __m512 a = _mm512_set1_ps(1.0f), b = a, zero = _mm512_setzero_ps();
    QUICKDRAFT_OPAQUE(b, "v");
#undef START
#define START(i) __m512 sum##i = zero;
#define STEP(i)                \
    QUICKDRAFT_OPAQUE(a, "v"); \
    sum##i = _mm512_fmadd_ps(a, b, sum##i);
    TWELVE(START)
    for (; iterations > 0; --iterations) {
        TWELVE(STEP)
    }
#undef STEP
    const __m512 all[] = {ALL_SUMS};
    return total_of<float>(all, sizeof(all));
}

// CPUID leaf 7, subleaf 1, EAX bit 4 (Intel SDM); AVX2 being usable says that the system keeps the registers.
bool has_avx_vnni() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1u) != 0;
}
bool has_avx512() { return __builtin_cpu_supports("avx512f"); }
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

#endif

constexpr PeakLoop loops[] = {
    {"int8, int16 sums", "avx2", true, 32 * sums, int8_narrow, has_avx2},
    {"int8, int32 sums", "avx2", true, 32 * sums, int8_wide, has_avx2},
    {"fp32", "avx2", false, 8 * sums, fp32_fma, has_avx2},
#if defined(QUICKDRAFT_VNNI_PEAKS)
    {"int8, int32 sums", "avx-vnni", true, 32 * sums, int8_avx_vnni, has_avx_vnni},
    {"int8, int32 sums", "avx512-vnni", true, 64 * sums, int8_avx512_vnni, has_avx512_vnni},
    {"fp32", "avx512", false, 16 * sums, fp32_avx512, has_avx512},
#endif
};

}  // namespace

const PeakLoop* x86_peaks(int& count) {
    count = static_cast<int>(sizeof(loops) / sizeof(loops[0]));
    return loops;
}

}  // namespace quickdraft

#else

namespace quickdraft {

const PeakLoop* x86_peaks(int& count) {
    count = 0;
    return nullptr;
}

}  // namespace quickdraft

#endif
