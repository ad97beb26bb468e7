// kv_write and attention: how rows, kv heads and spans of 256 positions become work for the threads.
//
// A query row is one (row, query head). Query rows of one sequence that read the same kv head are attended in
// chunks of up to 4. With many chunks an item is a chunk, which folds its spans one after the other; with few
// chunks an item is one span of a chunk, and a second pass folds them. Both fold in the same order with the
// same function, so the split changes no bit.
#include <atomic>
#include <cstring>

#include "binding.h"

namespace quickdraft {

namespace {

using LayerCache = nb::ndarray<nb::c_contig, nb::device::cpu, nb::ndim<4>>;

KVType kv_type(const std::string& name) {
    if (name == "float32") return KVType::float32;
    if (name == "float16") return KVType::float16;
    require(name == "bfloat16", "unknown KV type '" + name + "'; expected float32, float16 or bfloat16");
    return KVType::bfloat16;
}

// One layer of the cache: keys [blocks, K, D, 16], values [blocks, K, 16, D].
struct Layer {
    Layer(const char* op, LayerCache keys, LayerCache values, const std::string& type, const Batch& batch,
          int query_heads, std::size_t qkv_width)
        : keys(keys),
          values(values),
          type(kv_type(type)),
          kv_heads(static_cast<int>(keys.shape(1))),
          head_dim(static_cast<int>(keys.shape(2))) {
        const std::string name = std::string(op) + ": ";
        const auto right_type = [&](const LayerCache& cache) {
            return cache.dtype() ==
                   (this->type == KVType::float32 ? nb::dtype<float>() : nb::dtype<std::uint16_t>());
        };
        require(right_type(keys) && right_type(values),
                name + "the cache's element type is not that of " + type);
        require(keys.shape(3) == block_tokens && values.shape(2) == block_tokens &&
                    keys.shape(0) == values.shape(0) && keys.shape(1) == values.shape(1) &&
                    keys.shape(2) == values.shape(3),
                name + "keys must be [blocks, K, D, 16] and values [blocks, K, 16, D]");
        require(kv_heads >= 1 && head_dim >= 8 && head_dim <= 256 && head_dim % 8 == 0,
                name + "head dim " + std::to_string(head_dim) + "; expected a multiple of 8 up to 256");
        require(query_heads >= 1 && query_heads % kv_heads == 0,
                name + std::to_string(query_heads) + " query heads for " + std::to_string(kv_heads) +
                    " kv heads; expected a multiple");
        require(static_cast<std::size_t>(batch.pool_blocks) <= keys.shape(0),
                name + "a cache of " + std::to_string(keys.shape(0)) + " blocks for a pool of " +
                    std::to_string(batch.pool_blocks));
        const std::size_t expected = static_cast<std::size_t>(query_heads + 2 * kv_heads) * head_dim;
        require(qkv_width == expected,
                name + "qkv rows of " + std::to_string(qkv_width) + "; expected " + std::to_string(expected));
    }
    std::size_t element_bytes() const { return type == KVType::float32 ? 4 : 2; }

    LayerCache keys, values;
    KVType type;
    int kv_heads, head_dim;
};

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
        const std::size_t D = layer_.head_dim, K = layer_.kv_heads, bytes = layer_.element_bytes();
        const int position = batch_.positions[row], slot = position % block_tokens;
        const std::size_t block = batch_.table_of_row(row)[position / block_tokens];
        const std::size_t at = (block * K + head) * D * block_tokens;
        const float* key = qkv_.data() + row * qkv_.shape(1) + (query_heads_ + head) * D;
        engine_.kernels().kv_write(
            layer_.type, key, key + K * D, layer_.head_dim,
            static_cast<std::uint8_t*>(layer_.keys.data()) + (at + slot) * bytes,
            static_cast<std::uint8_t*>(layer_.values.data()) + (at + slot * D) * bytes);
    }

    Engine& engine_;
    const Batch& batch_;
    ConstRows qkv_;
    int query_heads_;
    Layer layer_;
};

