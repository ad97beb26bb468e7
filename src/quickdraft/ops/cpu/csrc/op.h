// Engine, Op and Program: ops are checked once when they are made, recorded into a Program, and run in one
// parallel job: every thread walks the same list, with a barrier between ops.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "timer.h"

namespace quickdraft {

// Zero-filled memory aligned to 64 bytes; huge pages are asked for where it is large.
class AlignedBytes {
  public:
    AlignedBytes() = default;
    explicit AlignedBytes(std::size_t size);
    // Left as it comes: threads that write different parts then share the work of touching it first.
    static AlignedBytes unwritten(std::size_t size);
    std::uint8_t* data() const { return data_.get(); }
    std::size_t size() const { return size_; }

  private:
    struct Free {
        void operator()(std::uint8_t* p) const;
    };
    std::unique_ptr<std::uint8_t, Free> data_;
    std::size_t size_ = 0;
};

// Memory for many weights, side by side in large pieces: a step reads them one after the other, and pieces
// get huge pages, which a weight of less than 2 MiB would not. A piece is freed with the last weight in it.
class WeightMemory {
  public:
    struct Part {
        std::shared_ptr<AlignedBytes> piece;
        std::uint8_t* data = nullptr;
        std::size_t size = 0;
    };
    Part take(std::size_t size);

  private:
    std::mutex mutex_;
    std::shared_ptr<AlignedBytes> piece_;
    std::size_t used_ = 0;
};

// A pool of threads, the kernels they run, and scratch memory shared by all ops (one program runs at a time).
class Engine {
  public:
    Engine(int threads, const std::string& instructions);  // "auto", "scalar", "avx2", "avx512"
    const Kernels& kernels() const { return *kernels_; }
    Pool& pool() { return pool_; }
    WeightMemory& weights() { return weights_; }

    // Grows scratch to at least this much; called when an op is made, never while a program runs.
    void reserve(std::size_t shared_bytes, std::size_t thread_bytes);
    std::uint8_t* shared_scratch() const { return shared_.data(); }
    std::uint8_t* thread_scratch(int thread) const {
        return threads_.data() + static_cast<std::size_t>(thread) * thread_bytes_;
    }

  private:
    const Kernels* kernels_;
    Pool pool_;
    WeightMemory weights_;
    AlignedBytes shared_, threads_;
    std::size_t thread_bytes_ = 0;
};

class Op {
  public:
    virtual ~Op() = default;
    // Checks this step's row counts against the buffers (std::invalid_argument) and plans the work; one
    // thread.
    virtual void prepare(int threads) = 0;
    // True when only thread 0 works this step, so no barrier is needed between two such ops.
    virtual bool only_first_thread() const { return false; }
    virtual void run(Worker& worker) = 0;
    // Whether it reads much memory (asked after `prepare`). Then `fetch` asks for the first of what this
    // thread will read, as soon as the thread is done with the last such op before: while it waits for the
    // others, and while ops that read little run.
    virtual bool fetches() const { return false; }
    virtual void fetch(const Worker&) const {}
};

// Runs ops in order as one job; `times`, if given, was made for as many ops and threads.
void run_ops(Engine& engine, const std::vector<Op*>& ops, OpTimes* times = nullptr);

struct Range {
    int first, last;
};

// The part of 0..count-1 that is this thread's.
inline Range share(int count, const Worker& worker) {
    const auto part = [&](int thread) {
        return static_cast<int>(static_cast<std::int64_t>(count) * thread / worker.threads());
    };
    return {part(worker.thread()), part(worker.thread() + 1)};
}

inline void require(bool fine, const std::string& message) {
    if (!fine) throw std::invalid_argument(message);
}

// Throws when a step has more rows than a buffer has room for.
inline void check_rows(const char* op, int count, std::size_t capacity) {
    if (static_cast<std::size_t>(count) > capacity) {
        throw std::invalid_argument(std::string(op) + ": " + std::to_string(count) +
                                    " rows in this step, but a buffer of " + std::to_string(capacity) +
                                    " rows");
    }
}

inline std::size_t round_up(std::size_t size, std::size_t multiple) {
    return (size + multiple - 1) / multiple * multiple;
}

}  // namespace quickdraft
