// read_bandwidth: how fast all threads together read memory; the roof of plain decoding.
#include <chrono>

#include "binding.h"

namespace quickdraft {

namespace {

struct Reading {
    const std::uint8_t* data;
    std::size_t bytes;
    std::vector<std::uint64_t> sums;  // one per thread, so that no read can be left out
};

using Words = std::uint64_t __attribute__((vector_size(32), may_alias));

// Four independent sums keep enough loads in flight; AVX2 where the CPU has it.
#if defined(__x86_64__)
__attribute__((target_clones("avx2", "default")))
#endif
std::uint64_t sum_of(const std::uint8_t* from, const std::uint8_t* to) {
    Words a{}, b{}, c{}, d{};
    for (; from + 128 <= to; from += 128) {
        const auto* words = reinterpret_cast<const Words*>(from);
        a ^= words[0];
        b ^= words[1];
        c ^= words[2];
        d ^= words[3];
    }
    const Words all = (a ^ b) ^ (c ^ d);
    return (all[0] ^ all[1]) + (all[2] ^ all[3]);
}

void read_share(void* argument, Worker& worker) {
    auto& reading = *static_cast<Reading*>(argument);
    const std::size_t lines = reading.bytes / 128;
    const auto at = [&](int thread) { return reading.data + lines * thread / worker.threads() * 128; };
    reading.sums[worker.thread()] += sum_of(at(worker.thread()), at(worker.thread() + 1));
}

// Median bytes per second over `repeats` passes, after one that maps the pages.
double read_bandwidth(std::size_t buffer_bytes, int threads, int repeats) {
    require(threads >= 1 && repeats >= 1 && buffer_bytes >= (1u << 20),
            "read_bandwidth: expected at least one thread, one repeat and 1 MiB");
    Pool pool(threads);
    const AlignedBytes buffer(buffer_bytes);
    for (std::size_t i = 0; i < buffer_bytes; ++i)
        buffer.data()[i] = static_cast<std::uint8_t>(i * 7 + i / 256);
    Reading reading{buffer.data(), buffer_bytes, std::vector<std::uint64_t>(threads)};
    std::vector<double> seconds;
    for (int pass = 0; pass <= repeats; ++pass) {
        const auto start = std::chrono::steady_clock::now();
        pool.run(read_share, &reading, nullptr);
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
        if (pass > 0) seconds.push_back(taken.count());
    }
    volatile std::uint64_t total = 0;  // the sums are used, so the reads happen
    for (const std::uint64_t sum : reading.sums) total = total + sum;
    std::sort(seconds.begin(), seconds.end());
    return static_cast<double>(buffer_bytes) / seconds[seconds.size() / 2];
}

}  // namespace

void bind_bandwidth(nb::module_& m) {
    m.def("read_bandwidth", &read_bandwidth, nb::arg("buffer_bytes"), nb::arg("threads"), nb::arg("repeats"),
          nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quickdraft
