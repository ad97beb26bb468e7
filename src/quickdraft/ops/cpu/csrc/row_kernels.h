// rms_norm, swiglu, rope, argmax and the scan behind top: one row at a time.
// Included only by kernels_*.cpp, inside their anonymous namespace.

// The sum of squares has 16 lanes (input i goes to lane i % 16, ascending), then lanes i and i + 8 are added,
// then the tree of sum8.
void rms_norm_row(const float* x, const float* weight, int width, float eps, float* out) {
    F8 low = zero8(), high = zero8();
    const int whole = width / 16 * 16, rest = width - whole;
    for (int i = 0; i < whole; i += 16) {
        const F8 a = load8(x + i), b = load8(x + i + 8);
        low = fma8(a, a, low);
        high = fma8(b, b, high);
    }
    if (rest > 0) {
        const F8 a = load8_first(x + whole, rest < 8 ? rest : 8);
        const F8 b = load8_first(x + whole + (rest < 8 ? 0 : 8), rest < 8 ? 0 : rest - 8);
        low = fma8(a, a, low);
        high = fma8(b, b, high);
    }
    const float mean = sum8(low + high) / static_cast<float>(width);
    const F8 scale = set8(1.0f / __builtin_sqrtf(mean + eps));
    int i = 0;
    for (; i + 8 <= width; i += 8) store8(out + i, load8(x + i) * scale * load8(weight + i));
    if (i < width) {
        store8_first(out + i, load8_first(x + i, width - i) * scale * load8_first(weight + i, width - i),
                     width - i);
    }
}

inline F8 silu_times8(F8 gate, F8 up) { return gate / (set8(1.0f) + exp8(zero8() - gate)) * up; }

void swiglu(const float* gate, const float* up, int count, float* out) {
    int i = 0;
    for (; i + 8 <= count; i += 8) store8(out + i, silu_times8(load8(gate + i), load8(up + i)));
    if (i < count) {
        const int rest = count - i;
        store8_first(out + i, silu_times8(load8_first(gate + i, rest), load8_first(up + i, rest)), rest);
    }
}

// (a, b) -> (fma(a, cos, -(b sin)), fma(b, cos, a sin)).
void rope_row(float* x, int heads, int head_dim, const float* cosines, const float* sines, int half,
              RopeStyle style) {
    for (int head = 0; head < heads; ++head, x += head_dim) {
        if (style == RopeStyle::half) {
            for (int i = 0; i < half; ++i) {
                const float a = x[i], b = x[half + i];
                x[i] = __builtin_fmaf(a, cosines[i], -(b * sines[i]));
                x[half + i] = __builtin_fmaf(b, cosines[i], a * sines[i]);
            }
        } else {
            for (int i = 0; i < half; ++i) {
                const float a = x[2 * i], b = x[2 * i + 1];
                x[2 * i] = __builtin_fmaf(a, cosines[i], -(b * sines[i]));
                x[2 * i + 1] = __builtin_fmaf(b, cosines[i], a * sines[i]);
            }
        }
    }
}

// Two passes: the largest value (order does not matter), then the first place that holds it.
int argmax(const float* x, int count) {
    const float lowest = -__builtin_inff();
    F8 best[4] = {set8(lowest), set8(lowest), set8(lowest), set8(lowest)};
    Mask8 broken = nan8(zero8());
    int i = 0;
    for (; i + 32 <= count; i += 32) {
        for (int k = 0; k < 4; ++k) {
            const F8 value = load8(x + i + 8 * k);
            broken = broken | nan8(value);
            best[k] = max8(best[k], value);
        }
    }
    float largest = largest8(max8(max8(best[0], best[1]), max8(best[2], best[3])));
    bool any_nan = bits(broken) != 0;
    for (; i < count; ++i) {
        any_nan |= x[i] != x[i];
        largest = largest > x[i] ? largest : x[i];
    }
    if (any_nan) return -1;
    const F8 wanted = set8(largest);
    i = 0;
    for (; i + 8 <= count; i += 8) {
        const unsigned found = bits(equal8(load8(x + i), wanted));
        if (found != 0) return i + __builtin_ctz(found);
    }
    while (x[i] != largest) ++i;
    return i;
}

int first_above(const float* x, int from, int to, float threshold) {
    const F8 bar = set8(threshold);
    int i = from;
    for (; i + 8 <= to; i += 8) {
        const unsigned found = bits(above8(load8(x + i), bar));
        if (found != 0) return i + __builtin_ctz(found);
    }
    for (; i < to; ++i) {
        if (x[i] > threshold) return i;
    }
    return to;
}

// Groups first..last-1 of one row of grouped_conv (ops/interface.py); `before` null: no row before it,
// `residual` null: none.
void grouped_conv_row(const float* x, const float* before, const float* base, const float* deltas, int groups,
                      int size, int first, int last, const float* residual, float* out) {
    const int width = groups * size;
    for (int group = first; group < last; ++group) {
        const float now = deltas[group], earlier = deltas[groups + group];
        const int end = (group + 1) * size;
        int c = group * size;
        for (; c + 8 <= end; c += 8) {
            F8 sum = (load8(base + c) + set8(now)) * load8(x + c);
            if (before != nullptr) {
                sum = fma8(load8(base + width + c) + set8(earlier), load8(before + c), sum);
            }
            store8(out + c, residual != nullptr ? sum + load8(residual + c) : sum);
        }
        for (; c < end; ++c) {
            float sum = (base[c] + now) * x[c];
            if (before != nullptr) sum = __builtin_fmaf(base[width + c] + earlier, before[c], sum);
            out[c] = residual != nullptr ? sum + residual[c] : sum;
        }
    }
}
