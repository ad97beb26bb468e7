// Batch: the rows of one step, copied in and checked, so that every index a kernel forms is inside its
// buffer.
#pragma once

#include <cstdint>
#include <vector>

namespace quickdraft {

struct RowCount {
    int count = 0;
};

// Per sequence of a step, for models with recurrent layers (ops/interface.py, RecurrentCache), and the first
// position that attention sees; null: none, 0.
struct SequenceStates {
    const std::int32_t *slots = nullptr, *replay = nullptr, *drafted = nullptr, *seen_from = nullptr;
};

struct Batch {
    Batch(int max_rows, int max_sequences, int table_width, int pool_blocks, int vocabulary);

    // Copies a step in; throws std::invalid_argument (ValueError) and changes nothing when it is out of
    // range. block_tables is [sequences, width].
    void set(const std::int32_t* tokens, const std::int32_t* positions, int row_count, int position_count,
             const std::int32_t* row_starts, int sequence_count, const std::int32_t* block_tables,
             int table_rows, int width, const std::int32_t* wanted_rows, int wanted_count,
             const SequenceStates& states = {});

    const std::int32_t* table_of_row(int row) const {
        return block_tables.data() + static_cast<std::size_t>(row_sequences[row]) * table_width;
    }

    const int max_rows, max_sequences, table_width, pool_blocks, vocabulary;
    RowCount rows, wanted;
    int sequences = 0;
    int highest_position = -1;
    bool has_slots = false;
    int drafted_rows = 0;  // of all sequences
    std::vector<std::int32_t> tokens, positions, row_sequences, row_starts, wanted_rows;
    std::vector<std::int32_t> slots, replay, drafted;  // of each sequence, where has_slots
    std::vector<std::int32_t> seen_from;               // of each sequence
    std::vector<std::int32_t> block_tables;            // [max_sequences, table_width]
};

}  // namespace quickdraft
