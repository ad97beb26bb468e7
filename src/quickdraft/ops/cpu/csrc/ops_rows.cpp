// rms_norm, head_norm, swiglu, gather_rows, argmax, rope: ops whose rows are independent of each other.
#include <cstring>

#include "binding.h"

namespace quickdraft {

namespace {

// Columns handed to one thread at a time where a single row is shared between threads.
constexpr int column_chunk = 128;

class RmsNormOp final : public Op {
  public:
    RmsNormOp(Engine& engine, const RowCount& rows, ConstRows x, Vector weight, float eps, Rows out)
        : engine_(engine), rows_(rows), x_(x), weight_(weight), eps_(eps), out_(out) {
        require_size("rms_norm", "weight", weight.size(), x.shape(1));
        require_width("rms_norm", "out", out, x.shape(1));
    }
    void prepare(int) override { check_rows("rms_norm", rows_.count, std::min(x_.shape(0), out_.shape(0))); }
    bool only_first_thread() const override { return rows_.count <= 1; }
    void run(Worker& worker) override {
        const std::size_t width = x_.shape(1);
        const Range mine = only_first_thread() ? Range{0, worker.thread() == 0 ? rows_.count : 0}
                                               : share(rows_.count, worker);
        for (int row = mine.first; row < mine.last; ++row) {
            engine_.kernels().rms_norm_row(x_.data() + row * width, weight_.data(), static_cast<int>(width),
                                           eps_, out_.data() + row * width);
        }
    }

  private:
    Engine& engine_;
    const RowCount& rows_;
    ConstRows x_;
    Vector weight_;
    float eps_;
    Rows out_;
};

// Each head is a row of its own to the kernel of rms_norm.
class HeadNormOp final : public Op {
  public:
    HeadNormOp(Engine& engine, const RowCount& rows, Rows x, int first_head, int heads, int head_dim,
               Vector weight, float eps)
        : engine_(engine),
          rows_(rows),
          x_(x),
          first_head_(first_head),
          heads_(heads),
          head_dim_(head_dim),
          weight_(weight),
          eps_(eps) {
        const bool whole = first_head >= 0 && heads >= 1 && head_dim >= 1;
        const std::int64_t end = (static_cast<std::int64_t>(first_head) + heads) * head_dim;
        require(whole && end <= static_cast<std::int64_t>(x.shape(1)),
                "head_norm: heads " + std::to_string(first_head) + " to " +
                    std::to_string(static_cast<std::int64_t>(first_head) + heads) + " of " +
                    std::to_string(head_dim) + " in rows of " + std::to_string(x.shape(1)));
        require_size("head_norm", "weight", weight.size(), static_cast<std::size_t>(head_dim));
    }
    void prepare(int) override { check_rows("head_norm", rows_.count, x_.shape(0)); }
    bool only_first_thread() const override { return rows_.count <= 1; }
    void run(Worker& worker) override {
        const std::size_t width = x_.shape(1);
        const Range mine = only_first_thread() ? Range{0, worker.thread() == 0 ? rows_.count : 0}
                                               : share(rows_.count, worker);
        for (int row = mine.first; row < mine.last; ++row) {
            float* head = x_.data() + row * width + static_cast<std::size_t>(first_head_) * head_dim_;
            for (int i = 0; i < heads_; ++i, head += head_dim_) {
                engine_.kernels().rms_norm_row(head, weight_.data(), head_dim_, eps_, head);
            }
        }
    }

  private:
    Engine& engine_;
    const RowCount& rows_;
    Rows x_;
    int first_head_, heads_, head_dim_;
    Vector weight_;
    float eps_;
};

class SwigluOp final : public Op {
  public:
    SwigluOp(Engine& engine, const RowCount& rows, ConstRows gate_up, Rows out)
        : engine_(engine), rows_(rows), gate_up_(gate_up), out_(out) {
        require_width("swiglu", "gate_up", gate_up, 2 * out.shape(1));
    }
    void prepare(int) override {
        check_rows("swiglu", rows_.count, std::min(gate_up_.shape(0), out_.shape(0)));
    }
    void run(Worker& worker) override {
        const int width = static_cast<int>(out_.shape(1)), chunks = (width + column_chunk - 1) / column_chunk;
        const Range mine = share(rows_.count * chunks, worker);
        for (int item = mine.first; item < mine.last; ++item) {
            const std::size_t row = item / chunks;
            const int first = item % chunks * column_chunk;
            const float* gate = gate_up_.data() + row * 2 * width + first;
            engine_.kernels().swiglu(gate, gate + width, std::min(column_chunk, width - first),
                                     out_.data() + row * width + first);
        }
    }

