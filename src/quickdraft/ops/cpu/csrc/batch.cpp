#include "batch.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace quickdraft {

namespace {

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

std::string text(int number) { return std::to_string(number); }

void check_states(const SequenceStates& states, const std::int32_t* row_starts, int sequences) {
    if (states.slots == nullptr) {
        if (states.replay != nullptr || states.drafted != nullptr) refuse("replay or drafted without slots");
        return;
    }
    for (int b = 0; b < sequences; ++b) {
        const int slot = states.slots[b], rows = row_starts[b + 1] - row_starts[b];
        const bool twice = std::find(states.slots, states.slots + b, slot) != states.slots + b;
        if (slot < 0 || twice) refuse("slot " + text(slot) + "; expected one of its own for each sequence");
        if (states.replay != nullptr && states.replay[b] < 0) {
            refuse("replay " + text(states.replay[b]) + "; expected 0 or more");
        }
        if (states.drafted != nullptr && (states.drafted[b] < 0 || states.drafted[b] > rows)) {
            refuse("drafted " + text(states.drafted[b]) + "; expected 0.." + text(rows));
        }
    }
}

}  // namespace

Batch::Batch(int max_rows, int max_sequences, int table_width, int pool_blocks, int vocabulary)
    : max_rows(max_rows),
      max_sequences(max_sequences),
      table_width(table_width),
      pool_blocks(pool_blocks),
      vocabulary(vocabulary) {
    if (std::min({max_rows, max_sequences, table_width, pool_blocks, vocabulary}) < 1) {
        refuse("batch limits must be 1 or more; got rows " + text(max_rows) + ", sequences " +
               text(max_sequences) + ", table width " + text(table_width) + ", pool blocks " +
               text(pool_blocks) + ", vocabulary " + text(vocabulary));
    }
    if (table_width > (1 << 26)) refuse("table width " + text(table_width) + "; expected at most 67108864");
    tokens.resize(max_rows);
    positions.resize(max_rows);
    row_sequences.resize(max_rows);
    wanted_rows.resize(max_rows);
    row_starts.resize(static_cast<std::size_t>(max_sequences) + 1);
    for (auto* numbers : {&slots, &replay, &drafted, &seen_from}) numbers->resize(max_sequences);
    block_tables.resize(static_cast<std::size_t>(max_sequences) * table_width);
}

void Batch::set(const std::int32_t* new_tokens, const std::int32_t* new_positions, int row_count,
                int position_count, const std::int32_t* new_starts, int sequence_count,
                const std::int32_t* new_tables, int table_rows, int width, const std::int32_t* new_wanted,
                int wanted_count, const SequenceStates& states) {
    if (row_count < 1 || row_count > max_rows || position_count != row_count) {
        refuse(text(row_count) + " tokens and " + text(position_count) + " positions; expected 1.." +
               text(max_rows) + " of each");
    }
    if (sequence_count < 1 || sequence_count > max_sequences || table_rows != sequence_count) {
        refuse(text(sequence_count) + " sequences and " + text(table_rows) + " block tables; expected 1.." +
               text(max_sequences) + " sequences with one block table each");
    }
    if (width > table_width)
        refuse("block tables of " + text(width) + "; expected at most " + text(table_width));
    bool increasing = new_starts[0] == 0 && new_starts[sequence_count] == row_count;
    for (int b = 0; b < sequence_count; ++b) increasing &= new_starts[b] < new_starts[b + 1];
    if (!increasing) refuse("row_starts must increase from 0 to " + text(row_count));
    for (int t = 0; t < row_count; ++t) {
        if (new_tokens[t] < 0 || new_tokens[t] >= vocabulary) {
            refuse("token id " + text(new_tokens[t]) + "; expected 0.." + text(vocabulary - 1));
        }
    }
    for (int r = 0; r < wanted_count; ++r) {
        if (new_wanted[r] < 0 || new_wanted[r] >= row_count ||
            (r > 0 && new_wanted[r] <= new_wanted[r - 1])) {
            refuse("wanted rows must increase within 0.." + text(row_count - 1) + "; got " +
                   text(new_wanted[r]));
        }
    }
    check_states(states, new_starts, sequence_count);
    int highest = -1;
    for (int b = 0; b < sequence_count; ++b) {
        const int first = new_positions[new_starts[b]];
        for (int t = new_starts[b]; t < new_starts[b + 1]; ++t) {
            // compared without adding to `first`, which could overflow
            if (first < 0 || new_positions[t] < first || new_positions[t] - first != t - new_starts[b]) {
                refuse("positions of sequence " + text(b) + " must be consecutive from 0 or more; got " +
                       text(new_positions[t]));
            }
        }
        if (states.seen_from != nullptr && (states.seen_from[b] < 0 || states.seen_from[b] > first)) {
            refuse("seen from " + text(states.seen_from[b]) + "; expected 0.." + text(first) +
                   ", the first row's position");
        }
        const int last = new_positions[new_starts[b + 1] - 1], used = last / block_tokens + 1;
        if (used > width) refuse("position " + text(last) + " lies beyond the sequence's block table");
        for (int i = 0; i < used; ++i) {
            const int block = new_tables[static_cast<std::size_t>(b) * width + i];
            if (block < 0) refuse("position " + text(last) + " lies beyond the sequence's block table");
            if (block >= pool_blocks) {
                refuse("block table names block " + text(block) + ", beyond the pool of " +
                       text(pool_blocks));
            }
        }
        highest = std::max(highest, last);
    }

    std::copy_n(new_tokens, row_count, tokens.begin());
    std::copy_n(new_positions, row_count, positions.begin());
    std::copy_n(new_starts, sequence_count + 1, row_starts.begin());
    std::copy_n(new_wanted, wanted_count, wanted_rows.begin());
    for (int b = 0; b < sequence_count; ++b) {
        std::copy_n(new_tables + static_cast<std::size_t>(b) * width, width,
                    block_tables.begin() + static_cast<std::size_t>(b) * table_width);
        std::fill(row_sequences.begin() + new_starts[b], row_sequences.begin() + new_starts[b + 1], b);
    }
    for (int b = 0; b < sequence_count; ++b) {
        seen_from[b] = states.seen_from != nullptr ? states.seen_from[b] : 0;
    }
    has_slots = states.slots != nullptr;
    drafted_rows = 0;
    for (int b = 0; has_slots && b < sequence_count; ++b) {
        slots[b] = states.slots[b];
        replay[b] = states.replay != nullptr ? states.replay[b] : 0;
        drafted[b] = states.drafted != nullptr ? states.drafted[b] : 0;
        drafted_rows += drafted[b];
    }
    rows.count = row_count;
    wanted.count = wanted_count;
    sequences = sequence_count;
    highest_position = highest;
}

}  // namespace quickdraft
