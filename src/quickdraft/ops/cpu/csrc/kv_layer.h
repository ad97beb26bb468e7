// Layer: one layer of a KV cache as ops take it, its types and shapes checked.
#pragma once

#include "binding.h"

namespace quickdraft {

using LayerCache = nb::ndarray<nb::c_contig, nb::device::cpu, nb::ndim<4>>;

inline KVType kv_type(const std::string& name) {
    if (name == "float32") return KVType::float32;
    if (name == "float16") return KVType::float16;
    if (name == "bfloat16") return KVType::bfloat16;
    require(name == "int8", "unknown KV type '" + name + "'; expected float32, float16, bfloat16 or int8");
    return KVType::int8;
}

// Keys [blocks, K, D, 16] and values [blocks, K, 16, D]; int8: both bytes [blocks, K, D + 4, 16], the last
// four rows being the 16 scales (attention_int8_kernels.h).
struct Layer {
    Layer(const char* op, LayerCache keys, LayerCache values, const std::string& type_name,
          const Batch& batch, int query_heads, std::size_t qkv_width)
        : keys(keys),
          values(values),
          type(kv_type(type_name)),
          kv_heads(static_cast<int>(keys.shape(1))),
          head_dim(static_cast<int>(keys.shape(2)) - (type == KVType::int8 ? scale_rows : 0)) {
        const std::string name = std::string(op) + ": ";
        require(keys.dtype() == element_type() && values.dtype() == element_type(),
                name + "the cache's element type is not that of " + type_name);
        require(keys.shape(0) == values.shape(0) && keys.shape(1) == values.shape(1) && right_shapes(),
                name + (type == KVType::int8 ? "keys and values must be [blocks, K, D + 4, 16]"
                                             : "keys must be [blocks, K, D, 16] and values "
                                               "[blocks, K, 16, D]"));
        require(kv_heads >= 1 && head_dim >= 8 && head_dim <= most_head_dim && head_dim % 8 == 0,
                name + "head dim " + std::to_string(head_dim) + "; expected a multiple of 8 up to " +
                    std::to_string(most_head_dim));
        require(query_heads >= 0 && query_heads % kv_heads == 0,
                name + std::to_string(query_heads) + " query heads for " + std::to_string(kv_heads) +
                    " kv heads; expected a multiple");
        require(static_cast<std::size_t>(batch.pool_blocks) <= keys.shape(0),
                name + "a cache of " + std::to_string(keys.shape(0)) + " blocks for a pool of " +
                    std::to_string(batch.pool_blocks));
        const std::size_t expected = static_cast<std::size_t>(query_heads + 2 * kv_heads) * head_dim;
        require(qkv_width == expected,
                name + "qkv rows of " + std::to_string(qkv_width) + "; expected " + std::to_string(expected));
    }

    // Bytes from the start of the keys (values) to those of one kv head of a block.
    std::size_t head_at(std::size_t block, std::size_t head) const {
        const std::size_t bytes = type == KVType::int8
                                      ? int8_head_bytes(head_dim)
                                      : static_cast<std::size_t>(head_dim) * block_tokens * element_bytes();
        return (block * kv_heads + head) * bytes;
    }
    std::size_t element_bytes() const { return type == KVType::float32 ? 4 : type == KVType::int8 ? 1 : 2; }

    LayerCache keys, values;
    KVType type;
    int kv_heads, head_dim;

  private:
    static constexpr int scale_rows = sizeof(float);

    nb::dlpack::dtype element_type() const {
        if (type == KVType::float32) return nb::dtype<float>();
        return type == KVType::int8 ? nb::dtype<std::uint8_t>() : nb::dtype<std::uint16_t>();
    }
    bool right_shapes() const {
        if (keys.shape(3) != block_tokens) return false;
        if (type == KVType::int8) {
            return values.shape(2) == keys.shape(2) && values.shape(3) == block_tokens;
        }
        return values.shape(2) == block_tokens && values.shape(3) == keys.shape(2);
    }
};

}  // namespace quickdraft
