// The kernel table: one set of function pointers per instruction set, picked once at run time.
//
// Every object (scalar, AVX2, AVX-512) gives the same bits for every function here; the sources are shared
// (*_kernels.h over lanes.h), only the lanes differ. Functions trust their arguments: ops check them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quickdraft {

constexpr int block_tokens = 16;  // KV block
constexpr int span_tokens = 256;  // attention span
constexpr int tile_outputs = 16;  // outputs of a packed weight tile
constexpr int row_block = 4;      // rows whose quantised groups lie side by side
constexpr int most_queries = 8;   // query rows attended together, at most
constexpr int most_head_dim = 256;
constexpr int state_extra = 8;  // floats behind o[D] of an attention state: maximum, total, padding

enum class WeightFormat {
    float32,
    float16,
    bfloat16,
    int8,
    int8_zero,
    int8_zero_bfloat16,
    int4,
    int4_zero,
    int4_zero_bfloat16,
    int4_minimum,
    int4_minimum_two_level,
    int5,
    int5_minimum,
    int5_minimum_two_level,
    int6_two_level_sixteen
};
enum class KVType { float32, float16, bfloat16, int8 };
enum class RopeStyle { interleaved, half };

// One group of a quantised tile: codes, scales [16 outputs], minimums [16] where there are some.
//   8 bits   codes int8 [group / 4][16 outputs][4 inputs]
//   4 bits   codes [group / 8][16 outputs][4 bytes]; byte b of step j holds input 8j + b in its low half,
//   input
//            8j + 4 + b in its high half
//   5, 6     the low four bits like 4 bits, then the high ones [16 outputs][4 bytes]: the 1 or 2 bits of
//   input
//            4i + b lie in byte b, the i-th from its low end
// Codes of fewer than 8 bits are stored from 0 on; without minimums `offset` is taken off.
// Scales and minimums are fp16; with two levels int8 steps, and the fp16 numbers they multiply (scales [16],
// minimums [16]) lie before the first of every 256 inputs' groups. With zero points (`zero`) a minimum is
// scale * -zero, exact in fp32, and what lies there is -zero: int8, or fp16 for codes of 8 bits, whose zeros
// are -128..128. `bfloat16`: the scales' type instead of fp16.
struct GroupLayout {
    int inputs, bits;  // inputs 0: a dense format
    bool minimum, two_level;
    bool zero = false, bfloat16 = false;

    constexpr int offset() const { return minimum || bits == 8 ? 0 : 1 << (bits - 1); }
    // What is taken off a stored code, as an unsigned byte, to get the code: 8 bits are stored signed, and
    // become unsigned in kernels that need it.
    constexpr int unsigned_offset() const { return bits == 8 && !minimum ? 128 : offset(); }
    constexpr int high_bits() const { return bits == 8 ? 0 : bits - 4; }
    constexpr int high_at() const { return inputs * tile_outputs / 2; }
    constexpr int scales_at() const { return inputs * tile_outputs * bits / 8; }
    constexpr int minimums_at() const { return scales_at() + numbers_bytes(); }
    constexpr int numbers_bytes() const { return tile_outputs * (two_level ? 1 : 2); }
    constexpr int minimums_bytes() const {
        return !minimum ? 0 : zero && bits < 8 ? tile_outputs : numbers_bytes();
    }
    constexpr int bytes() const { return minimums_at() + minimums_bytes(); }
    constexpr int sharing() const { return two_level ? 256 / inputs : 1; }  // groups that share fp16 numbers
    constexpr int shared_bytes() const { return two_level ? 2 * tile_outputs * (minimum ? 2 : 1) : 0; }
};

constexpr GroupLayout layout_of(WeightFormat format) {
    switch (format) {
        case WeightFormat::int8:
            return {32, 8, false, false};
        case WeightFormat::int8_zero:
            return {32, 8, true, false, true};
        case WeightFormat::int8_zero_bfloat16:
            return {32, 8, true, false, true, true};
        case WeightFormat::int4:
            return {32, 4, false, false};
        case WeightFormat::int4_zero:
            return {32, 4, true, false, true};
        case WeightFormat::int4_zero_bfloat16:
            return {32, 4, true, false, true, true};
        case WeightFormat::int4_minimum:
            return {32, 4, true, false};
        case WeightFormat::int4_minimum_two_level:
            return {32, 4, true, true};
        case WeightFormat::int5:
            return {32, 5, false, false};
        case WeightFormat::int5_minimum:
            return {32, 5, true, false};
        case WeightFormat::int5_minimum_two_level:
            return {32, 5, true, true};
        case WeightFormat::int6_two_level_sixteen:
            return {16, 6, false, true};
        default:
            return {0, 0, false, false};
    }
}

// A weight [outputs, inputs], packed in tiles of 16 outputs (outputs padded with zeros).
//   float32, float16, bfloat16   tile: [inputs][16 outputs]
//   int8, int4, int5, int6, ...  tile: groups of 32 inputs (16: "sixteen"), see GroupLayout
struct PackedView {
    WeightFormat format;
    int outputs, inputs;
    std::size_t tile_bytes;
    const std::uint8_t* data;
    const std::int32_t* order = nullptr;  // [inputs]: the i-th packed input is this one of x; null: the same
};

