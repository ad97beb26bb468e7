#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quickdraft {

namespace {

constexpr auto awake_after_job = std::chrono::microseconds(1500);

std::atomic<int> forks{0};

void count_forks() {
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); }); });
}

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// Denormals flushed, round to nearest, exceptions masked; the old settings come back on destruction.
class FloatSettings {
  public:
#if defined(__x86_64__)
    FloatSettings() : before_(_mm_getcsr()) { _mm_setcsr(0x1F80 | 0x8000 | 0x0040); }
    ~FloatSettings() { _mm_setcsr(before_); }

  private:
    unsigned before_;
#endif
};

}  // namespace

struct PoolState {
    std::mutex callers;  // held for the length of a job
    Pool::Body body = nullptr;
    void* argument = nullptr;
    alignas(64) std::atomic<std::uint64_t> jobs{0};
    alignas(64) std::atomic<std::uint64_t> arrivals{0};
    alignas(64) std::atomic<int> sleepers{0};
    std::atomic<bool> stopping{false};
    std::mutex sleep;
    std::condition_variable wake;
    std::vector<std::thread> workers;
    // Pauses before a waiting thread gives its core away. Few: the thread it waits for may be queued behind
    // it on the same core, and then every pause at every barrier is lost; a yield costs little where nobody
    // waits.
    int spins = 0;
    int fork_count = 0;
};

namespace {

// Waits for a job newer than `seen`; false when the pool stops.
bool wait_for_job(PoolState& state, std::uint64_t seen) {
    const auto until = std::chrono::steady_clock::now() + awake_after_job;
    while (std::chrono::steady_clock::now() < until) {
        for (int i = 0; i < 64; ++i) {
            if (state.jobs.load(std::memory_order_acquire) != seen) return true;
            if (state.stopping.load(std::memory_order_relaxed)) return false;
            pause();
        }
        sched_yield();
    }
    std::unique_lock<std::mutex> lock(state.sleep);
    state.sleepers.fetch_add(1);  // sequentially consistent: `run` bumps jobs, then reads sleepers
    state.wake.wait(lock, [&] { return state.jobs.load() != seen || state.stopping.load(); });
    state.sleepers.fetch_sub(1);
    return !state.stopping.load();
}

// Ends the workers and frees the state; no job may be running.
void stop(PoolState* state) {
    {
        const std::lock_guard<std::mutex> lock(state->sleep);
        state->stopping.store(true);
    }
    state->wake.notify_all();
    for (std::thread& worker : state->workers) worker.join();
    delete state;
}

void work(PoolState* state, int thread, int threads) {
    [[maybe_unused]] const FloatSettings settings;
    std::uint64_t seen = 0;
    while (wait_for_job(*state, seen)) {
        Worker worker(state, thread, threads);
        ++seen;
        state->body(state->argument, worker);
        worker.barrier();
    }
}

PoolState* start(int threads) {
    auto* state = new PoolState;
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    state->spins = threads <= cores ? 64 : 8;
    state->fork_count = forks.load();
    try {
        for (int thread = 1; thread < threads; ++thread) {
            state->workers.emplace_back(work, state, thread, threads);
        }
    } catch (...) {
        stop(state);
        throw;
    }
    return state;
}

}  // namespace

// At the start of a job fewer than `threads` have arrived at its first barrier, so the multiple of
// `threads` below is where this job began.
Worker::Worker(PoolState* state, int thread, int threads)
    : state_(state),
      thread_(thread),
      threads_(threads),
      goal_(state->arrivals.load(std::memory_order_acquire) / threads * threads) {}

void Worker::barrier() {
    if (threads_ == 1) return;
    goal_ += threads_;
    if (state_->arrivals.fetch_add(1, std::memory_order_acq_rel) + 1 >= goal_) return;
    for (int spins = 0; state_->arrivals.load(std::memory_order_acquire) < goal_; ++spins) {
        if (spins < state_->spins) {
            pause();
        } else {
            sched_yield();
        }
    }
}

Pool::Pool(int threads) : threads_(threads) {
    count_forks();
    state_ = start(threads);
}

Pool::~Pool() {
    if (state_->fork_count == forks.load()) stop(state_);  // a forked child has no workers to join
}

// In a forked child the workers are gone and a mutex may be held by nobody: leave that state behind.
PoolState* Pool::usable_state() {
    if (state_->fork_count != forks.load(std::memory_order_relaxed)) state_ = start(threads_);
    return state_;
}

void Pool::run(Body body, void* argument, void (*prepare)(void*)) {
    PoolState* state = usable_state();
    const std::lock_guard<std::mutex> one_job(state->callers);
    if (prepare != nullptr) prepare(argument);
    [[maybe_unused]] const FloatSettings settings;
    Worker worker(state, 0, threads_);
    if (threads_ > 1) {
        state->body = body;
        state->argument = argument;
        state->jobs.fetch_add(1);
        if (state->sleepers.load() > 0) {
            const std::lock_guard<std::mutex> lock(state->sleep);
            state->wake.notify_all();
        }
    }
    body(argument, worker);
    worker.barrier();
}

}  // namespace quickdraft
