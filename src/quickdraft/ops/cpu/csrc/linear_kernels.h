// Linear. Outputs are the lanes; K is never split; every output is one
// fp32 chain over groups (or inputs) in ascending order, so the number of rows in a call changes no bit.
// Included only by kernels_*.cpp, inside their anonymous namespace, after dot_kernels.h.

constexpr int row_chunk = 64;  // rows that pass over a weight tile while it is in the first-level cache

// Bias, then residual, once at the end; outputs beyond the last are padding of the tile.
inline void finish_tile(const LinearArguments& a, int row, int tile, const F8 (&sum)[2]) {
#pragma GCC unroll 8
    for (int half = 0; half < 2; ++half) {
        const int output = tile * tile_outputs + half * 8;
        const int count = a.weight.outputs - output < 8 ? a.weight.outputs - output : 8;
        if (count <= 0) return;
        const std::size_t at = row * a.stride + output;
        F8 value = sum[half];
        if (count == 8) {
            if (a.bias != nullptr) value = value + load8(a.bias + output);
            if (a.residual != nullptr) value = value + load8(a.residual + at);
            store8(a.out + at, value);
        } else {
            if (a.bias != nullptr) value = value + load8_first(a.bias + output, count);
            if (a.residual != nullptr) value = value + load8_first(a.residual + at, count);
            store8_first(a.out + at, value, count);
        }
    }
}

// Scales or minimums of 8 outputs: `numbers` points at the group's, `shared` at what they multiply.
template <bool two_level>
inline F8 group_numbers(const std::uint8_t* numbers, const std::uint8_t* shared, int half) {
    if constexpr (two_level) {  // exact: 11 bits by 7
        return load8_half(reinterpret_cast<const std::uint16_t*>(shared) + 8 * half) *
               load8_int8(reinterpret_cast<const std::int8_t*>(numbers) + 8 * half);
    } else {
        return load8_half(reinterpret_cast<const std::uint16_t*>(numbers) + 8 * half);
    }
}

// The scales of 8 outputs of a group, and their minimums: scale * -zero where there are zero points.
template <WeightFormat format>
inline F8 group_scale(const std::uint8_t* group, const std::uint8_t* shared, int half) {
    constexpr GroupLayout layout = layout_of(format);
    const std::uint8_t* numbers = group + layout.scales_at();
    if constexpr (layout.bfloat16) {
        return load8_bfloat(reinterpret_cast<const std::uint16_t*>(numbers) + 8 * half);
    } else {
        return group_numbers<layout.two_level>(numbers, shared, half);
    }
}

template <WeightFormat format>
inline F8 group_minimum(const std::uint8_t* group, const std::uint8_t* shared, int half, F8 scale) {
    constexpr GroupLayout layout = layout_of(format);
    const std::uint8_t* numbers = group + layout.minimums_at();
    if constexpr (layout.zero && layout.bits < 8) {
        return scale * load8_int8(reinterpret_cast<const std::int8_t*>(numbers) + 8 * half);
    } else if constexpr (layout.zero) {
        return scale * load8_half(reinterpret_cast<const std::uint16_t*>(numbers) + 8 * half);
    } else {
        return group_numbers<layout.two_level>(numbers, shared + 2 * tile_outputs, half);
    }
}

#if !defined(QUICKDRAFT_LANES_AVX512)

template <WeightFormat format, int rows>
inline void quantised_rows(const LinearArguments& a, int row, int tile) {
    constexpr GroupLayout layout = layout_of(format);
    constexpr int group_inputs = layout.inputs, bytes = layout.bytes(), sharing = layout.sharing();
    constexpr int offset = layout.offset(), shared_bytes = layout.shared_bytes();
    const std::size_t inputs = a.weight.inputs, groups = inputs / group_inputs;
    const std::uint8_t* group = a.weight.data + tile * a.weight.tile_bytes;
    const std::uint8_t* shared = nullptr;
    const std::size_t first = row * groups;  // row is the first of its block
    const std::int8_t* x = a.codes + first * group_inputs;
    const float* scales = a.scales + first;
    const float* corrections = a.corrections + first;
    F8 sum[rows][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) sum[r][0] = sum[r][1] = zero8();
    for (std::size_t g = 0; g < groups; ++g) {
        if constexpr (layout.two_level) {
            if (g % sharing == 0) {
                __builtin_prefetch(group + a.weight.tile_bytes);
                shared = group;
                group += shared_bytes;
            }
        }
        // The same group of the next tile: far enough ahead to hide memory, and in a chunk of many rows the
        // first passes over this tile bring in the next one.
#pragma GCC unroll 10
        for (int line = 0; line < bytes; line += 64) {
            __builtin_prefetch(group + a.weight.tile_bytes + line);
        }
        F8 dot[rows][2];
        if constexpr (layout.bits == 8) {
            dot_int8<rows>(group, x, dot);
        } else if constexpr (layout.bits == 4) {
            dot_int4<rows>(group, x, dot);
        } else {
            dot_high<group_inputs, layout.bits, rows>(group, x, dot);
        }
#pragma GCC unroll 8
        for (int half = 0; half < 2; ++half) {
            const F8 scale = group_scale<format>(group, shared, half);
            F8 minimum = zero8();
            if constexpr (layout.minimum) minimum = group_minimum<format>(group, shared, half, scale);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                const F8 both = scale * set8(scales[r]);
                if constexpr (offset != 0) {  // exact: dot of (code - offset)
                    dot[r][half] = dot[r][half] - set8(corrections[r]);
                }
                sum[r][half] = fma8(both, dot[r][half], sum[r][half]);
                if constexpr (layout.minimum) {
                    sum[r][half] = fma8(minimum, set8(corrections[r]), sum[r][half]);
                }
            }
        }
        group += bytes;
        x += row_block * group_inputs;
        scales += row_block;
        corrections += row_block;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) finish_tile(a, row + r, tile, sum[r]);
}

