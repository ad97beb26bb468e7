// embed: one row of a packed table, dequantised exactly.
// Included only by kernels_*.cpp, inside their anonymous namespace, after linear_kernels.h.

template <class Type>
inline void embed_dense(const typename Type::Storage* tile, int lane, int inputs, float* out) {
    const int half = lane / 8 * 8;
    for (int i = 0; i < inputs; ++i) {
        float values[8];
        store8(values, Type::load(tile + 16 * i + half));
        out[i] = values[lane - half];
    }
}

template <WeightFormat format>
inline void embed_quantised(const std::uint8_t* group, int lane, int inputs, float* out) {
    constexpr GroupLayout layout = layout_of(format);
    constexpr int group_inputs = layout.inputs, bytes = layout.bytes(), sharing = layout.sharing();
    constexpr int offset = layout.offset(), shared_bytes = layout.shared_bytes();
    const int half = lane / 8;
    const std::uint8_t* shared = nullptr;
    for (int g = 0; g < inputs / group_inputs; ++g, group += bytes, out += group_inputs) {
        if (layout.two_level && g % sharing == 0) {
            shared = group;
            group += shared_bytes;
        }
        float scales[8], minimums[8] = {};
        const F8 eight = group_scale<format>(group, shared, half);
        store8(scales, eight);
        if constexpr (layout.minimum) store8(minimums, group_minimum<format>(group, shared, half, eight));
        const float scale = scales[lane % 8], minimum = minimums[lane % 8];
        for (int i = 0; i < group_inputs; ++i) {
            const auto code = static_cast<float>(code_at<group_inputs, layout.bits>(group, lane, i) - offset);
            out[i] = layout.minimum ? scale * code + minimum : scale * code;
        }
    }
}

void embed_row(const PackedView& table, int row, float* out) {
    const std::uint8_t* tile = table.data + row / tile_outputs * table.tile_bytes;
    const int lane = row % tile_outputs, inputs = table.inputs;
    const auto* sixteen_bit = reinterpret_cast<const std::uint16_t*>(tile);
    switch (table.format) {
        case WeightFormat::float32:
            return embed_dense<Float32>(reinterpret_cast<const float*>(tile), lane, inputs, out);
        case WeightFormat::float16:
            return embed_dense<Float16>(sixteen_bit, lane, inputs, out);
        case WeightFormat::bfloat16:
            return embed_dense<BFloat16>(sixteen_bit, lane, inputs, out);
        case WeightFormat::int8:
            return embed_quantised<WeightFormat::int8>(tile, lane, inputs, out);
        case WeightFormat::int8_zero:
            return embed_quantised<WeightFormat::int8_zero>(tile, lane, inputs, out);
        case WeightFormat::int8_zero_bfloat16:
            return embed_quantised<WeightFormat::int8_zero_bfloat16>(tile, lane, inputs, out);
        case WeightFormat::int4:
            return embed_quantised<WeightFormat::int4>(tile, lane, inputs, out);
        case WeightFormat::int4_zero:
            return embed_quantised<WeightFormat::int4_zero>(tile, lane, inputs, out);
        case WeightFormat::int4_zero_bfloat16:
            return embed_quantised<WeightFormat::int4_zero_bfloat16>(tile, lane, inputs, out);
        case WeightFormat::int4_minimum:
            return embed_quantised<WeightFormat::int4_minimum>(tile, lane, inputs, out);
        case WeightFormat::int5:
            return embed_quantised<WeightFormat::int5>(tile, lane, inputs, out);
        case WeightFormat::int5_minimum:
            return embed_quantised<WeightFormat::int5_minimum>(tile, lane, inputs, out);
        case WeightFormat::int5_minimum_two_level:
            return embed_quantised<WeightFormat::int5_minimum_two_level>(tile, lane, inputs, out);
        case WeightFormat::int6_two_level_sixteen:
            return embed_quantised<WeightFormat::int6_two_level_sixteen>(tile, lane, inputs, out);
        case WeightFormat::int4_minimum_two_level:
            return embed_quantised<WeightFormat::int4_minimum_two_level>(tile, lane, inputs, out);
    }
}
