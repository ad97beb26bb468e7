// Recurrent: where the states and the history of recurrent layers lie, and what advances them. Causal_conv,
// gated_delta and settle all go through the same functions, so a replayed row gives the bits it gave before.
//
// One slot is one run of floats [layers][S [value heads, key dim, value dim] | window [3, channels]]. The
// history of a sequence keeps the inputs of its pending rows, per layer and row
// [x [channels] | keys [key heads, key dim] | values [value heads, value dim] | beta | keep [value heads]].
#pragma once

#include <cstddef>

#include "binding.h"

namespace quickdraft {

constexpr int conv_window = 3;         // rows before the current one
constexpr int most_tile_columns = 32;  // value columns of a head that are advanced together, in first cache

class Recurrent {
  public:
    using States = Array<float, nb::ndim<3>>;   // [slots, layers, floats]
    using History = Array<float, nb::ndim<4>>;  // [sequences, layers, rows, floats]
    Recurrent(States states, History history, int key_heads, int value_heads, int key_dim, int value_dim);

    const int key_heads, value_heads, key_dim, value_dim;
    const int keys, values, channels;  // widths of a row: all keys, all values, queries | keys | values

    int slots() const { return static_cast<int>(states_.shape(0)); }
    int layers() const { return static_cast<int>(states_.shape(1)); }
    int sequences() const { return static_cast<int>(history_.shape(0)); }
    int most_pending() const { return static_cast<int>(history_.shape(2)); }
    int tiles() const { return (value_dim + most_tile_columns - 1) / most_tile_columns; }
    std::size_t tile_floats() const { return static_cast<std::size_t>(key_dim) * most_tile_columns; }

    float* state(int slot, int layer) const {
        return states_.data() +
               (static_cast<std::size_t>(slot) * states_.shape(1) + layer) * states_.shape(2);
    }
    float* window(int slot, int layer) const {
        return state(slot, layer) + static_cast<std::size_t>(value_heads) * key_dim * value_dim;
    }
    float* history(int slot, int layer, int row) const {
        const std::size_t at = static_cast<std::size_t>(slot) * history_.shape(1) + layer;
        return history_.data() + (at * history_.shape(2) + row) * history_.shape(3);
    }
    std::size_t history_floats() const { return history_.shape(3); }

    // Throws std::invalid_argument unless the step's slots, replays and drafts lie within this memory.
    void check(const char* op, const Batch& batch) const;
    void check_layer(const char* op, int layer) const;
    void check_replay(const char* op, int slot, int rows) const;

    // The window after `rows` more rows, for channels from..to-1; row(i) is the i-th of them.
    template <class Row>
    void shift_window(float* window, int rows, int from, int to, Row row) const {
        for (int i = 0; rows > 0 && i < conv_window; ++i) {
            const int source = i + rows;
            const float* new_row = source < conv_window ? window + static_cast<std::size_t>(source) * channels
                                                        : row(source - conv_window);
            for (int c = from; c < to; ++c) window[static_cast<std::size_t>(i) * channels + c] = new_row[c];
        }
    }
    // The same for the first `rows` rows of the slot's history.
    void replay_window(int slot, int layer, int rows, int from, int to) const {
        shift_window(window(slot, layer), rows, from, to, [&](int i) { return history(slot, layer, i); });
    }

    struct Tile {
        float* state;  // in the slot; rows value_dim apart
        int head, first, width;
    };
    Tile tile(int slot, int layer, int head, int index) const;
    void load_tile(const Tile& tile, float* scratch) const;
    void store_tile(const Tile& tile, const float* scratch) const;
    // Advances a loaded tile by the first `rows` rows of the slot's history.
    void replay_tile(const Kernels& kernels, const Tile& tile, int slot, int layer, int rows,
                     float* scratch) const;

  private:
    States states_;
    History history_;
};

}  // namespace quickdraft
