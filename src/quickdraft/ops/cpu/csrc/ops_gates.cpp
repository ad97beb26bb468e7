// gated_norm and sigmoid_gate: gates on what a mixing layer gives, row by row.
#include "binding.h"

namespace quickdraft {

namespace {

constexpr int column_chunk = 128;  // columns handed to one thread at a time

class GatedNormOp final : public Op {
  public:
    GatedNormOp(Engine& engine, const RowCount& rows, ConstRows x, ConstRows gate, Vector weight, float eps,
                Rows out)
        : engine_(engine), rows_(rows), x_(x), gate_(gate), weight_(weight), eps_(eps), out_(out) {
        require_width("gated_norm", "gate", gate, x.shape(1));
        require_width("gated_norm", "out", out, x.shape(1));
        require(weight.size() >= 8 && weight.size() % 8 == 0 && x.shape(1) % weight.size() == 0,
                "gated_norm: a weight of " + std::to_string(weight.size()) + " for rows of " +
                    std::to_string(x.shape(1)) + "; expected a multiple of 8 that divides it");
        require(gate.data() != out.data(), "gated_norm: out must not be gate");
    }
    void prepare(int) override {
        check_rows("gated_norm", rows_.count, std::min({x_.shape(0), gate_.shape(0), out_.shape(0)}));
    }
    void run(Worker& worker) override {
        const std::size_t dim = weight_.size(), heads = x_.shape(1) / dim;
        const Range mine = share(rows_.count * static_cast<int>(heads), worker);
        for (std::size_t head = mine.first; head < static_cast<std::size_t>(mine.last); ++head) {
            engine_.kernels().gated_norm_row(x_.data() + head * dim, gate_.data() + head * dim,
                                             weight_.data(), static_cast<int>(dim), eps_,
                                             out_.data() + head * dim);
        }
    }

  private:
    Engine& engine_;
    const RowCount& rows_;
    ConstRows x_, gate_;
    Vector weight_;
    float eps_;
    Rows out_;
};

class SigmoidGateOp final : public Op {
  public:
    SigmoidGateOp(Engine& engine, const RowCount& rows, ConstRows x, ConstRows gate, Rows out)
        : engine_(engine), rows_(rows), x_(x), gate_(gate), out_(out) {
        require_width("sigmoid_gate", "gate", gate, x.shape(1));
        require_width("sigmoid_gate", "out", out, x.shape(1));
    }
    void prepare(int) override {
        check_rows("sigmoid_gate", rows_.count, std::min({x_.shape(0), gate_.shape(0), out_.shape(0)}));
    }
    void run(Worker& worker) override {
        const int width = static_cast<int>(out_.shape(1)), chunks = (width + column_chunk - 1) / column_chunk;
        const Range mine = share(rows_.count * chunks, worker);
        for (int item = mine.first; item < mine.last; ++item) {
            const int first = item % chunks * column_chunk;
            const std::size_t at = static_cast<std::size_t>(item / chunks) * width + first;
            engine_.kernels().sigmoid_gate(x_.data() + at, gate_.data() + at,
                                           std::min(column_chunk, width - first), out_.data() + at);
        }
    }

  private:
    Engine& engine_;
    const RowCount& rows_;
    ConstRows x_, gate_;
    Rows out_;
};

}  // namespace

void bind_gates(nb::module_& m) {
    m.def(
        "gated_norm",
        [](Engine& engine, RowCount& rows, ConstRows x, ConstRows gate, Vector weight, float eps,
           Rows out) -> std::unique_ptr<Op> {
            return std::make_unique<GatedNormOp>(engine, rows, x, gate, weight, eps, out);
        },
        nb::arg("engine"), nb::arg("rows"), nb::arg("x").noconvert(), nb::arg("gate").noconvert(),
        nb::arg("weight").noconvert(), nb::arg("eps"), nb::arg("out").noconvert(), nb::keep_alive<0, 1>(),
        nb::keep_alive<0, 2>());
    m.def(
        "sigmoid_gate",
        [](Engine& engine, RowCount& rows, ConstRows x, ConstRows gate, Rows out) -> std::unique_ptr<Op> {
            return std::make_unique<SigmoidGateOp>(engine, rows, x, gate, out);
        },
        nb::arg("engine"), nb::arg("rows"), nb::arg("x").noconvert(), nb::arg("gate").noconvert(),
        nb::arg("out").noconvert(), nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>());
}

}  // namespace quickdraft