#endif

template <WeightFormat format>
inline void quantised_linear(const LinearArguments& a, int first_tile, int last_tile) {
    for (int start = 0; start < a.rows; start += row_chunk) {
        const int end = start + row_chunk < a.rows ? start + row_chunk : a.rows;
        for (int tile = first_tile; tile < last_tile; ++tile) {
            int row = start;
#if defined(QUICKDRAFT_LANES_AVX512)
            for (; row + 8 <= end; row += 8) quantised_rows<format, 8>(a, row, tile);
#endif
            for (; row + 4 <= end; row += 4) quantised_rows<format, 4>(a, row, tile);
            switch (end - row) {
                case 3:
                    quantised_rows<format, 3>(a, row, tile);
                    break;
                case 2:
                    quantised_rows<format, 2>(a, row, tile);
                    break;
                case 1:
                    quantised_rows<format, 1>(a, row, tile);
                    break;
            }
        }
    }
}

// rows x tiles x 2 independent chains hide the latency of fma.
template <class Type, int rows, int tiles>
inline void dense_rows(const LinearArguments& a, int row, int tile) {
    const int inputs = a.weight.inputs;
    const typename Type::Storage* weight[tiles];
#pragma GCC unroll 8
    for (int t = 0; t < tiles; ++t) {
        weight[t] =
            reinterpret_cast<const typename Type::Storage*>(a.weight.data + (tile + t) * a.weight.tile_bytes);
    }
    const float* x = a.x + static_cast<std::size_t>(row) * inputs;
    F8 sum[rows][tiles][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int t = 0; t < tiles; ++t) sum[r][t][0] = sum[r][t][1] = zero8();
    }
    for (int i = 0; i < inputs; ++i) {
#pragma GCC unroll 8
        for (int t = 0; t < tiles; ++t) {
            const F8 a0 = Type::load(weight[t] + 16 * i), a1 = Type::load(weight[t] + 16 * i + 8);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                const F8 input = set8(x[static_cast<std::size_t>(r) * inputs + i]);
                sum[r][t][0] = fma8(input, a0, sum[r][t][0]);
                sum[r][t][1] = fma8(input, a1, sum[r][t][1]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int t = 0; t < tiles; ++t) finish_tile(a, row + r, tile + t, sum[r][t]);
    }
}

template <class Type>
inline void dense_linear(const LinearArguments& a, int first_tile, int last_tile) {
    for (int start = 0; start < a.rows; start += row_chunk) {
        const int end = start + row_chunk < a.rows ? start + row_chunk : a.rows;
        const int four = start + (end - start) / 4 * 4;
        for (int tile = first_tile; tile < last_tile; ++tile) {
            for (int row = start; row < four; row += 4) dense_rows<Type, 4, 1>(a, row, tile);
        }
        for (int row = four; row < end; ++row) {
            int tile = first_tile;
            for (; tile + 4 <= last_tile; tile += 4) dense_rows<Type, 1, 4>(a, row, tile);
            for (; tile < last_tile; ++tile) dense_rows<Type, 1, 1>(a, row, tile);
        }
    }
}

void linear(const LinearArguments& a, int first_tile, int last_tile) {
    switch (a.weight.format) {
        case WeightFormat::float32:
            return dense_linear<Float32>(a, first_tile, last_tile);
        case WeightFormat::float16:
            return dense_linear<Float16>(a, first_tile, last_tile);
        case WeightFormat::bfloat16:
            return dense_linear<BFloat16>(a, first_tile, last_tile);
        case WeightFormat::int8:
            return quantised_linear<WeightFormat::int8>(a, first_tile, last_tile);
        case WeightFormat::int8_zero:
            return quantised_linear<WeightFormat::int8_zero>(a, first_tile, last_tile);
        case WeightFormat::int8_zero_bfloat16:
            return quantised_linear<WeightFormat::int8_zero_bfloat16>(a, first_tile, last_tile);
        case WeightFormat::int4:
            return quantised_linear<WeightFormat::int4>(a, first_tile, last_tile);
        case WeightFormat::int4_zero:
            return quantised_linear<WeightFormat::int4_zero>(a, first_tile, last_tile);
        case WeightFormat::int4_zero_bfloat16:
            return quantised_linear<WeightFormat::int4_zero_bfloat16>(a, first_tile, last_tile);
        case WeightFormat::int4_minimum:
            return quantised_linear<WeightFormat::int4_minimum>(a, first_tile, last_tile);
        case WeightFormat::int5:
            return quantised_linear<WeightFormat::int5>(a, first_tile, last_tile);
        case WeightFormat::int5_minimum:
            return quantised_linear<WeightFormat::int5_minimum>(a, first_tile, last_tile);
        case WeightFormat::int5_minimum_two_level:
            return quantised_linear<WeightFormat::int5_minimum_two_level>(a, first_tile, last_tile);
        case WeightFormat::int6_two_level_sixteen:
            return quantised_linear<WeightFormat::int6_two_level_sixteen>(a, first_tile, last_tile);
        case WeightFormat::int4_minimum_two_level:
            return quantised_linear<WeightFormat::int4_minimum_two_level>(a, first_tile, last_tile);
    }
}
