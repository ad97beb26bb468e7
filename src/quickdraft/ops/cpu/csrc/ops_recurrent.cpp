// causal_conv, gated_delta and settle: how rows, channels and heads become work for the threads. A thread has
// its own channels or its own columns of a head's state, of all sequences, and takes their rows in order.
#include <cstring>

#include "recurrent.h"

namespace quickdraft {

namespace {

constexpr int channel_chunk = 128;

class CausalConvOp final : public Op {
  public:
    CausalConvOp(Engine& engine, const Batch& batch, ConstRows x, ConstRows taps, Recurrent& state, int layer,
                 Rows out)
        : engine_(engine), batch_(batch), x_(x), taps_(taps), state_(state), layer_(layer), out_(out) {
        const auto channels = static_cast<std::size_t>(state.channels);
        state.check_layer("causal_conv", layer);
        require_width("causal_conv", "x", x, channels);
        require_width("causal_conv", "out", out, channels);
        require_width("causal_conv", "weight", taps, channels);
        require_size("causal_conv", "weight", taps.shape(0), conv_window + 1);
        require(x.data() != out.data(), "causal_conv: out must not be x");
    }
    void prepare(int) override {
        check_rows("causal_conv", batch_.rows.count, std::min(x_.shape(0), out_.shape(0)));
        state_.check("causal_conv", batch_);
    }
    void run(Worker& worker) override {
        const int channels = state_.channels, chunks = (channels + channel_chunk - 1) / channel_chunk;
        const Range mine = share(chunks, worker);
        const int from = mine.first * channel_chunk, to = std::min(mine.last * channel_chunk, channels);
        for (int b = 0; b < batch_.sequences && from < to; ++b) advance(b, from, to);
    }

  private:
    void advance(int b, int from, int to) {
        const int channels = state_.channels, slot = batch_.slots[b];
        const int first = batch_.row_starts[b], count = batch_.row_starts[b + 1] - first;
        const int certain = count - batch_.drafted[b];
        const float* x = x_.data() + static_cast<std::size_t>(first) * channels;
        float* out = out_.data() + static_cast<std::size_t>(first) * channels;
        float* window = state_.window(slot, layer_);
        state_.replay_window(slot, layer_, batch_.replay[b], from, to);
        for (int t = 0; t < count; ++t) {
            const float* rows[conv_window + 1];
            for (int j = 0; j <= conv_window; ++j) {
                const int source = t + j - conv_window;
                rows[j] = source < 0 ? window + static_cast<std::size_t>(source + conv_window) * channels
                                     : x + static_cast<std::size_t>(source) * channels;
            }
            engine_.kernels().causal_conv(rows, taps_.data(), channels, from, to,
                                          out + static_cast<std::size_t>(t) * channels);
        }
        const auto row = [&](int i) { return x + static_cast<std::size_t>(i) * channels; };
        state_.shift_window(window, certain, from, to, row);
        for (int t = certain; t < count; ++t) {
            std::memcpy(state_.history(slot, layer_, t - certain) + from, row(t) + from,
                        (to - from) * sizeof(float));
        }
    }

