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

using Clock = std::chrono::steady_clock;
constexpr auto awake_after_job = std::chrono::microseconds(1500);
// Others use the machine too: a thread whose core they share is away for milliseconds at a time, and all
// wait for it at the next barrier. When waiting took more than half of so many jobs in a row, half as many
// threads take the jobs of the next moment; then all are tried again.
constexpr auto short_job = std::chrono::microseconds(500);  // too short to judge by
constexpr auto moment = std::chrono::milliseconds(200);
constexpr int slow_jobs_in_a_row = 3;

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
    // Number of the last job << 16 | its threads: one word, as a thread that is not of a job may look late.
    alignas(64) std::atomic<std::uint64_t> jobs{0};
    std::uint64_t base = 0;                     // arrivals before this job
    std::atomic<std::int64_t> longest_wait{0};  // nanoseconds, of one thread at the barriers of this job
    int slow_jobs = 0, spared_jobs = 0;
    Clock::time_point fewer_until{};
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

constexpr int threads_of(std::uint64_t job) { return static_cast<int>(job & 0xFFFF); }

int choose_threads(PoolState& state, int threads, Clock::time_point now) {
    if (state.spared_jobs > 0) {
        --state.spared_jobs;
    } else if (now >= state.fewer_until) {
        return threads;
    }
    return (threads + 1) / 2;
}

void judge(PoolState& state, Clock::duration taken, Clock::time_point now) {
    if (taken < short_job) return;
    const bool slow = 2 * std::chrono::nanoseconds(state.longest_wait.load()) > taken;
    state.slow_jobs = slow ? state.slow_jobs + 1 : 0;
    if (state.slow_jobs < slow_jobs_in_a_row) return;
    state.slow_jobs = slow_jobs_in_a_row - 1;  // one slow job is enough when all are tried again
    state.fewer_until = now + moment;
}

// Waits for a job other than `seen`; false when the pool stops.
bool wait_for_job(PoolState& state, std::uint64_t seen) {
    const auto until = Clock::now() + awake_after_job;
    while (Clock::now() < until) {
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

void work(PoolState* state, int thread) {
    [[maybe_unused]] const FloatSettings settings;
    std::uint64_t seen = 0;
    while (wait_for_job(*state, seen)) {
        seen = state->jobs.load(std::memory_order_acquire);
        if (thread >= threads_of(seen)) continue;  // a job of others, perhaps over by now
        Worker worker(state, thread, threads_of(seen));
        state->body(state->argument, worker);
        worker.finish();
    }
}

PoolState* start(int threads) {
    auto* state = new PoolState;
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    state->spins = threads <= cores ? 64 : 8;
    state->fork_count = forks.load();
    try {
        for (int thread = 1; thread < threads; ++thread) {
            state->workers.emplace_back(work, state, thread);
        }
    } catch (...) {
        stop(state);
        throw;
    }
    return state;
}

}  // namespace

Worker::Worker(PoolState* state, int thread, int threads)
    : state_(state), thread_(thread), threads_(threads), goal_(state->base) {}

void Worker::barrier() {
    if (threads_ == 1) return;
    goal_ += threads_;
    if (state_->arrivals.fetch_add(1, std::memory_order_acq_rel) + 1 >= goal_) return;
    for (int spins = 0; spins < state_->spins; ++spins) {
        if (state_->arrivals.load(std::memory_order_acquire) >= goal_) return;
        pause();
    }
    const auto started = Clock::now();
    while (state_->arrivals.load(std::memory_order_acquire) < goal_) sched_yield();
    waited_ += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - started).count();
}

void Worker::finish() {
    std::int64_t longest = state_->longest_wait.load(std::memory_order_relaxed);
    while (waited_ > longest && !state_->longest_wait.compare_exchange_weak(longest, waited_)) {
    }
    barrier();
}

Pool::Pool(int threads, bool adapts) : threads_(threads), adapts_(adapts) {
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

void Pool::spare(int jobs) {
    PoolState* state = usable_state();
    const std::lock_guard<std::mutex> between_jobs(state->callers);
    state->spared_jobs = jobs;
}

void Pool::run(Body body, void* argument, void (*prepare)(void*)) {
    PoolState* state = usable_state();
    const std::lock_guard<std::mutex> one_job(state->callers);
    if (prepare != nullptr) prepare(argument);
    [[maybe_unused]] const FloatSettings settings;
    const auto started = Clock::now();
    const int threads = adapts_ ? choose_threads(*state, threads_, started) : threads_;
    state->base = state->arrivals.load(std::memory_order_acquire);
    state->longest_wait.store(0, std::memory_order_relaxed);
    if (threads > 1) {
        state->body = body;
        state->argument = argument;
        state->jobs.store((((state->jobs.load() >> 16) + 1) << 16) | static_cast<std::uint64_t>(threads));
        if (state->sleepers.load() > 0) {
            const std::lock_guard<std::mutex> lock(state->sleep);
            state->wake.notify_all();
        }
    }
    Worker worker(state, 0, threads);
    body(argument, worker);
    worker.finish();
    if (threads == threads_ && threads > 1) {
        const auto ended = Clock::now();
        judge(*state, ended - started, ended);
    }
}

}  // namespace quickdraft
