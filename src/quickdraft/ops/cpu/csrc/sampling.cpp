// top and gumbel_choice: one row of logits, run at once.
#include <algorithm>
#include <limits>

#include "binding.h"
#include "top.h"

namespace quickdraft {

namespace {

using Logits = Array<const float, nb::ndim<1>>;
using Ids = Array<const std::int64_t, nb::ndim<1>>;

// Below this many tokens the choice is not worth waking the pool.
constexpr int tokens_per_thread = 2048;

nb::tuple top_arrays(Engine& engine, Logits row, int k) {
    require(k >= 0, "top: k is " + std::to_string(k) + "; expected 0 or more");
    const int count = static_cast<int>(row.shape(0));
    std::vector<Candidate> best;
    {
        nb::gil_scoped_release unlocked;
        best = top_of(engine.kernels(), row.data(), count, std::min(k, count));
    }
    auto ids = std::make_unique<std::int64_t[]>(best.size());
    auto values = std::make_unique<float[]>(best.size());
    for (std::size_t i = 0; i < best.size(); ++i) {
        ids[i] = best[i].id;
        values[i] = best[i].value;
    }
    const nb::capsule id_owner(ids.get(), [](void* p) noexcept { delete[] static_cast<std::int64_t*>(p); });
    auto* id_data = ids.release();
    const nb::capsule value_owner(values.get(), [](void* p) noexcept { delete[] static_cast<float*>(p); });
    auto* value_data = values.release();
    return nb::make_tuple(nb::ndarray<nb::numpy, std::int64_t>(id_data, {best.size()}, id_owner),
                          nb::ndarray<nb::numpy, float>(value_data, {best.size()}, value_owner));
}

struct Choice {
    const Kernels& kernels;
    const float* row;
    const std::int64_t* ids;
    int count;
    double temperature;
    std::uint64_t seed, position;
    std::vector<GumbelBest> parts;

    GumbelBest part(Range range) const {
        return kernels.gumbel(row, ids, range.first, range.last, temperature, seed, position);
    }
};

std::int64_t gumbel_choice(Engine& engine, Logits row, double temperature, std::uint64_t seed,
                           std::uint64_t position, std::optional<Ids> ids) {
    const int count = static_cast<int>(row.shape(0));
    require(count >= 1, "gumbel_choice: an empty row");
    require(temperature > 0 && temperature <= std::numeric_limits<double>::max(),
            "gumbel_choice: temperature " + std::to_string(temperature) + "; expected more than 0");
    if (ids) require_size("gumbel_choice", "ids", ids->size(), count);
    nb::gil_scoped_release unlocked;
    Choice choice{engine.kernels(), row.data(), ids ? ids->data() : nullptr, count, temperature, seed,
                  position,         {}};
    constexpr GumbelBest nothing{-std::numeric_limits<double>::infinity(),
                                 std::numeric_limits<std::int64_t>::max(), false};
    choice.parts.assign(engine.pool().threads(), nothing);  // a job may have fewer threads
    if (count < tokens_per_thread) {
        choice.parts = {choice.part({0, count})};
    } else {
        engine.pool().run(
            [](void* argument, Worker& worker) {
                Choice& choice = *static_cast<Choice*>(argument);
                choice.parts[worker.thread()] = choice.part(share(choice.count, worker));
            },
            &choice);
    }
    GumbelBest best = choice.parts[0];
    bool nan = best.nan;
    for (const GumbelBest& other : choice.parts) {
        nan |= other.nan;
        if (other.score > best.score || (other.score == best.score && other.id < best.id)) best = other;
    }
    require(!nan, "gumbel_choice: the row holds NaN");
    return best.id;
}

}  // namespace

void bind_sampling(nb::module_& m) {
    m.def("top", top_arrays, nb::arg("engine"), nb::arg("row").noconvert(), nb::arg("k"));
    m.def("gumbel_choice", gumbel_choice, nb::arg("engine"), nb::arg("row").noconvert(),
          nb::arg("temperature"), nb::arg("seed"), nb::arg("position"), nb::arg("ids").noconvert().none());
}

}  // namespace quickdraft
