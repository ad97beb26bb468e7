// Attention: how rows, kv heads and spans of 256 positions become work for the threads.
//
// A query row is one (row, query head). Query rows of one sequence that read the same kv head are attended in
// chunks of up to Kernels::queries, and a few chunks make a group, which reads a span once for all of them.
// A chunk sees its positions from one on: with a window, where each row has a first position of its own, a
// chunk is of one row.
// With many groups an item is a group, which folds its spans one after the other; with few it is one span of
// a group, and a second pass folds them. Both fold in the same order with the same function, so the split
// changes no bit.
#include <atomic>
#include <cstring>

#include "kv_layer.h"

namespace quickdraft {

namespace {

class AttentionOp final : public Op {
  public:
    AttentionOp(Engine& engine, const Batch& batch, ConstRows qkv, int query_heads, const Layer& layer,
                float scale, Rows out, int window, bool block)
        : engine_(engine),
          batch_(batch),
          qkv_(qkv),
          query_heads_(query_heads),
          layer_(layer),
          scale_(scale),
          out_(out),
          window_(window),
          block_(block),
          group_(query_heads / layer.kv_heads),
          queries_(engine.kernels().queries),
          row_chunks_((group_ + queries_ - 1) / queries_),
          state_floats_(layer.head_dim + state_extra),
          max_spans_((batch.table_width * block_tokens + span_tokens - 1) / span_tokens) {
        require_width("attention", "out", out, static_cast<std::size_t>(query_heads) * layer.head_dim);
        require(out.data() != qkv.data(), "attention: out must not be qkv");
        require(window >= 0, "attention: a window of " + std::to_string(window) + "; expected 1 or more");
        chunk_starts_.resize(static_cast<std::size_t>(batch.max_sequences) + 1);
        group_starts_.resize(static_cast<std::size_t>(batch.max_sequences) + 1);
        const std::size_t states = static_cast<std::size_t>(few_chunks(engine.pool().threads())) * queries_;
        engine.reserve(
            states * max_spans_ * state_floats_ * sizeof(float),
            (queries_ * span_tokens + (most_together + 1) * queries_ * state_floats_) * sizeof(float));
    }

    void prepare(int threads) override {
        check_rows("attention", batch_.rows.count, std::min(qkv_.shape(0), out_.shape(0)));
        next_.store(0, std::memory_order_relaxed);
        first_span_ = batch_.highest_position / span_tokens;
        chunk_starts_[0] = group_starts_[0] = 0;
        for (int b = 0; b < sequences(); ++b) {
            const int rows = batch_.row_starts[b + 1] - batch_.row_starts[b];
            const int chunks = window_ > 0 ? rows * row_chunks_ : (rows * group_ + queries_ - 1) / queries_;
            chunk_starts_[b + 1] = chunk_starts_[b] + chunks;
            first_span_ = std::min(first_span_, first_seen(b, batch_.row_starts[b]) / span_tokens);
        }
        spans_ = batch_.highest_position / span_tokens + 1 - first_span_;
        chunks_ = chunk_starts_[sequences()] * layer_.kv_heads;
        span_items_ = spans_ > 1 && chunks_ <= few_chunks(threads);
        // Enough groups to keep all threads busy to the end.
        together_ = span_items_ ? most_together : std::clamp(chunks_ / (3 * threads), 1, most_together);
        for (int b = 0; b < sequences(); ++b) {
            const int chunks = chunk_starts_[b + 1] - chunk_starts_[b];
            group_starts_[b + 1] = group_starts_[b] + (chunks + together_ - 1) / together_;
        }
        groups_ = group_starts_[sequences()] * layer_.kv_heads;
        whole_ = std::max(0, groups_ / layer_.kv_heads * spans_ - threads);
        items_ =
            span_items_ ? whole_ + (groups_ / layer_.kv_heads * spans_ - whole_) * layer_.kv_heads : groups_;
    }

