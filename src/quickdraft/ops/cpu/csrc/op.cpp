#include "op.h"

#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace quickdraft {

namespace {

constexpr std::size_t huge_page = std::size_t{2} << 20;

// The object `instructions` names, or the best that has been proven; null when CPU or build lack it. The
// AVX-512 object has not met a CPU that runs it yet, so it is used only where it is asked for.
const Kernels* find_kernels(const std::string& instructions) {
    const bool any = instructions == "auto";
#if defined(QUICKDRAFT_AVX2)
    __builtin_cpu_init();
    const bool avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vnni");
    if (avx512 && instructions == "avx512") return &kernels_avx512;
    if (avx2 && (any || instructions == "avx2")) return &kernels_avx2;
#endif
    return any || instructions == "scalar" ? &kernels_scalar : nullptr;
}

const Kernels* choose_kernels(const std::string& instructions) {
    require(instructions == "auto" || instructions == "scalar" || instructions == "avx2" ||
                instructions == "avx512",
            "unknown instruction set '" + instructions + "'; expected auto, scalar, avx2 or avx512");
    const Kernels* found = find_kernels(instructions);
    require(found != nullptr, "this CPU or build has no " + instructions + " kernels");
    return found;
}

struct Job {
    const std::vector<Op*>& ops;
    std::vector<char>& meet;        // whether a barrier follows op i
    std::vector<const Op*>& ahead;  // what is fetched after op i, or null
    int threads;
    OpTimes* times;  // null: not timed
};

void prepare_job(void* argument) {
    const Job& job = *static_cast<Job*>(argument);
    for (Op* op : job.ops) op->prepare(job.threads);
    for (std::size_t i = 0; i + 1 < job.ops.size(); ++i) {
        job.meet[i] = !(job.ops[i]->only_first_thread() && job.ops[i + 1]->only_first_thread());
    }
    const Op* next = nullptr;
    for (std::size_t i = job.ops.size(); i-- > 0;) {
        const bool last_before_gap = i == 0 || job.ops[i]->fetches();
        job.ahead[i] = last_before_gap ? next : nullptr;
        if (job.ops[i]->fetches()) next = job.ops[i];
    }
    if (job.times != nullptr) job.times->start();
}

void run_job(void* argument, Worker& worker) {
    const Job& job = *static_cast<Job*>(argument);
    for (std::size_t i = 0; i < job.ops.size(); ++i) {
        job.ops[i]->run(worker);
        if (job.ahead[i] != nullptr) job.ahead[i]->fetch(worker);
        if (job.times != nullptr) job.times->done(i, worker.thread());
        if (job.meet[i] != 0) worker.barrier();
    }
}

}  // namespace

AlignedBytes AlignedBytes::unwritten(std::size_t size) {
    AlignedBytes bytes;
    if (size == 0) return bytes;
    void* memory = nullptr;
    if (posix_memalign(&memory, size >= huge_page ? huge_page : 64, size) != 0) throw std::bad_alloc();
    bytes.data_.reset(static_cast<std::uint8_t*>(memory));
    bytes.size_ = size;
#if defined(__linux__)
    // Not the rest behind the last whole one, where a huge page would hold memory nobody uses.
    if (size >= huge_page) madvise(memory, size / huge_page * huge_page, MADV_HUGEPAGE);
#endif
    return bytes;
}

AlignedBytes::AlignedBytes(std::size_t size) : AlignedBytes(unwritten(size)) {
    if (size != 0) std::memset(data_.get(), 0, size);
}

void AlignedBytes::Free::operator()(std::uint8_t* p) const { std::free(p); }

WeightMemory::Part WeightMemory::take(std::size_t size) {
    constexpr std::size_t piece_size = std::size_t{64} << 20;
    if (size > piece_size / 4) {
        auto own = std::make_shared<AlignedBytes>(AlignedBytes::unwritten(size));
        return {own, own->data(), size};
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::size_t at = round_up(used_, 64);
    if (piece_ == nullptr || at + size > piece_->size()) {
        piece_ = std::make_shared<AlignedBytes>(AlignedBytes::unwritten(piece_size));
        used_ = size;
        return {piece_, piece_->data(), size};
    }
    used_ = at + size;
    return {piece_, piece_->data() + at, size};
}

Engine::Engine(int threads, const std::string& instructions)
    : kernels_(choose_kernels(instructions)), pool_(threads, true) {}

void Engine::reserve(std::size_t shared_bytes, std::size_t thread_bytes) {
    thread_bytes = round_up(thread_bytes, 128);
    if (shared_bytes <= shared_.size() && thread_bytes <= thread_bytes_) return;
    struct Growth {
        Engine* engine;
        std::size_t shared, thread;
    } growth{this, shared_bytes, thread_bytes};
    // As a job's first step: no program runs meanwhile.
    pool_.run([](void*, Worker&) {}, &growth,
              [](void* argument) {
                  const Growth& wanted = *static_cast<Growth*>(argument);
                  Engine& engine = *wanted.engine;
                  if (wanted.shared > engine.shared_.size()) engine.shared_ = AlignedBytes(wanted.shared);
                  if (wanted.thread > engine.thread_bytes_) {
                      engine.threads_ = AlignedBytes(wanted.thread * engine.pool_.threads());
                      engine.thread_bytes_ = wanted.thread;
                  }
              });
}

void run_ops(Engine& engine, const std::vector<Op*>& ops, OpTimes* times) {
    thread_local std::vector<char> meet;
    thread_local std::vector<const Op*> ahead;
    meet.assign(ops.size(), 0);
    ahead.assign(ops.size(), nullptr);
    Job job{ops, meet, ahead, engine.pool().threads(), times};
    engine.pool().run(run_job, &job, prepare_job);
}

}  // namespace quickdraft
