// measure_peak: how many multiply-adds a second all threads together can do; the other roof beside bandwidth.
#include "peaks.h"

#include <nanobind/stl/vector.h>

#include <chrono>

#include "binding.h"

namespace quickdraft {

namespace {

constexpr int sums = 8;

// The fall-back: what the scalar kernels could reach at most. Its operands are int16 already.
std::int64_t plain_int8(std::int64_t iterations) {
    std::int32_t sum[sums] = {}, a = 1, b = 1;
    QUICKDRAFT_OPAQUE(b, "r");
    for (; iterations > 0; --iterations) {
        for (auto& one : sum) {
            QUICKDRAFT_OPAQUE(a, "r");
            one += a * b;
        }
    }
    std::int64_t total = 0;
    for (const std::int32_t one : sum) total += one;
    return total;
}

std::int64_t plain_fp32(std::int64_t iterations) {
    float sum[sums] = {};
    volatile float given = 1.0f;
    const float a = given, b = given;
    for (; iterations > 0; --iterations) {
        for (auto& one : sum) one = a * b + one;
    }
    double total = 0;
    for (const float one : sum) total += one;
    return static_cast<std::int64_t>(total);
}

bool always() { return true; }

constexpr PeakLoop plain_loops[] = {
    {"int8, int32 sums", "plain C++", true, sums, plain_int8, always},
    {"fp32", "plain C++", false, sums, plain_fp32, always},
};

// Every loop this CPU can run; the plain ones last.
std::vector<const PeakLoop*> usable_loops() {
    std::vector<const PeakLoop*> found;
    int count = 0;
    const PeakLoop* x86 = x86_peaks(count);
    for (int i = 0; i < count; ++i) {
        if (x86[i].supported()) found.push_back(&x86[i]);
    }
    for (const PeakLoop& loop : plain_loops) found.push_back(&loop);
    return found;
}

const PeakLoop& loop_at(int index) {
    const auto loops = usable_loops();
    require(index >= 0 && index < static_cast<int>(loops.size()),
            "no peak loop " + std::to_string(index) + "; expected 0.." + std::to_string(loops.size() - 1));
    return *loops[index];
}

struct Pass {
    const PeakLoop& loop;
    std::int64_t iterations;
    std::vector<std::int64_t> results;  // one per thread, used, so that the loop happens
};

void run_pass(void* argument, Worker& worker) {
    auto& pass = *static_cast<Pass*>(argument);
    pass.results[worker.thread()] += pass.loop.run(pass.iterations);
}

double seconds_of(Pool& pool, Pass& pass) {
    const auto start = std::chrono::steady_clock::now();
    pool.run(run_pass, &pass, nullptr);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    return taken.count();
}

// Multiply-adds per second of the fastest of `repeats` passes of at least `milliseconds` each: what disturbs
// a loop without memory accesses can only slow it down.
double measure_peak(int index, int threads, double milliseconds, int repeats) {
    require(threads >= 1 && repeats >= 1 && milliseconds > 0,
            "measure_peak: expected at least one thread, one repeat and some time");
    const PeakLoop& loop = loop_at(index);
    Pool pool(threads);
    Pass pass{loop, 1024, std::vector<std::int64_t>(threads)};
    while (seconds_of(pool, pass) * 1000.0 < milliseconds) pass.iterations *= 2;
    double best = seconds_of(pool, pass);
    for (int repeat = 1; repeat < repeats; ++repeat) best = std::min(best, seconds_of(pool, pass));
    return static_cast<double>(pass.iterations) * loop.multiply_adds * threads / best;
}

}  // namespace

void bind_peaks(nb::module_& m) {
    m.def(
        "peak_loops",
        [] {
            std::vector<std::tuple<std::string, std::string, bool, int>> found;
            for (const PeakLoop* loop : usable_loops())
                found.emplace_back(loop->name, loop->instructions, loop->integer, loop->multiply_adds);
            return found;
        },
        "(name, instructions, integer, multiply-adds per iteration) of every loop this CPU can run.");
    m.def(
        "count_peak", [](int index, int iterations) { return loop_at(index).run(iterations); },
        nb::arg("index"), nb::arg("iterations"), "The multiply-adds a loop has really done.");
    m.def("measure_peak", &measure_peak, nb::arg("index"), nb::arg("threads"), nb::arg("milliseconds"),
          nb::arg("repeats"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quickdraft