    Engine& engine_;
    const Batch& batch_;
    ConstRows x_, taps_;
    Recurrent& state_;
    int layer_;
    Rows out_;
};

// First all threads normalise queries and keys and make the gates of every row, in shared scratch; then each
// takes its tiles; last, the inputs of pending rows go to the history, which the tiles have replayed by then.
class GatedDeltaOp final : public Op {
  public:
    GatedDeltaOp(Engine& engine, const Batch& batch, ConstRows qkv, ConstRows gates, Vector rate, Vector bias,
                 float eps, Recurrent& state, int layer, Rows out)
        : engine_(engine),
          batch_(batch),
          qkv_(qkv),
          gates_(gates),
          rate_(rate),
          bias_(bias),
          eps_(eps),
          state_(state),
          layer_(layer),
          out_(out),
          row_floats_(round_up(2 * static_cast<std::size_t>(state.keys) + 2 * state.value_heads, 16)) {
        const auto heads = static_cast<std::size_t>(state.value_heads);
        state.check_layer("gated_delta", layer);
        require_width("gated_delta", "qkv", qkv, state.channels);
        require_width("gated_delta", "gates", gates, 2 * heads);
        require_width("gated_delta", "out", out, state.values);
        require_size("gated_delta", "rate", rate.size(), heads);
        require_size("gated_delta", "bias", bias.size(), heads);
        engine.reserve(qkv.shape(0) * row_floats_ * sizeof(float), state.tile_floats() * sizeof(float));
    }
    void prepare(int) override {
        check_rows("gated_delta", batch_.rows.count,
                   std::min({qkv_.shape(0), gates_.shape(0), out_.shape(0)}));
        state_.check("gated_delta", batch_);
    }
    void run(Worker& worker) override {
        const int heads = state_.key_heads;
        const Range normalised = share(batch_.rows.count * heads, worker);
        for (int i = normalised.first; i < normalised.last; ++i) make_inputs(i / heads, i % heads);
        worker.barrier();
        const int tiles = state_.tiles(), sequences = batch_.sequences;
        const Range mine = share(state_.value_heads * tiles * sequences, worker);
        auto* scratch = reinterpret_cast<float*>(engine_.thread_scratch(worker.thread()));
        for (int i = mine.first; i < mine.last; ++i) {
            const int of_head = i / sequences;
            advance(i % sequences, of_head / tiles, of_head % tiles, scratch);
        }
        if (batch_.drafted_rows == 0) return;
        worker.barrier();
        keep_inputs(share(batch_.sequences, worker));
    }

  private:
    float* inputs(int row) const {
        return reinterpret_cast<float*>(engine_.shared_scratch()) + row * row_floats_;
    }

    void make_inputs(int row, int head) {
        const Kernels& kernels = engine_.kernels();
        const int dim = state_.key_dim, heads = state_.value_heads;
        const float* qkv = qkv_.data() + static_cast<std::size_t>(row) * state_.channels + head * dim;
        float* found = inputs(row);
        kernels.l2_norm(qkv, dim, eps_, 1.0f / __builtin_sqrtf(static_cast<float>(dim)), found + head * dim);
        kernels.l2_norm(qkv + state_.keys, dim, eps_, 1.0f, found + state_.keys + head * dim);
        if (head == 0) {
            const float* gates = gates_.data() + static_cast<std::size_t>(row) * 2 * heads;
            float* beta = found + 2 * state_.keys;
            kernels.delta_gates(gates, gates + heads, rate_.data(), bias_.data(), heads, beta, beta + heads);
        }
    }

    void advance(int b, int head, int index, float* scratch) {
        const int slot = batch_.slots[b], first = batch_.row_starts[b], last = batch_.row_starts[b + 1];
        const int certain = last - batch_.drafted[b], replay = batch_.replay[b];
        const Recurrent::Tile tile = state_.tile(slot, layer_, head, index);
        state_.load_tile(tile, scratch);
        state_.replay_tile(engine_.kernels(), tile, slot, layer_, replay, scratch);
        for (int row = first; row < certain; ++row) take(row, tile, scratch);
        if (replay > 0 || certain > first) state_.store_tile(tile, scratch);
        for (int row = certain; row < last; ++row) take(row, tile, scratch);
    }

    void take(int row, const Recurrent::Tile& tile, float* scratch) {
        const int dim = state_.key_dim, key_head = tile.head / (state_.value_heads / state_.key_heads);
        const float* query = inputs(row) + key_head * dim;
        const float* beta = inputs(row) + 2 * state_.keys + tile.head;
        const int column = tile.head * state_.value_dim + tile.first;
        const float* qkv = qkv_.data() + static_cast<std::size_t>(row) * state_.channels;
        engine_.kernels().delta_row(
            scratch, dim, tile.width,
            {query + state_.keys, query, qkv + 2 * state_.keys + column, beta[0], beta[state_.value_heads],
             out_.data() + static_cast<std::size_t>(row) * state_.values + column});
    }

