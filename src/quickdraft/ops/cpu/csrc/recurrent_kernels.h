// causal_conv, the gated delta rule and the gates around it.
// Included only by kernels_*.cpp, inside their anonymous namespace, after row_kernels.h.

inline F8 sigmoid8(F8 x) { return set8(1.0f) / (set8(1.0f) + exp8(zero8() - x)); }
inline F8 silu8(F8 x) { return x / (set8(1.0f) + exp8(zero8() - x)); }

// One fma chain over the taps, the oldest row first.
void causal_conv(const float* const* rows, const float* taps, int channels, int from, int to, float* out) {
    for (int c = from; c < to; c += 8) {
        F8 sum = zero8();
        for (int j = 0; j < 4; ++j) sum = fma8(load8(taps + j * channels + c), load8(rows[j] + c), sum);
        store8(out + c, silu8(sum));
    }
}

// The sum of squares has 16 lanes like rms_norm_row's (the last 8 idle where 8 inputs are left).
void l2_norm(const float* x, int width, float eps, float scale, float* out) {
    F8 low = zero8(), high = zero8();
    int i = 0;
    for (; i + 16 <= width; i += 16) {
        const F8 a = load8(x + i), b = load8(x + i + 8);
        low = fma8(a, a, low);
        high = fma8(b, b, high);
    }
    if (i < width) {
        const F8 a = load8(x + i);
        low = fma8(a, a, low);
    }
    const F8 factor = set8(scale / __builtin_sqrtf(sum8(low + high) + eps));
    for (i = 0; i < width; i += 8) store8(out + i, load8(x + i) * factor);
}

// max(x, 0) + log(1 + exp(-|x|)); log(1 + y) = 2 artanh(z), z = y / (2 + y) up to 1/3, as a series to z^17.
inline F8 softplus8(F8 x) {
    const F8 negative = zero8() - x;
    const F8 y = exp8(min8(x, negative));
    const F8 z = y / (set8(2.0f) + y), square = z * z;
    F8 series = set8(1.0f / 17.0f);
    const float terms[] = {1.0f / 15.0f, 1.0f / 13.0f, 1.0f / 11.0f, 1.0f / 9.0f,
                           1.0f / 7.0f,  1.0f / 5.0f,  1.0f / 3.0f,  1.0f};
    for (const float term : terms) series = fma8(series, square, set8(term));
    return max8(x, zero8()) + set8(2.0f) * z * series;
}

void delta_gates(const float* b, const float* a, const float* rate, const float* bias, int heads, float* beta,
                 float* keep) {
    for (int h = 0; h < heads; h += 8) {
        const int count = heads - h < 8 ? heads - h : 8;
        const F8 step = softplus8(load8_first(a + h, count) + load8_first(bias + h, count));
        store8_first(beta + h, sigmoid8(load8_first(b + h, count)), count);
        store8_first(keep + h, exp8(load8_first(rate + h, count) * step), count);
    }
}

// Two passes over the tile, which lies in the first cache: what it holds for the key (two chains per column,
// even and odd inputs, then added), then the update and, with what it has become, the output.
template <int lanes, bool wanted>
inline void delta_tile(float* state, int key_dim, const DeltaRow& row) {
    constexpr int width = 8 * lanes;
    F8 even[lanes], odd[lanes], update[lanes], sum[lanes];
#pragma GCC unroll 4
    for (int n = 0; n < lanes; ++n) even[n] = odd[n] = sum[n] = zero8();
    for (int i = 0; i < key_dim; i += 2) {
        const F8 first = set8(row.key[i]), second = set8(row.key[i + 1]);
        const float* here = state + i * width;
#pragma GCC unroll 4
        for (int n = 0; n < lanes; ++n) {
            even[n] = fma8(first, load8(here + 8 * n), even[n]);
            odd[n] = fma8(second, load8(here + width + 8 * n), odd[n]);
        }
    }
    const F8 keep = set8(row.keep), beta = set8(row.beta);
#pragma GCC unroll 4
    for (int n = 0; n < lanes; ++n) {
        update[n] = beta * (load8(row.value + 8 * n) - keep * (even[n] + odd[n]));
    }
    for (int i = 0; i < key_dim; ++i) {
        const F8 key = set8(row.key[i]);
        F8 query = zero8();
        if (wanted) query = set8(row.query[i]);
        float* here = state + i * width;
#pragma GCC unroll 4
        for (int n = 0; n < lanes; ++n) {
            const F8 next = fma8(key, update[n], keep * load8(here + 8 * n));
            store8(here + 8 * n, next);
            if (wanted) sum[n] = fma8(query, next, sum[n]);
        }
    }
    if (!wanted) return;
#pragma GCC unroll 4
    for (int n = 0; n < lanes; ++n) store8(row.out + 8 * n, sum[n]);
}

template <int lanes>
inline void delta_as(float* state, int key_dim, const DeltaRow& row) {
    if (row.query != nullptr) {
        delta_tile<lanes, true>(state, key_dim, row);
    } else {
        delta_tile<lanes, false>(state, key_dim, row);
    }
}

void delta_row(float* state, int key_dim, int width, const DeltaRow& row) {
    switch (width) {
        case 8:
            return delta_as<1>(state, key_dim, row);
        case 16:
            return delta_as<2>(state, key_dim, row);
        case 24:
            return delta_as<3>(state, key_dim, row);
        default:
            return delta_as<4>(state, key_dim, row);
    }
}

void gated_norm_row(const float* x, const float* gate, const float* weight, int width, float eps,
                    float* out) {
    rms_norm_row(x, weight, width, eps, out);
    for (int i = 0; i < width; i += 8) store8(out + i, load8(out + i) * silu8(load8(gate + i)));
}

void sigmoid_gate(const float* x, const float* gate, int count, float* out) {
    int i = 0;
    for (; i + 8 <= count; i += 8) store8(out + i, load8(x + i) * sigmoid8(load8(gate + i)));
    if (i < count) {
        const int rest = count - i;
        store8_first(out + i, load8_first(x + i, rest) * sigmoid8(load8_first(gate + i, rest)), rest);
    }
}