    void run(Worker& worker) override {
        float* scratch = reinterpret_cast<float*>(engine_.thread_scratch(worker.thread()));
        for (int item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items_;) {
            if (span_items_) {
                attend_spans(span_item(item), scratch);
            } else {
                attend_group(group_at(groups_ - 1 - item), scratch);  // the longest first
            }
        }
        if (!span_items_) return;
        worker.barrier();
        const Range mine = share(chunks_, worker);
        for (int index = mine.first; index < mine.last; ++index) fold_chunk(index);
    }

    bool fetches() const override { return spans_ > 1; }
    void fetch(const Worker& worker) const override {
        if (worker.thread() >= items_) return;
        const Ahead keys = first_keys_of(worker.thread());
        const std::size_t bytes = layer_.head_at(0, 1);
        for (int block = 0; block < keys.count; ++block) {
            const auto* key = static_cast<const std::uint8_t*>(layer_.keys.data()) +
                              layer_.head_at(keys.blocks[block], keys.kv_head);
            for (std::size_t line = 0; line < bytes; line += 64) __builtin_prefetch(key + line);
        }
    }

  private:
    // At most this many chunks are cut into spans, which bounds the scratch memory for their states.
    static int few_chunks(int threads) { return 4 * threads; }
    static constexpr int most_together = 8;  // chunks of a group
    int sequences() const { return batch_.rows.count == 0 ? 0 : batch_.sequences; }

    struct Chunk {
        int sequence, kv_head, queries;
        int row[most_queries], head[most_queries];
        int first;    // the first position its query rows see
        int longest;  // one more than the last position any of them sees
    };

    struct Group {
        int sequence, kv_head;
        int first, count;  // chunk numbers
        int first_seen;    // the lowest of its chunks, which the first one sees
        int longest;
    };

    // The sequence that owns `number`, counted over all sequences.
    int sequence_of(const std::vector<int>& starts, int number) const {
        const auto after = std::upper_bound(starts.begin(), starts.begin() + sequences() + 1, number);
        return static_cast<int>(after - starts.begin()) - 1;
    }

    Chunk chunk_at(int sequence, int number, int kv_head) const {
        Chunk chunk;
        chunk.sequence = sequence;
        chunk.kv_head = kv_head;
        const int first_row = batch_.row_starts[sequence], end_row = batch_.row_starts[sequence + 1];
        const int index = number - chunk_starts_[sequence];
        int first = index * queries_, end = (end_row - first_row) * group_;  // query rows of the kv head
        if (window_ > 0) {
            const int row_start = index / row_chunks_ * group_;
            first = row_start + index % row_chunks_ * queries_;
            end = row_start + group_;
        }
        chunk.queries = std::min(queries_, end - first);
        for (int r = 0; r < chunk.queries; ++r) {
            chunk.row[r] = first_row + (first + r) / group_;
            chunk.head[r] = kv_head * group_ + (first + r) % group_;
        }
        chunk.first = first_seen(sequence, chunk.row[0]);
        chunk.longest = batch_.positions[block_ ? end_row - 1 : chunk.row[chunk.queries - 1]] + 1;
        return chunk;
    }

    Group group_at(int index) const {
        const int number = index / layer_.kv_heads, kv_head = index % layer_.kv_heads;
        const int sequence = sequence_of(group_starts_, number);
        const int first = chunk_starts_[sequence] + (number - group_starts_[sequence]) * together_;
        const int count = std::min(together_, chunk_starts_[sequence + 1] - first);
        return {sequence,
                kv_head,
                first,
                count,
                chunk_at(sequence, first, kv_head).first,
                chunk_at(sequence, first + count - 1, kv_head).longest};
    }

    // The first position that a row of the sequence sees.
    int first_seen(int sequence, int row) const {
        const int all = batch_.seen_from[sequence];
        return window_ > 0 ? std::max(all, batch_.positions[row] - window_ + 1) : all;
    }

    int visible(const Chunk& chunk, int r, int span) const {
        const int end = block_ ? chunk.longest : batch_.positions[chunk.row[r]] + 1;
        return std::clamp(end - span * span_tokens, 0, span_tokens);
    }

