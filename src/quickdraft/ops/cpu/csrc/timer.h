// OpTimes: when each thread was done with each op of one run, for `bench ops`. Programs that are not timed
// carry a null pointer in its place.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

namespace quickdraft {

class OpTimes {
  public:
    OpTimes(std::size_t ops, int threads)
        : ops_(ops), threads_(threads), done_(ops * threads), started_(Clock::now()) {}

    void start() { started_ = Clock::now(); }
    // Each thread, after its share of an op and before the barrier that follows it.
    void done(std::size_t op, int thread) { done_[thread * ops_ + op] = Clock::now(); }

    // From when every thread was done with the op before until every thread was done with this one: the
    // barrier between them is part of it.
    double seconds(std::size_t op) const { return between(begun(op), ended(op)); }
    // Of that, what a thread spent waiting for the last one, on average.
    double waiting(std::size_t op) const {
        const auto from = begun(op), to = ended(op);
        double total = 0;
        for (int thread = 0; thread < threads_; ++thread)
            total += between(std::max(from, done_[thread * ops_ + op]), to);
        return total / threads_;
    }

  private:
    using Clock = std::chrono::steady_clock;
    Clock::time_point begun(std::size_t op) const { return op == 0 ? started_ : ended(op - 1); }
    Clock::time_point ended(std::size_t op) const {
        Clock::time_point last = started_;
        for (int thread = 0; thread < threads_; ++thread) last = std::max(last, done_[thread * ops_ + op]);
        return last;
    }
    static double between(Clock::time_point from, Clock::time_point to) {
        return std::chrono::duration<double>(to - from).count();
    }

    std::size_t ops_;
    int threads_;
    std::vector<Clock::time_point> done_;  // [thread, op], so that threads share few cache lines
    Clock::time_point started_;
};

}  // namespace quickdraft
