// Attention: how rows, kv heads and spans of 256 positions become work for the threads.
//
// A query row is one (row, query head). Query rows of one sequence that read the same kv head are attended in
// chunks of up to Kernels::queries, and up to 4 such chunks form a group, whose chunks take turns at a span
// while its keys and values are near. With many chunks an item is a group, which folds its spans one after
// the other; with few chunks an item is one span of a group, and a second pass folds them. Both fold in the
// same order with the same function, so the split changes no bit.
#include <atomic>
#include <cstring>

#include "kv_layer.h"

namespace quickdraft {

namespace {

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
        group_starts_.resize(chunk_starts_.size());
        const std::size_t states = static_cast<std::size_t>(few_chunks(engine.pool().threads())) * queries_;
        engine.reserve(states * max_spans_ * state_floats_ * sizeof(float),
                       (span_tokens + (most_chunks + 1) * state_floats_) * queries_ * sizeof(float));
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
        const int enough = 3 * threads / (span_items_ ? spans_ : 1);  // groups, so that no thread waits long
        int together = most_chunks;
        while (form_groups(together) < enough && together > 1) --together;
    }

    void run(Worker& worker) override {
        float* scratch = reinterpret_cast<float*>(engine_.thread_scratch(worker.thread()));
        const int items = span_items_ ? groups_ * spans_ : groups_;
        for (int item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items;) {
            if (span_items_) {
                attend_span(group_at(item / spans_), item % spans_, scratch);
            } else {
                attend_group(group_at(groups_ - 1 - item), scratch);  // the longest first
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
    static constexpr int most_chunks = 4;  // of a group
    int sequences() const { return batch_.rows.count == 0 ? 0 : batch_.sequences; }

    // Cuts each sequence's chunks into groups of up to `together`; the number of groups.
    int form_groups(int together) {
        for (int b = 0; b < sequences(); ++b) {
            const int chunks = chunk_starts_[b + 1] - chunk_starts_[b];
            group_starts_[b + 1] = group_starts_[b] + (chunks + together - 1) / together;
        }
        return groups_ = group_starts_[sequences()] * layer_.kv_heads;
    }

    // The sequence that owns place `number` of `starts`.
    int sequence_at(const std::vector<int>& starts, int number) const {
        const auto after = std::upper_bound(starts.begin(), starts.begin() + sequences() + 1, number);
        return static_cast<int>(after - starts.begin()) - 1;
    }

    // Chunks first, first + kv heads, ... up to last: those of one sequence and kv head.
    struct Group {
        int first, last, chunks;
    };

    Group group_at(int index) const {
        const int head = index % layer_.kv_heads, number = index / layer_.kv_heads;
        const int b = sequence_at(group_starts_, number);
        const int groups = group_starts_[b + 1] - group_starts_[b], mine = number - group_starts_[b];
        const int chunks = chunk_starts_[b + 1] - chunk_starts_[b];
        const int from = chunks * mine / groups, to = chunks * (mine + 1) / groups;
        const auto chunk = [&](int n) { return (chunk_starts_[b] + n) * layer_.kv_heads + head; };
        return {chunk(from), chunk(to), to - from};
    }

    struct Chunk {
        int sequence, kv_head, queries;
        int row[most_queries], head[most_queries];
        int longest;  // the largest number of positions any of its query rows sees
    };

    Chunk chunk_at(int index) const {
        Chunk chunk;
        chunk.kv_head = index % layer_.kv_heads;
        const int number = index / layer_.kv_heads;
        chunk.sequence = sequence_at(chunk_starts_, number);
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
        a.scale = scale_;
        a.queries = chunk.queries;
        for (int r = 0; r < chunk.queries; ++r) {
            a.query[r] = qkv_.data() + chunk.row[r] * qkv_.shape(1) + chunk.head[r] * layer_.head_dim;
            a.visible[r] = visible(chunk, r, span);
            a.state[r] = states + r * step;
        }
        const Kernels& kernels = engine_.kernels();
        (layer_.type == KVType::int8 ? kernels.attention_span_int8 : kernels.attention_span)(a, scratch);
    }

    float* out_of(const Chunk& chunk, int r) const {
        return out_.data() + chunk.row[r] * out_.shape(1) + chunk.head[r] * layer_.head_dim;
    }

    void attend_group(const Group& group, float* scratch) {
        Chunk chunks[most_chunks];
        int longest = 0;
        for (int c = 0; c < group.chunks; ++c) {
            chunks[c] = chunk_at(group.first + c * layer_.kv_heads);
            longest = std::max(longest, chunks[c].longest);
        }
        const std::size_t chunk_floats = queries_ * state_floats_;
        float* next = scratch + queries_ * span_tokens;
        float* folded = next + chunk_floats;
        for (int span = 0; span * span_tokens < longest; ++span) {
            for (int c = 0; c < group.chunks; ++c) {
                fold_span(chunks[c], span, folded + c * chunk_floats, next, scratch);
            }
        }
        for (int c = 0; c < group.chunks; ++c) {
            for (int r = 0; r < chunks[c].queries; ++r) {
                engine_.kernels().attention_finish(folded + c * chunk_floats + r * state_floats_,
                                                   layer_.head_dim, out_of(chunks[c], r));
            }
        }
    }

    // One span of a chunk into its states; the first one starts them.
    void fold_span(const Chunk& chunk, int span, float* states, float* next, float* scratch) const {
        if (span * span_tokens >= chunk.longest) return;
        compute_span(chunk, span, span == 0 ? states : next, state_floats_, scratch);
        for (int r = 0; r < chunk.queries && span > 0; ++r) {
            if (visible(chunk, r, span) == 0) continue;
            engine_.kernels().attention_merge(states + r * state_floats_, next + r * state_floats_,
                                              layer_.head_dim);
        }
    }

    // States of chunk `index`: [chunk][query row][span].
    float* states_of(int index) const {
        return reinterpret_cast<float*>(engine_.shared_scratch()) +
               static_cast<std::size_t>(index) * queries_ * spans_ * state_floats_;
    }

    void attend_span(const Group& group, int span, float* scratch) {
        for (int index = group.first; index < group.last; index += layer_.kv_heads) {
            const Chunk chunk = chunk_at(index);
            if (span * span_tokens >= chunk.longest) continue;
            compute_span(chunk, span, states_of(index) + span * state_floats_,
                         static_cast<std::size_t>(spans_) * state_floats_, scratch);
        }
    }

    void fold_chunk(int index) {
        const Chunk chunk = chunk_at(index);
        for (int r = 0; r < chunk.queries; ++r) {
            float* first = states_of(index) + static_cast<std::size_t>(r) * spans_ * state_floats_;
            for (int span = 1; visible(chunk, r, span) > 0; ++span) {
                engine_.kernels().attention_merge(first, first + span * state_floats_, layer_.head_dim);
            }
            engine_.kernels().attention_finish(first, layer_.head_dim, out_of(chunk, r));
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
    std::vector<int> group_starts_;  // the same of groups
    int spans_ = 0, chunks_ = 0, groups_ = 0;
    bool span_items_ = false;
    std::atomic<int> next_{0};
};

}  // namespace

void bind_attention(nb::module_& m) {
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