    // Groups number * kv_heads + first_head .. last_head - 1, over one span.
    struct SpanItem {
        int number, span, first_head, last_head;
    };

    SpanItem span_item(int item) const {
        const int rest = item - whole_, heads = layer_.kv_heads;
        if (rest < 0) return {item / spans_, first_span_ + item % spans_, 0, heads};
        const int unit = whole_ + rest / heads;
        return {unit / spans_, first_span_ + unit % spans_, rest % heads, rest % heads + 1};
    }

    // Keys to fetch while a span is computed.
    struct Ahead {
        const std::int32_t* blocks;
        int count, kv_head;
    };

    const std::int32_t* blocks_of(int sequence, int span) const {
        return batch_.block_tables.data() + static_cast<std::size_t>(sequence) * batch_.table_width +
               span * (span_tokens / block_tokens);
    }

    Ahead keys_of(const Group& group, int span) const {
        const int positions = std::clamp(group.longest - span * span_tokens, 0, span_tokens);
        return {blocks_of(group.sequence, span), (positions + block_tokens - 1) / block_tokens,
                group.kv_head};
    }

    Ahead first_keys_of(const Group& group) const { return keys_of(group, group.first_seen / span_tokens); }

    // Of an item; none where there is no such item.
    Ahead first_keys_of(int item) const {
        if (item >= items_) return {};
        if (!span_items_) return first_keys_of(group_at(groups_ - 1 - item));
        const SpanItem first = span_item(item);
        return keys_of(group_at(first.number * layer_.kv_heads + first.first_head), first.span);
    }

    // Of the item that nobody has taken yet: most likely this thread's next one.
    Ahead next_keys() const { return first_keys_of(next_.load(std::memory_order_relaxed)); }

    static int first_span(const Chunk& chunk) { return chunk.first / span_tokens; }
    static bool sees(const Chunk& chunk, int span) {
        return span >= first_span(chunk) && span * span_tokens < chunk.longest;
    }

    // Fills states (one per query row, state_floats_ apart by `step`) with one span's o, m, l.
    void compute_span(const Chunk& chunk, int span, const Ahead& ahead, float* states, std::size_t step,
                      float* scratch) const {
        SpanArguments a{};
        a.type = layer_.type;
        a.keys = layer_.keys.data();
        a.values = layer_.values.data();
        a.kv_heads = layer_.kv_heads;
        a.kv_head = chunk.kv_head;
        a.head_dim = layer_.head_dim;
        a.blocks = blocks_of(chunk.sequence, span);
        a.next_blocks = ahead.blocks;
        a.next_count = ahead.count;
        a.next_kv_head = ahead.kv_head;
        a.hidden = std::max(0, chunk.first - span * span_tokens);
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
        const std::size_t chunk_floats = queries_ * state_floats_;
        float* fresh = scratch + queries_ * span_tokens;
        float* folded = fresh + chunk_floats;
        const int spans = (group.longest + span_tokens - 1) / span_tokens;
        for (int span = group.first_seen / span_tokens; span < spans; ++span) {
            const Ahead ahead = span + 1 < spans ? keys_of(group, span + 1) : next_keys();
            for (int c = 0; c < group.count; ++c) {
                const Chunk chunk = chunk_at(group.sequence, group.first + c, group.kv_head);
                fold_span(chunk, span, c + 1 == group.count ? ahead : Ahead{}, folded + c * chunk_floats,
                          fresh, scratch);
            }
        }
        for (int c = 0; c < group.count; ++c) {
            const Chunk chunk = chunk_at(group.sequence, group.first + c, group.kv_head);
            for (int r = 0; r < chunk.queries; ++r) {
                engine_.kernels().attention_finish(folded + c * chunk_floats + r * state_floats_,
                                                   layer_.head_dim, out_of(chunk, r));
            }
        }
    }