    void keep_inputs(Range sequences) {
        const std::size_t keys = state_.keys, values = state_.values, heads = state_.value_heads;
        for (int b = sequences.first; b < sequences.last; ++b) {
            const int last = batch_.row_starts[b + 1], certain = last - batch_.drafted[b];
            for (int row = certain; row < last; ++row) {
                float* kept = state_.history(batch_.slots[b], layer_, row - certain) + state_.channels;
                const float* qkv = qkv_.data() + static_cast<std::size_t>(row) * state_.channels;
                std::memcpy(kept, inputs(row) + keys, keys * sizeof(float));
                std::memcpy(kept + keys, qkv + 2 * keys, values * sizeof(float));
                std::memcpy(kept + keys + values, inputs(row) + 2 * keys, 2 * heads * sizeof(float));
            }
        }
    }

    Engine& engine_;
    const Batch& batch_;
    ConstRows qkv_, gates_;
    Vector rate_, bias_;
    float eps_;
    Recurrent& state_;
    int layer_;
    Rows out_;
    std::size_t row_floats_;
};

// Applies pending rows outside of a step.
class SettleOp final : public Op {
  public:
    SettleOp(Engine& engine, Recurrent& state, int slot, int rows)
        : engine_(engine), state_(state), slot_(slot), rows_(rows) {
        state.check_replay("settle", slot, rows);
        engine.reserve(0, state.tile_floats() * sizeof(float));
    }
    void prepare(int) override {}
    void run(Worker& worker) override {
        const int tiles = state_.value_heads * state_.tiles();
        auto* scratch = reinterpret_cast<float*>(engine_.thread_scratch(worker.thread()));
        const Range mine = share(state_.layers() * tiles, worker);
        for (int i = mine.first; i < mine.last; ++i) {
            const int layer = i / tiles, of_layer = i % tiles;
            if (of_layer == 0) state_.replay_window(slot_, layer, rows_, 0, state_.channels);
            const Recurrent::Tile tile =
                state_.tile(slot_, layer, of_layer / state_.tiles(), of_layer % state_.tiles());
            state_.load_tile(tile, scratch);
            state_.replay_tile(engine_.kernels(), tile, slot_, layer, rows_, scratch);
            state_.store_tile(tile, scratch);
        }
    }

  private:
    Engine& engine_;
    Recurrent& state_;
    int slot_, rows_;
};

}  // namespace

void bind_recurrent(nb::module_& m) {
    nb::class_<Recurrent>(m, "Recurrent")
        .def(nb::init<Recurrent::States, Recurrent::History, int, int, int, int>(),
             nb::arg("states").noconvert(), nb::arg("history").noconvert(), nb::arg("key_heads"),
             nb::arg("value_heads"), nb::arg("key_dim"), nb::arg("value_dim"));
    m.def(
        "causal_conv",
        [](Engine& engine, Batch& batch, ConstRows x, ConstRows weight, Recurrent& state, int layer,
           Rows out) -> std::unique_ptr<Op> {
            return std::make_unique<CausalConvOp>(engine, batch, x, weight, state, layer, out);
        },
        nb::arg("engine"), nb::arg("batch"), nb::arg("x").noconvert(), nb::arg("weight").noconvert(),
        nb::arg("state"), nb::arg("layer"), nb::arg("out").noconvert(), nb::keep_alive<0, 1>(),
        nb::keep_alive<0, 2>(), nb::keep_alive<0, 5>());
    m.def(
        "gated_delta",
        [](Engine& engine, Batch& batch, ConstRows qkv, ConstRows gates, Vector rate, Vector bias, float eps,
           Recurrent& state, int layer, Rows out) -> std::unique_ptr<Op> {
            return std::make_unique<GatedDeltaOp>(engine, batch, qkv, gates, rate, bias, eps, state, layer,
                                                  out);
        },
        nb::arg("engine"), nb::arg("batch"), nb::arg("qkv").noconvert(), nb::arg("gates").noconvert(),
        nb::arg("rate").noconvert(), nb::arg("bias").noconvert(), nb::arg("eps"), nb::arg("state"),
        nb::arg("layer"), nb::arg("out").noconvert(), nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>(),
        nb::keep_alive<0, 8>());
    m.def(
        "settle",
        [](Engine& engine, Recurrent& state, int slot, int rows) -> std::unique_ptr<Op> {
            return std::make_unique<SettleOp>(engine, state, slot, rows);
        },
        nb::arg("engine"), nb::arg("state"), nb::arg("slot"), nb::arg("rows"), nb::keep_alive<0, 1>(),
        nb::keep_alive<0, 2>());
}

}  // namespace quickdraft
