// grouped_conv and top_rows: what a block drafter needs beside the ops of a decoder.
#include <limits>

#include "binding.h"
#include "top.h"

namespace quickdraft {

namespace {

constexpr int column_chunk = 128;  // about so many columns are handed to one thread at a time
constexpr int taps = 2;
constexpr int most_top_rows = 32;

class GroupedConvOp final : public Op {
  public:
    GroupedConvOp(Engine& engine, const Batch& batch, ConstRows x, ConstRows base, ConstRows deltas,
                  int first, std::optional<ConstRows> residual, Rows out)
        : engine_(engine),
          batch_(batch),
          x_(x),
          base_(base),
          deltas_(deltas),
          residual_(residual),
          out_(out),
          first_(first),
          groups_(static_cast<int>(deltas.shape(1)) / (2 * taps)) {
        const std::size_t width = x.shape(1), numbers = deltas.shape(1);
        require(groups_ >= 1 && numbers % (2 * taps) == 0 && width % groups_ == 0,
                "grouped_conv: deltas of " + std::to_string(numbers) + " for rows of " +
                    std::to_string(width) + "; expected 4 for each group of channels");
        require(first >= 0 && static_cast<std::size_t>(first) + taps * groups_ <= numbers,
                "grouped_conv: first is " + std::to_string(first) + " of " + std::to_string(numbers));
        require(base.shape(0) == taps,
                "grouped_conv: base of " + std::to_string(base.shape(0)) + " taps; expected 2");
        require_width("grouped_conv", "base", base, width);
        require_width("grouped_conv", "out", out, width);
        if (residual) require_width("grouped_conv", "residual", *residual, width);
        require(out.data() != x.data() && out.data() != deltas.data(),
                "grouped_conv: out must be neither x nor deltas");
        size_ = static_cast<int>(width) / groups_;
        chunk_ = std::max(1, column_chunk / size_);
    }
    void prepare(int) override {
        check_rows("grouped_conv", batch_.rows.count,
                   std::min({x_.shape(0), deltas_.shape(0), out_.shape(0)}));
        if (residual_) check_rows("grouped_conv", batch_.rows.count, residual_->shape(0));
    }
    void run(Worker& worker) override {
        const int chunks = (groups_ + chunk_ - 1) / chunk_;
        const Range mine = share(batch_.rows.count * chunks, worker);
        const std::size_t width = x_.shape(1);
        for (int item = mine.first; item < mine.last; ++item) {
            const int row = item / chunks, group = item % chunks * chunk_;
            const bool starts = batch_.row_starts[batch_.row_sequences[row]] == row;
            const float* x = x_.data() + row * width;
            engine_.kernels().grouped_conv_row(x, starts ? nullptr : x - width, base_.data(),
                                               deltas_.data() + row * deltas_.shape(1) + first_, groups_,
                                               size_, group, std::min(groups_, group + chunk_),
                                               residual_ ? residual_->data() + row * width : nullptr,
                                               out_.data() + row * width);
        }
    }

  private:
    Engine& engine_;
    const Batch& batch_;
    ConstRows x_, base_, deltas_;
    std::optional<ConstRows> residual_;
    Rows out_;
    int first_, groups_;
    int size_ = 0, chunk_ = 0;  // channels of a group, groups of an item
};

class TopRowsOp final : public Op {
  public:
    TopRowsOp(Engine& engine, const RowCount& rows, ConstRows x, int k, Array<std::int32_t, nb::ndim<1>> ids,
              Rows values)
        : engine_(engine), rows_(rows), x_(x), k_(k), ids_(ids), values_(values) {
        require(k >= 1 && k <= most_top_rows && static_cast<std::size_t>(k) <= x.shape(1),
                "top_rows: k is " + std::to_string(k) + "; expected 1..32, and at most " +
                    std::to_string(x.shape(1)));
        require_width("top_rows", "values", values, static_cast<std::size_t>(k));
    }
    void prepare(int) override {
        check_rows("top_rows", rows_.count, std::min({x_.shape(0), values_.shape(0), ids_.shape(0) / k_}));
    }
    void run(Worker& worker) override {
        const Range mine = share(rows_.count, worker);
        const int width = static_cast<int>(x_.shape(1));
        for (std::size_t row = mine.first; row < static_cast<std::size_t>(mine.last); ++row) {
            const auto best = top_of(engine_.kernels(), x_.data() + row * width, width, k_);
            const int found = static_cast<int>(best.size());
            for (int i = 0; i < k_; ++i) {
                ids_.data()[row * k_ + i] = i < found ? best[i].id : -1;
                values_.data()[row * k_ + i] =
                    i < found ? best[i].value : -std::numeric_limits<float>::infinity();
            }
        }
    }

  private:
    Engine& engine_;
    const RowCount& rows_;
    ConstRows x_;
    int k_;
    Array<std::int32_t, nb::ndim<1>> ids_;
    Rows values_;
};

}  // namespace

void bind_drafter(nb::module_& m) {
    m.def(
        "grouped_conv",
        [](Engine& engine, Batch& batch, ConstRows x, ConstRows base, ConstRows deltas, int first,
           std::optional<ConstRows> residual, Rows out) -> std::unique_ptr<Op> {
            return std::make_unique<GroupedConvOp>(engine, batch, x, base, deltas, first, residual, out);
        },
        nb::arg("engine"), nb::arg("batch"), nb::arg("x").noconvert(), nb::arg("base").noconvert(),
        nb::arg("deltas").noconvert(), nb::arg("first"), nb::arg("residual").noconvert().none(),
        nb::arg("out").noconvert(), nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>());
    m.def(
        "top_rows",
        [](Engine& engine, RowCount& rows, ConstRows x, int k, Array<std::int32_t, nb::ndim<1>> ids,
           Rows values) -> std::unique_ptr<Op> {
            return std::make_unique<TopRowsOp>(engine, rows, x, k, ids, values);
        },
        nb::arg("engine"), nb::arg("rows"), nb::arg("x").noconvert(), nb::arg("k"),
        nb::arg("ids").noconvert(), nb::arg("values").noconvert(), nb::keep_alive<0, 1>(),
        nb::keep_alive<0, 2>());
}

}  // namespace quickdraft
