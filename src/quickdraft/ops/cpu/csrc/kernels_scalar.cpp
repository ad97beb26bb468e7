// Plain C++, for any CPU: the readable twin of the AVX2 object, equal in bits.
#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace quickdraft {
namespace {
#include "lanes.h"
// lanes.h comes first
#include "activation_kernels.h"
#include "attention_kernels.h"
#include "pair_lanes.h"
// pair_lanes.h comes before
#include "attention_int8_kernels.h"
#include "dot_kernels.h"
#include "gumbel_kernels.h"
#include "linear_kernels.h"
// linear_kernels.h comes before
#include "embed_kernels.h"
#include "row_kernels.h"
// row_kernels.h comes before
#include "recurrent_kernels.h"
}  // namespace

const Kernels kernels_scalar = {"scalar",         6,
                                quantise_row,     linear,
                                embed_row,        rms_norm_row,
                                swiglu,           rope_row,
                                causal_conv,      l2_norm,
                                delta_gates,      delta_row,
                                gated_norm_row,   sigmoid_gate,
                                kv_write,         kv_write_int8,
                                attention_span,   attention_span_int8,
                                attention_merge,  attention_finish,
                                grouped_conv_row, argmax,
                                first_above,      gumbel};

}  // namespace quickdraft
