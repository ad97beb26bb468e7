// kv_write: each row's keys and values, rounded to the cache's type, into their slots; an item is a kv head
// of a row.
#include "kv_layer.h"

namespace quickdraft {

namespace {

class KVWriteOp final : public Op {
  public:
    KVWriteOp(Engine& engine, const Batch& batch, ConstRows qkv, int query_heads, const Layer& layer)
        : engine_(engine), batch_(batch), qkv_(qkv), query_heads_(query_heads), layer_(layer) {}

    void prepare(int) override { check_rows("kv_write", batch_.rows.count, qkv_.shape(0)); }
    bool only_first_thread() const override { return batch_.rows.count <= 1; }

    void run(Worker& worker) override {
        const int items = batch_.rows.count * layer_.kv_heads;
        const Range mine =
            only_first_thread() ? Range{0, worker.thread() == 0 ? items : 0} : share(items, worker);
        for (int item = mine.first; item < mine.last; ++item)
            write(item / layer_.kv_heads, item % layer_.kv_heads);
    }

  private:
    void write(int row, int head) {
        const std::size_t D = layer_.head_dim, bytes = layer_.element_bytes();
        const int position = batch_.positions[row], slot = position % block_tokens;
        const std::size_t at = layer_.head_at(batch_.table_of_row(row)[position / block_tokens], head);
        const float* key = qkv_.data() + row * qkv_.shape(1) + (query_heads_ + head) * D;
        const float* value = key + layer_.kv_heads * D;
        auto* keys = static_cast<std::uint8_t*>(layer_.keys.data()) + at;
        auto* values = static_cast<std::uint8_t*>(layer_.values.data()) + at;
        if (layer_.type == KVType::int8) {
            engine_.kernels().kv_write_int8(key, value, layer_.head_dim, slot, keys, values);
        } else {
            engine_.kernels().kv_write(layer_.type, key, value, layer_.head_dim, keys + slot * bytes,
                                       values + slot * D * bytes);
        }
    }

    Engine& engine_;
    const Batch& batch_;
    ConstRows qkv_;
    int query_heads_;
    Layer layer_;
};

}  // namespace

void bind_kv_write(nb::module_& m) {
    m.def(
        "kv_write",
        [](Engine& engine, Batch& batch, ConstRows qkv, int query_heads, LayerCache keys, LayerCache values,
           const std::string& type) -> std::unique_ptr<Op> {
            const Layer layer("kv_write", keys, values, type, batch, query_heads, qkv.shape(1));
            return std::make_unique<KVWriteOp>(engine, batch, qkv, query_heads, layer);
        },
        nb::arg("engine"), nb::arg("batch"), nb::arg("qkv").noconvert(), nb::arg("query_heads"),
        nb::arg("keys").noconvert(), nb::arg("values").noconvert(), nb::arg("type"), nb::keep_alive<0, 1>(),
        nb::keep_alive<0, 2>());
}

}  // namespace quickdraft