  private:
    Engine& engine_;
    const RowCount& rows_;
    ConstRows gate_up_;
    Rows out_;
};

class GatherRowsOp final : public Op {
  public:
    GatherRowsOp(const Batch& batch, ConstRows x, Rows out) : batch_(batch), x_(x), out_(out) {
        require_width("gather_rows", "out", out, x.shape(1));
        require(x.data() != out.data(), "gather_rows: out must not be x");
    }
    void prepare(int) override {
        check_rows("gather_rows", batch_.rows.count, x_.shape(0));
        check_rows("gather_rows", batch_.wanted.count, out_.shape(0));
    }
    bool only_first_thread() const override { return batch_.wanted.count <= 1; }
    void run(Worker& worker) override {
        const std::size_t width = x_.shape(1);
        const int count = batch_.wanted.count;
        const Range mine =
            only_first_thread() ? Range{0, worker.thread() == 0 ? count : 0} : share(count, worker);
        for (int row = mine.first; row < mine.last; ++row) {
            std::memcpy(out_.data() + row * width, x_.data() + batch_.wanted_rows[row] * width,
                        width * sizeof(float));
        }
    }

  private:
    const Batch& batch_;
    ConstRows x_;
    Rows out_;
};

// Every row is cut into one slice per thread; slices merge in ascending order, so ties go to the lowest id.
class ArgmaxOp final : public Op {
  public:
    ArgmaxOp(Engine& engine, const RowCount& rows, ConstRows x, Array<std::int32_t, nb::ndim<1>> ids)
        : engine_(engine), rows_(rows), x_(x), ids_(ids) {
        require(x.shape(1) >= 1, "argmax: rows of no elements");
        slices_.resize(std::min(x.shape(0), ids.shape(0)) * engine.pool().threads());
    }
    void prepare(int) override { check_rows("argmax", rows_.count, std::min(x_.shape(0), ids_.shape(0))); }
    void run(Worker& worker) override {
        const std::size_t width = x_.shape(1), threads = worker.threads();
        const Range mine = share(static_cast<int>(width), worker);
        for (int row = 0; row < rows_.count; ++row) {
            const int count = mine.last - mine.first;
            const int found =
                count > 0 ? engine_.kernels().argmax(x_.data() + row * width + mine.first, count) : 0;
            slices_[row * threads + worker.thread()] = count == 0  ? empty
                                                       : found < 0 ? broken
                                                                   : mine.first + found;
        }
        worker.barrier();
        const Range merged = share(rows_.count, worker);
        for (int row = merged.first; row < merged.last; ++row) {
            ids_.data()[row] = merge(x_.data() + row * width, slices_.data() + row * threads, threads);
        }
    }

  private:
    static constexpr std::int32_t broken = -1, empty = -2;

    static std::int32_t merge(const float* row, const std::int32_t* slices, std::size_t count) {
        std::int32_t best = empty;
        for (std::size_t i = 0; i < count; ++i) {
            if (slices[i] == broken) return broken;
            if (slices[i] != empty && (best == empty || row[slices[i]] > row[best])) best = slices[i];
        }
        return best;
    }

