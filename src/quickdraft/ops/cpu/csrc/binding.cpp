// The module `_cpu`: Engine, Batch, Program, and functions that make ops (see ops/cpu/backend.py).
#include "binding.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

namespace quickdraft {

namespace {

// Recorded ops; `objects` keeps their Python objects, and through them every buffer, alive.
class Program {
  public:
    Program(nb::handle engine, nb::list ops) : engine_object_(nb::borrow(engine)), objects_(nb::tuple(ops)) {
        engine_ = &nb::cast<Engine&>(engine);
        for (nb::handle op : objects_) ops_.push_back(&nb::cast<Op&>(op));
    }
    void run() {
        nb::gil_scoped_release unlocked;
        run_ops(*engine_, ops_);
    }
    // (seconds, seconds of them spent waiting for other threads) of each op.
    std::vector<std::pair<double, double>> run_timed() {
        nb::gil_scoped_release unlocked;
        OpTimes times(ops_.size(), engine_->pool().threads());
        run_ops(*engine_, ops_, &times);
        std::vector<std::pair<double, double>> found;
        for (std::size_t op = 0; op < ops_.size(); ++op)
            found.emplace_back(times.seconds(op), times.waiting(op));
        return found;
    }
    std::size_t size() const { return ops_.size(); }

  private:
    nb::object engine_object_;
    nb::tuple objects_;
    Engine* engine_;
    std::vector<Op*> ops_;
};

using Ints = Array<const std::int32_t, nb::ndim<1>>;
using Tables = Array<const std::int32_t, nb::ndim<2>>;

void set_batch(Batch& batch, Ints tokens, Ints positions, Ints row_starts, Tables block_tables, Ints wanted,
               std::optional<Ints> slots, std::optional<Ints> replay, std::optional<Ints> drafted,
               std::optional<Ints> seen_from) {
    require(row_starts.size() >= 1, "row_starts is empty; expected one more entry than sequences");
    const auto one_each = [&](const char* name, const std::optional<Ints>& values) {
        if (!values) return static_cast<const std::int32_t*>(nullptr);
        require_size("batch", name, values->size(), row_starts.size() - 1);
        return values->data();
    };
    const SequenceStates states{one_each("slots", slots), one_each("replay", replay),
                                one_each("drafted", drafted), one_each("seen_from", seen_from)};
    batch.set(tokens.data(), positions.data(), static_cast<int>(tokens.size()),
              static_cast<int>(positions.size()), row_starts.data(), static_cast<int>(row_starts.size()) - 1,
              block_tables.data(), static_cast<int>(block_tables.shape(0)),
              static_cast<int>(block_tables.shape(1)), wanted.data(), static_cast<int>(wanted.size()),
              states);
}

Engine* make_engine(int threads, const std::string& instructions) {
    require(threads >= 1 && threads <= 256, "threads is " + std::to_string(threads) + "; expected 1..256");
    return new Engine(threads, instructions);
}

}  // namespace

}  // namespace quickdraft

NB_MODULE(_cpu, m) {
    using namespace quickdraft;
    m.doc() = "quickdraft CPU kernels";

    nb::class_<Engine>(m, "Engine")
        .def(nb::new_(&make_engine), nb::arg("threads"), nb::arg("instructions") = "auto")
        .def_prop_ro("threads", [](Engine& engine) { return engine.pool().threads(); })
        .def(
            "spare", [](Engine& engine, int jobs) { engine.pool().spare(jobs); }, nb::arg("jobs"))
        .def_prop_ro("instructions", [](const Engine& engine) { return engine.kernels().name; });
    nb::class_<Op>(m, "Op");
    nb::class_<Program>(m, "Program")
        .def(nb::init<nb::handle, nb::list>(), nb::arg("engine"), nb::arg("ops"))
        .def("run", &Program::run)
        .def("run_timed", &Program::run_timed)
        .def("__len__", &Program::size);

    nb::class_<RowCount>(m, "RowCount").def_ro("count", &RowCount::count);
    nb::class_<Batch>(m, "Batch")
        .def(nb::init<int, int, int, int, int>(), nb::arg("max_rows"), nb::arg("max_sequences"),
             nb::arg("table_width"), nb::arg("pool_blocks"), nb::arg("vocabulary"))
        .def("set", set_batch, nb::arg("tokens").noconvert(), nb::arg("positions").noconvert(),
             nb::arg("row_starts").noconvert(), nb::arg("block_tables").noconvert(),
             nb::arg("wanted").noconvert(), nb::arg("slots").noconvert() = nb::none(),
             nb::arg("replay").noconvert() = nb::none(), nb::arg("drafted").noconvert() = nb::none(),
             nb::arg("seen_from").noconvert() = nb::none())
        .def_prop_ro(
            "rows", [](Batch& batch) { return &batch.rows; }, nb::rv_policy::reference_internal)
        .def_prop_ro("wanted", [](Batch& batch) { return &batch.wanted; }, nb::rv_policy::reference_internal);

    bind_bandwidth(m);
    bind_drafter(m);
    bind_gates(m);
    bind_linear(m);
    bind_head(m);
    bind_peaks(m);
    bind_recurrent(m);
    bind_rows(m);
    bind_attention(m);
    bind_kv_write(m);
    bind_sampling(m);
}