// Quantised rows lie in blocks of 4: codes [blocks][inputs / group][4 rows][group], scales and corrections
// [blocks][inputs / group][4 rows], where group is the weight's. The correction of a group is
// scale * sum(codes) where the weight has minimums, else unsigned_offset * sum(codes), see GroupLayout.
struct LinearArguments {
    PackedView weight;
    int rows;
    const float* x;
    const std::int8_t* codes;
    const float* scales;
    const float* corrections;
    const float* bias;      // [outputs] or null
    const float* residual;  // rows of [outputs], or null; may be out
    float* out;
    std::size_t stride;  // floats between rows of residual and out
};

// One kv head of a block of int8 keys, or values: a byte per element, then a float scale per slot.
constexpr std::size_t int8_head_bytes(int head_dim) {
    return static_cast<std::size_t>(head_dim + sizeof(float)) * block_tokens;
}

// One span of up to 256 positions for up to Kernels::queries query rows that read the same kv head.
struct SpanArguments {
    KVType type;
    const void* keys;    // one layer, [blocks, kv_heads, D, 16]; int8: [blocks, kv_heads, int8_head_bytes]
    const void* values;  // one layer, [blocks, kv_heads, 16, D]; int8: as the keys
    int kv_heads, kv_head, head_dim;
    const std::int32_t* blocks;  // block numbers of this span's positions
    int hidden;                  // leading positions of the span no query row sees; below every `visible`
    // Keys this thread reads next, fetched while it works on this span: block numbers (null: unknown) and
    // head.
    const std::int32_t* next_blocks;
    int next_count, next_kv_head;
    float scale;
    int queries;
    const float* query[most_queries];
    int visible[most_queries];   // positions of the span each query row sees, 1..256; 0: none, state
                                 // untouched
    float* state[most_queries];  // out: o[D], then maximum and total
};

// One row of the delta rule over some value columns of one head's state; `query` null: no output is wanted.
struct DeltaRow {
    const float* key;    // [key_dim]
    const float* query;  // [key_dim]
    const float* value;  // the columns
    float beta, keep;
    float* out;  // the columns
};

struct GumbelBest {
    double score;
    std::int64_t id;
    bool nan;
};

struct Kernels {
    const char* name;
    int queries;  // query rows attended together
    // One row's codes, scales and corrections, at their first group; groups are a block of rows apart.
    // `group` inputs share a scale (32 or 16); `offset` is the weight's unsigned_offset, 0 when it has
    // minimums.
    void (*quantise_row)(int group, int offset, const float* x, int inputs, std::int8_t* codes, float* scales,
                         float* corrections);
    void (*linear)(const LinearArguments& arguments, int first_tile, int last_tile);
    void (*embed_row)(const PackedView& table, int row, float* out);
    void (*rms_norm_row)(const float* x, const float* weight, int width, float eps, float* out);
    void (*swiglu)(const float* gate, const float* up, int count, float* out);
    void (*rope_row)(float* x, int heads, int head_dim, const float* cosines, const float* sines, int half,
                     RopeStyle style);
    // Channels from..to-1 (a multiple of 8) of one row: out = silu(sum_j taps[j][c] rows[j][c]), taps
    // [4, channels], the current row last.
    void (*causal_conv)(const float* const* rows, const float* taps, int channels, int from, int to,
                        float* out);
    // out = x * scale / sqrt(sum(x^2) + eps); width is a multiple of 8.
    void (*l2_norm)(const float* x, int width, float eps, float scale, float* out);
    // beta = sigmoid(b), keep = exp(rate * softplus(a + bias)), of one row's heads.
    void (*delta_gates)(const float* b, const float* a, const float* rate, const float* bias, int heads,
                        float* beta, float* keep);
    // state [key_dim][width], width 8, 16, 24 or 32.
    void (*delta_row)(float* state, int key_dim, int width, const DeltaRow& row);
    void (*gated_norm_row)(const float* x, const float* gate, const float* weight, int width, float eps,
                           float* out);
    void (*sigmoid_gate)(const float* x, const float* gate, int count, float* out);
    // Stores one head of one row: keys at stride 16, values contiguous.
    void (*kv_write)(KVType type, const float* key, const float* value, int head_dim, void* keys,
                     void* values);
    // The same where the cache is int8: keys and values are those of one kv head of the slot's block.
    void (*kv_write_int8)(const float* key, const float* value, int head_dim, int slot, void* keys,
                          void* values);
    void (*attention_span)(const SpanArguments& arguments, float* scratch);  // scratch: queries * 256 floats
    void (*attention_span_int8)(const SpanArguments& arguments, float* scratch);
    void (*attention_merge)(float* state, const float* span, int head_dim);
    void (*attention_finish)(const float* state, int head_dim, float* out);
    void (*grouped_conv_row)(const float* x, const float* before, const float* base, const float* deltas,
                             int groups, int size, int first, int last, const float* residual, float* out);
    // Index of the first largest value of x[0, count), or -1 when any is NaN.
    int (*argmax)(const float* x, int count);
    int (*first_above)(const float* x, int from, int to, float threshold);  // `to` when none is
    GumbelBest (*gumbel)(const float* row, const std::int64_t* ids, int from, int to, double temperature,
                         std::uint64_t seed, std::uint64_t position);
};

extern const Kernels kernels_scalar;
#if defined(QUICKDRAFT_AVX2)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

}  // namespace quickdraft