    Engine& engine_;
    const RowCount& rows_;
    ConstRows x_;
    Array<std::int32_t, nb::ndim<1>> ids_;
    std::vector<std::int32_t> slices_;
};

class RopeOp final : public Op {
  public:
    RopeOp(Engine& engine, const Batch& batch, Rows x, int heads, int head_dim, ConstRows table,
           RopeStyle style)
        : engine_(engine),
          batch_(batch),
          x_(x),
          heads_(heads),
          head_dim_(head_dim),
          table_(table),
          style_(style) {
        require(heads >= 0 && head_dim >= 1 && static_cast<std::size_t>(heads) * head_dim <= x.shape(1),
                "rope: " + std::to_string(heads) + " heads of " + std::to_string(head_dim) + " in rows of " +
                    std::to_string(x.shape(1)));
        require(table.shape(1) % 2 == 0 && table.shape(1) <= static_cast<std::size_t>(head_dim),
                "rope: a table of width " + std::to_string(table.shape(1)) +
                    "; expected an even width of at most " + std::to_string(head_dim));
    }
    void prepare(int) override {
        check_rows("rope", batch_.rows.count, x_.shape(0));
        require(batch_.highest_position < static_cast<std::int64_t>(table_.shape(0)),
                "rope: position " + std::to_string(batch_.highest_position) + " beyond a table of " +
                    std::to_string(table_.shape(0)));
    }
    bool only_first_thread() const override { return batch_.rows.count <= 1; }
    void run(Worker& worker) override {
        const std::size_t width = x_.shape(1), rotary = table_.shape(1);
        const int rows = batch_.rows.count;
        const Range mine =
            only_first_thread() ? Range{0, worker.thread() == 0 ? rows : 0} : share(rows, worker);
        for (int row = mine.first; row < mine.last; ++row) {
            const float* turns = table_.data() + batch_.positions[row] * rotary;
            engine_.kernels().rope_row(x_.data() + row * width, heads_, head_dim_, turns, turns + rotary / 2,
                                       static_cast<int>(rotary / 2), style_);
        }
    }

  private:
    Engine& engine_;
    const Batch& batch_;
    Rows x_;
    int heads_, head_dim_;
    ConstRows table_;
    RopeStyle style_;
};

}  // namespace

void bind_rows(nb::module_& m) {
    m.def(
        "rms_norm",
        [](Engine& engine, RowCount& rows, ConstRows x, Vector weight, float eps, Rows out)
            -> std::unique_ptr<Op> { return std::make_unique<RmsNormOp>(engine, rows, x, weight, eps, out); },
        nb::arg("engine"), nb::arg("rows"), nb::arg("x").noconvert(), nb::arg("weight").noconvert(),
        nb::arg("eps"), nb::arg("out").noconvert(), nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>());
    m.def(
        "head_norm",
        [](Engine& engine, RowCount& rows, Rows x, int first_head, int heads, int head_dim, Vector weight,
           float eps) -> std::unique_ptr<Op> {
            return std::make_unique<HeadNormOp>(engine, rows, x, first_head, heads, head_dim, weight, eps);
        },
        nb::arg("engine"), nb::arg("rows"), nb::arg("x").noconvert(), nb::arg("first_head"), nb::arg("heads"),
        nb::arg("head_dim"), nb::arg("weight").noconvert(), nb::arg("eps"), nb::keep_alive<0, 1>(),
        nb::keep_alive<0, 2>());
    m.def(
        "swiglu",
        [](Engine& engine, RowCount& rows, ConstRows gate_up, Rows out) -> std::unique_ptr<Op> {
            return std::make_unique<SwigluOp>(engine, rows, gate_up, out);
        },
        nb::arg("engine"), nb::arg("rows"), nb::arg("gate_up").noconvert(), nb::arg("out").noconvert(),
        nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>());
    m.def(
        "gather_rows",
        [](Batch& batch, ConstRows x, Rows out) -> std::unique_ptr<Op> {
            return std::make_unique<GatherRowsOp>(batch, x, out);
        },
        nb::arg("batch"), nb::arg("x").noconvert(), nb::arg("out").noconvert(), nb::keep_alive<0, 1>());
    m.def(
        "argmax",
        [](Engine& engine, RowCount& rows, ConstRows x, Array<std::int32_t, nb::ndim<1>> ids)
            -> std::unique_ptr<Op> { return std::make_unique<ArgmaxOp>(engine, rows, x, ids); },
        nb::arg("engine"), nb::arg("rows"), nb::arg("x").noconvert(), nb::arg("ids").noconvert(),
        nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>());
    m.def(
        "rope",
        [](Engine& engine, Batch& batch, Rows x, int heads, int head_dim, ConstRows table,
           const std::string& style) -> std::unique_ptr<Op> {
            require(style == "interleaved" || style == "half",
                    "rope: unknown style '" + style + "'; expected interleaved or half");
            return std::make_unique<RopeOp>(engine, batch, x, heads, head_dim, table,
                                            style == "half" ? RopeStyle::half : RopeStyle::interleaved);
        },
        nb::arg("engine"), nb::arg("batch"), nb::arg("x").noconvert(), nb::arg("heads"), nb::arg("head_dim"),
        nb::arg("table").noconvert(), nb::arg("style"), nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>());
}

}  // namespace quickdraft
