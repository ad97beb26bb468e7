// The largest values of a row and where they are.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels.h"

namespace quickdraft {

struct Candidate {
    float value;
    int id;
};

inline bool better(const Candidate& a, const Candidate& b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// The k best of row, best first: a heap of the best so far with the worst on top. Later ids enter only when
// strictly larger, so ties keep the lowest id.
inline std::vector<Candidate> top_of(const Kernels& kernels, const float* row, int count, int k) {
    std::vector<Candidate> heap;
    if (k == 0) return heap;
    heap.reserve(k);
    int i = 0;
    for (; i < count && static_cast<int>(heap.size()) < k; ++i) {
        if (row[i] != row[i]) continue;
        heap.push_back({row[i], i});
        std::push_heap(heap.begin(), heap.end(), better);
    }
    while ((i = kernels.first_above(row, i, count, heap.empty() ? 0.0f : heap.front().value)) < count) {
        std::pop_heap(heap.begin(), heap.end(), better);
        heap.back() = {row[i], i};
        std::push_heap(heap.begin(), heap.end(), better);
        ++i;
    }
    std::sort_heap(heap.begin(), heap.end(), better);
    return heap;
}

}  // namespace quickdraft
