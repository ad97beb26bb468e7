// The kernel table: one set of function pointers per instruction set, picked once at run time.
//
// Every object (scalar, AVX2) gives the same bits for every function here; the sources are shared
// (*_kernels.h over lanes.h), only the lanes differ. Functions trust their arguments: ops check them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quickdraft {

constexpr int block_tokens = 16;  // KV block
constexpr int span_tokens = 256;  // attention span
constexpr int tile_outputs = 16;  // outputs of a packed weight tile
constexpr int group_inputs = 32;  // inputs per scale
constexpr int row_block = 4;      // rows whose quantised groups lie side by side
constexpr int chunk_queries = 4;  // query rows attended together
constexpr int state_extra = 8;    // floats behind o[D] of an attention state: maximum, total, padding

enum class WeightFormat { float32, float16, bfloat16, int8, int4, int4_minimum };
enum class KVType { float32, float16, bfloat16 };
enum class RopeStyle { interleaved, half };

// A weight [outputs, inputs], packed in tiles of 16 outputs (outputs padded with zeros).
//   float32, float16, bfloat16   tile: [inputs][16 outputs]
//   int8           tile: per group of 32 inputs, codes [8][16 outputs][4 inputs], fp16 scales [16]
//   int4           tile: per group, codes [4][16 outputs][4 bytes], fp16 scales [16]; byte b of step j holds
//                  input 8j + b in its low half, input 8j + 4 + b in its high half
//   int4_minimum   the same, then fp16 minimums [16]
struct PackedView {
    WeightFormat format;
    int outputs, inputs;
    std::size_t tile_bytes;
    const std::uint8_t* data;
};

// Quantised rows lie in blocks of 4: codes [blocks][inputs / 32][4 rows][32], scales and corrections
// [blocks][inputs / 32][4 rows]. The correction of a group is scale * sum(codes) where the weight has
// minimums, 8 * sum(codes) for int4 without, unused for int8.
struct LinearArguments {
    PackedView weight;
    int rows;
    const float* x;
    const std::int8_t* codes;
    const float* scales;
    const float* corrections;
    const float* bias;      // [outputs] or null
    const float* residual;  // [rows, outputs] or null; may be out
    float* out;
};

// One span of up to 256 positions for up to 4 query rows that read the same kv head.
struct SpanArguments {
    KVType type;
    const void* keys;    // one layer, [blocks, kv_heads, D, 16]
    const void* values;  // one layer, [blocks, kv_heads, 16, D]
    int kv_heads, kv_head, head_dim;
    const std::int32_t* blocks;  // block numbers of this span's positions
    float scale;
    int queries;
    const float* query[chunk_queries];
    int visible[chunk_queries];   // positions of the span each query row sees, 1..256; 0: none, state
                                  // untouched
    float* state[chunk_queries];  // out: o[D], then maximum and total
};

struct GumbelBest {
    double score;
    std::int64_t id;
    bool nan;
};

struct Kernels {
    const char* name;
    // One row's codes, scales and corrections, at their first group; groups are a block of rows apart.
    void (*quantise_row)(WeightFormat format, const float* x, int inputs, std::int8_t* codes, float* scales,
                         float* corrections);
    void (*linear)(const LinearArguments& arguments, int first_tile, int last_tile);
    void (*embed_row)(const PackedView& table, int row, float* out);
    void (*rms_norm_row)(const float* x, const float* weight, int width, float eps, float* out);
    void (*swiglu)(const float* gate, const float* up, int count, float* out);
    void (*rope_row)(float* x, int heads, int head_dim, const float* cosines, const float* sines, int half,
                     RopeStyle style);
    // Stores one head of one row: keys at stride 16, values contiguous.
    void (*kv_write)(KVType type, const float* key, const float* value, int head_dim, void* keys,
                     void* values);
    void (*attention_span)(const SpanArguments& arguments, float* scratch);  // scratch: 4 * 256 floats
    void (*attention_merge)(float* state, const float* span, int head_dim);
    void (*attention_finish)(const float* state, int head_dim, float* out);
    // Index of the first largest value of x[0, count), or -1 when any is NaN.
    int (*argmax)(const float* x, int count);
    int (*first_above)(const float* x, int from, int to, float threshold);  // `to` when none is
    GumbelBest (*gumbel)(const float* row, const std::int64_t* ids, int from, int to, double temperature,
                         std::uint64_t seed, std::uint64_t position);
};

extern const Kernels kernels_scalar;
#if defined(QUICKDRAFT_AVX2)
extern const Kernels kernels_avx2;
#endif

}  // namespace quickdraft