class AttentionOp final : public Op {
  public:
    AttentionOp(Engine& engine, const Batch& batch, ConstRows qkv, int query_heads, const Layer& layer,
                float scale, Rows out)
        : engine_(engine),
          batch_(batch),
          qkv_(qkv),
          query_heads_(query_heads),
          layer_(layer),
          scale_(scale),
          out_(out),
          group_(query_heads / layer.kv_heads),
          queries_(engine.kernels().queries),
          state_floats_(layer.head_dim + state_extra),
          max_spans_((batch.table_width * block_tokens + span_tokens - 1) / span_tokens) {
        require_width("attention", "out", out, static_cast<std::size_t>(query_heads) * layer.head_dim);
        require(out.data() != qkv.data(), "attention: out must not be qkv");
        chunk_starts_.resize(static_cast<std::size_t>(batch.max_sequences) + 1);
        const std::size_t states = static_cast<std::size_t>(few_chunks(engine.pool().threads())) * queries_;
        engine.reserve(states * max_spans_ * state_floats_ * sizeof(float),
                       (queries_ * span_tokens + 2 * queries_ * state_floats_) * sizeof(float));
    }

    void prepare(int threads) override {
        check_rows("attention", batch_.rows.count, std::min(qkv_.shape(0), out_.shape(0)));
        next_.store(0, std::memory_order_relaxed);
        spans_ = batch_.highest_position / span_tokens + 1;
        chunk_starts_[0] = 0;
        for (int b = 0; b < sequences(); ++b) {
            const int queries = (batch_.row_starts[b + 1] - batch_.row_starts[b]) * group_;
            chunk_starts_[b + 1] = chunk_starts_[b] + (queries + queries_ - 1) / queries_;
        }
        chunks_ = chunk_starts_[sequences()] * layer_.kv_heads;
        span_items_ = spans_ > 1 && chunks_ <= few_chunks(threads);
    }

    void run(Worker& worker) override {
        float* scratch = reinterpret_cast<float*>(engine_.thread_scratch(worker.thread()));
        const int items = span_items_ ? chunks_ * spans_ : chunks_;
        for (int item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items;) {
            if (span_items_) {
                attend_span(item / spans_, item % spans_, scratch);
            } else {
                attend_chunk(chunks_ - 1 - item, scratch);  // the longest first
            }
        }
        if (!span_items_) return;
        worker.barrier();
        const Range mine = share(chunks_, worker);
        for (int index = mine.first; index < mine.last; ++index) fold_chunk(index);
    }

  private:
    // At most this many chunks are cut into spans, which bounds the scratch memory for their states.
    static int few_chunks(int threads) { return 4 * threads; }
    int sequences() const { return batch_.rows.count == 0 ? 0 : batch_.sequences; }

    struct Chunk {
        int sequence, kv_head, queries;
        int row[most_queries], head[most_queries];
        int longest;  // the largest number of positions any of its query rows sees
    };

    Chunk chunk_at(int index) const {
        Chunk chunk;
        chunk.kv_head = index % layer_.kv_heads;
        const int number = index / layer_.kv_heads;
        const auto after =
            std::upper_bound(chunk_starts_.begin(), chunk_starts_.begin() + sequences() + 1, number);
        chunk.sequence = static_cast<int>(after - chunk_starts_.begin()) - 1;
        const int first_row = batch_.row_starts[chunk.sequence];
        const int all = (batch_.row_starts[chunk.sequence + 1] - first_row) * group_;
        const int first = (number - chunk_starts_[chunk.sequence]) * queries_;
        chunk.queries = std::min(queries_, all - first);
        for (int r = 0; r < chunk.queries; ++r) {
            chunk.row[r] = first_row + (first + r) / group_;
            chunk.head[r] = chunk.kv_head * group_ + (first + r) % group_;
        }
        chunk.longest = batch_.positions[chunk.row[chunk.queries - 1]] + 1;
        return chunk;
    }

    int visible(const Chunk& chunk, int r, int span) const {
        return std::clamp(batch_.positions[chunk.row[r]] + 1 - span * span_tokens, 0, span_tokens);
    }

    int first_span(const Chunk& chunk) const { return batch_.seen_from[chunk.sequence] / span_tokens; }