    void fold_span(const Chunk& chunk, int span, const Ahead& ahead, float* folded, float* fresh,
                   float* scratch) {
        if (!sees(chunk, span)) return;
        const bool first = span == first_span(chunk);
        compute_span(chunk, span, ahead, first ? folded : fresh, state_floats_, scratch);
        if (first) return;
        for (int r = 0; r < chunk.queries; ++r) {
            if (visible(chunk, r, span) == 0) continue;
            engine_.kernels().attention_merge(folded + r * state_floats_, fresh + r * state_floats_,
                                              layer_.head_dim);
        }
    }

    // The state of query row `r` of the chunk `number` of a kv head: [kv head][chunk][query row][span].
    float* state_of(int number, int kv_head, int r, int span) const {
        const std::size_t chunk = static_cast<std::size_t>(kv_head) * chunk_starts_[sequences()] + number;
        const std::size_t index = (chunk * queries_ + r) * spans_ + span - first_span_;
        return reinterpret_cast<float*>(engine_.shared_scratch()) + index * state_floats_;
    }

    void attend_spans(const SpanItem& mine, float* scratch) {
        for (int head = mine.first_head; head < mine.last_head; ++head) {
            const Group group = group_at(mine.number * layer_.kv_heads + head);
            Ahead ahead = head + 1 < mine.last_head ? keys_of(group, mine.span) : next_keys();
            if (head + 1 < mine.last_head) ++ahead.kv_head;
            for (int c = 0; c < group.count; ++c) {
                const Chunk chunk = chunk_at(group.sequence, group.first + c, head);
                if (!sees(chunk, mine.span)) continue;
                compute_span(chunk, mine.span, c + 1 == group.count ? ahead : Ahead{},
                             state_of(group.first + c, head, 0, mine.span),
                             static_cast<std::size_t>(spans_) * state_floats_, scratch);
            }
        }
    }

    void fold_chunk(int index) {
        const int number = index / layer_.kv_heads, kv_head = index % layer_.kv_heads;
        const Chunk chunk = chunk_at(sequence_of(chunk_starts_, number), number, kv_head);
        for (int r = 0; r < chunk.queries; ++r) {
            const int first = first_span(chunk);
            float* folded = state_of(number, kv_head, r, first);
            for (int span = first + 1; visible(chunk, r, span) > 0; ++span) {
                engine_.kernels().attention_merge(folded, state_of(number, kv_head, r, span),
                                                  layer_.head_dim);
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
    int window_;  // 0: none
    bool block_;  // rows see those after them
    int group_;
    int queries_;     // attended together
    int row_chunks_;  // chunks of one row
    std::size_t state_floats_;
    int max_spans_;
    // planned by `prepare` for the step at hand
    // per sequence: chunks, and groups, of earlier sequences (of one kv head)
    std::vector<int> chunk_starts_, group_starts_;
    int first_span_ = 0, spans_ = 0;  // of all sequences
    int chunks_ = 0, groups_ = 0;
    int whole_ = 0, items_ = 0;  // span items: the first `whole_` are of all kv heads
    int together_ = 1;           // chunks of a group
    bool span_items_ = false;
    std::atomic<int> next_{0};
};

}  // namespace

void bind_attention(nb::module_& m) {
    m.def(
        "attention",
        [](Engine& engine, Batch& batch, ConstRows qkv, int query_heads, LayerCache keys, LayerCache values,
           const std::string& type, float scale, Rows out, int window, bool block) -> std::unique_ptr<Op> {
            require(query_heads >= 1, "attention: no query heads");
            const Layer layer("attention", keys, values, type, batch, query_heads, qkv.shape(1));
            return std::make_unique<AttentionOp>(engine, batch, qkv, query_heads, layer, scale, out, window,
                                                 block);
        },
        nb::arg("engine"), nb::arg("batch"), nb::arg("qkv").noconvert(), nb::arg("query_heads"),
        nb::arg("keys").noconvert(), nb::arg("values").noconvert(), nb::arg("type"), nb::arg("scale"),
        nb::arg("out").noconvert(), nb::arg("window") = 0, nb::arg("block") = false, nb::keep_alive<0, 1>(),
        nb::keep_alive<0, 2>());
}

}  // namespace quickdraft
