// The thread pool: a job runs on every thread at once (the caller is thread 0), and threads meet at barriers.
//
// Workers spin for a short while after a job, so the next step finds them awake, then sleep. Every thread
// that computes flushes denormals (FTZ, DAZ) and rounds to nearest; the caller's settings are restored on
// return. A pool that is used after fork() starts fresh workers in the child.
#pragma once

#include <cstdint>

namespace quickdraft {

struct PoolState;

// One thread's view of a running job.
class Worker {
  public:
    Worker(PoolState* state, int thread, int threads);
    int thread() const { return thread_; }
    int threads() const { return threads_; }
    void barrier();  // returns when every thread has called it as often as this one
    void finish();   // the last barrier of a job

  private:
    PoolState* state_;
    int thread_, threads_;
    std::uint64_t goal_;
    std::int64_t waited_ = 0;  // nanoseconds at barriers, short waits not counted
};

class Pool {
  public:
    // One that adapts gives jobs to half its threads for a while when waiting for each other costs them more
    // than half of their time, as on a machine that others use.
    explicit Pool(int threads, bool adapts = false);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    // The next `jobs` jobs go to half the threads, as if waiting had been found to cost too much.
    void spare(int jobs);

    using Body = void (*)(void* argument, Worker& worker);
    // Runs body(argument, worker) on every thread (on how many, worker.threads() says) and returns when all
    // are done. One job at a time: concurrent callers queue. `prepare(argument)` runs on the caller first,
    // and may throw.
    void run(Body body, void* argument, void (*prepare)(void* argument) = nullptr);

  private:
    PoolState* usable_state();
    int threads_;
    bool adapts_;
    PoolState* state_;
};

}  // namespace quickdraft