    // Fills states (one per query row, state_floats_ apart by `step`) with one span's o, m, l.
    void compute_span(const Chunk& chunk, int span, float* states, std::size_t step, float* scratch) const {
        SpanArguments a{};
        a.type = layer_.type;
        a.keys = layer_.keys.data();
        a.values = layer_.values.data();
        a.kv_heads = layer_.kv_heads;
        a.kv_head = chunk.kv_head;
        a.head_dim = layer_.head_dim;
        a.blocks = batch_.block_tables.data() +
                   static_cast<std::size_t>(chunk.sequence) * batch_.table_width +
                   span * (span_tokens / block_tokens);
        a.hidden = std::max(0, batch_.seen_from[chunk.sequence] - span * span_tokens);
        a.scale = scale_;
        a.queries = chunk.queries;
        for (int r = 0; r < chunk.queries; ++r) {
            a.query[r] = qkv_.data() + chunk.row[r] * qkv_.shape(1) + chunk.head[r] * layer_.head_dim;
            a.visible[r] = visible(chunk, r, span);
            a.state[r] = states + r * step;
        }
        engine_.kernels().attention_span(a, scratch);
    }

    float* out_of(const Chunk& chunk, int r) const {
        return out_.data() + chunk.row[r] * out_.shape(1) + chunk.head[r] * layer_.head_dim;
    }

    void attend_chunk(int index, float* scratch) {
        const Chunk chunk = chunk_at(index);
        float* folded = scratch + queries_ * span_tokens;
        float* next = folded + queries_ * state_floats_;
        const int first = first_span(chunk);
        compute_span(chunk, first, folded, state_floats_, scratch);
        for (int span = first + 1; span * span_tokens < chunk.longest; ++span) {
            compute_span(chunk, span, next, state_floats_, scratch);
            for (int r = 0; r < chunk.queries; ++r) {
                if (visible(chunk, r, span) == 0) continue;
                engine_.kernels().attention_merge(folded + r * state_floats_, next + r * state_floats_,
                                                  layer_.head_dim);
            }
        }
        for (int r = 0; r < chunk.queries; ++r) {
            engine_.kernels().attention_finish(folded + r * state_floats_, layer_.head_dim, out_of(chunk, r));
        }
    }

    // States of chunk `index`: [chunk][query row][span].
    float* states_of(int index) const {
        return reinterpret_cast<float*>(engine_.shared_scratch()) +
               static_cast<std::size_t>(index) * queries_ * spans_ * state_floats_;
    }

    void attend_span(int index, int span, float* scratch) {
        const Chunk chunk = chunk_at(index);
        if (span < first_span(chunk) || span * span_tokens >= chunk.longest) return;
        compute_span(chunk, span, states_of(index) + span * state_floats_,
                     static_cast<std::size_t>(spans_) * state_floats_, scratch);
    }

    void fold_chunk(int index) {
        const Chunk chunk = chunk_at(index);
        for (int r = 0; r < chunk.queries; ++r) {
            float* states = states_of(index) + static_cast<std::size_t>(r) * spans_ * state_floats_;
            float* folded = states + first_span(chunk) * state_floats_;
            for (int span = first_span(chunk) + 1; visible(chunk, r, span) > 0; ++span) {
                engine_.kernels().attention_merge(folded, states + span * state_floats_, layer_.head_dim);
            }
            engine_.kernels().attention_finish(folded, layer_.head_dim, out_of(chunk, r));
        }
    }

    Engine& engine_;
    const Batch& batch_;
    ConstRows qkv_;
    int query_heads_;
    Layer layer_;
    float scale_;
    Rows out_;
    int group_;
    int queries_;  // attended together
    std::size_t state_floats_;
    int max_spans_;
    // planned by `prepare` for the step at hand
    std::vector<int> chunk_starts_;  // per sequence: chunks of earlier sequences (of one kv head)
    int spans_ = 0, chunks_ = 0;
    bool span_items_ = false;
    std::atomic<int> next_{0};
};

}  // namespace

void bind_attention(nb::module_& m) {
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
    m.def(
        "attention",
        [](Engine& engine, Batch& batch, ConstRows qkv, int query_heads, LayerCache keys, LayerCache values,
           const std::string& type, float scale, Rows out) -> std::unique_ptr<Op> {
            const Layer layer("attention", keys, values, type, batch, query_heads, qkv.shape(1));
            return std::make_unique<AttentionOp>(engine, batch, qkv, query_heads, layer, scale, out);
        },
        nb::arg("engine"), nb::arg("batch"), nb::arg("qkv").noconvert(), nb::arg("query_heads"),
        nb::arg("keys").noconvert(), nb::arg("values").noconvert(), nb::arg("type"), nb::arg("scale"),
        nb::arg("out").noconvert(), nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>());
}

}  // namespace quickdraft
