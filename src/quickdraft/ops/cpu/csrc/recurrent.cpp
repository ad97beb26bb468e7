#include "recurrent.h"

#include <cstring>

namespace quickdraft {

Recurrent::Recurrent(States states, History history, int key_heads, int value_heads, int key_dim,
                     int value_dim)
    : key_heads(key_heads),
      value_heads(value_heads),
      key_dim(key_dim),
      value_dim(value_dim),
      keys(key_heads * key_dim),
      values(value_heads * value_dim),
      channels(2 * keys + values),
      states_(states),
      history_(history) {
    require(key_heads >= 1 && value_heads >= 1 && value_heads % key_heads == 0,
            "recurrent: " + std::to_string(value_heads) + " value heads for " + std::to_string(key_heads) +
                " key heads; expected a multiple");
    require(key_dim >= 8 && key_dim % 8 == 0 && value_dim >= 8 && value_dim % 8 == 0,
            "recurrent: heads of " + std::to_string(key_dim) + " and " + std::to_string(value_dim) +
                "; expected multiples of 8");
    const std::size_t square = static_cast<std::size_t>(value_heads) * key_dim * value_dim;
    require_size("recurrent", "a layer of a slot", states.shape(2),
                 square + static_cast<std::size_t>(conv_window) * channels);
    require_size("recurrent", "a row of history", history.shape(3),
                 static_cast<std::size_t>(channels) + keys + values + 2 * value_heads);
    require_size("recurrent", "history's layers", history.shape(1), states.shape(1));
    require(history.shape(0) <= states.shape(0), "recurrent: fewer slots than sequences");
}

void Recurrent::check_layer(const char* op, int layer) const {
    require(layer >= 0 && layer < layers(), std::string(op) + ": layer " + std::to_string(layer) +
                                                "; expected 0.." + std::to_string(layers() - 1));
}

void Recurrent::check_replay(const char* op, int slot, int rows) const {
    const std::string name = std::string(op) + ": ";
    require(slot >= 0 && slot < slots(),
            name + "slot " + std::to_string(slot) + "; expected 0.." + std::to_string(slots() - 1));
    require(rows == 0 || slot < sequences(),
            name + "slot " + std::to_string(slot) + " is a checkpoint's and has no pending rows");
    require(rows >= 0 && rows <= most_pending(),
            name + std::to_string(rows) + " pending rows; expected 0.." + std::to_string(most_pending()));
}

void Recurrent::check(const char* op, const Batch& batch) const {
    require(batch.has_slots, std::string(op) + ": the step names no slots");
    for (int b = 0; b < batch.sequences; ++b) {
        check_replay(op, batch.slots[b], batch.replay[b]);
        check_replay(op, batch.slots[b], batch.drafted[b]);
    }
}

Recurrent::Tile Recurrent::tile(int slot, int layer, int head, int index) const {
    const int first = index * most_tile_columns;
    float* whole = state(slot, layer) + static_cast<std::size_t>(head) * key_dim * value_dim;
    return {whole + first, head, first, std::min(most_tile_columns, value_dim - first)};
}

void Recurrent::load_tile(const Tile& tile, float* scratch) const {
    for (int i = 0; i < key_dim; ++i) {
        std::memcpy(scratch + i * tile.width, tile.state + static_cast<std::size_t>(i) * value_dim,
                    tile.width * sizeof(float));
    }
}

void Recurrent::store_tile(const Tile& tile, const float* scratch) const {
    for (int i = 0; i < key_dim; ++i) {
        std::memcpy(tile.state + static_cast<std::size_t>(i) * value_dim, scratch + i * tile.width,
                    tile.width * sizeof(float));
    }
}

void Recurrent::replay_tile(const Kernels& kernels, const Tile& tile, int slot, int layer, int rows,
                            float* scratch) const {
    const int key_head = tile.head / (value_heads / key_heads);
    for (int row = 0; row < rows; ++row) {
        const float* key = history(slot, layer, row) + channels;
        const float* value = key + keys;
        const float* beta = value + values;
        kernels.delta_row(scratch, key_dim, tile.width,
                          {key + key_head * key_dim, nullptr, value + tile.head * value_dim + tile.first,
                           beta[tile.head], beta[value_heads + tile.head], nullptr});
    }
}

}  // namespace quickdraft
