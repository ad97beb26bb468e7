// best_head: logits of the ids that can be the best of a row, upper bounds for all others. It reads a sketch of
// the head, the high bits of its codes, and of the head itself only the tiles that hold such ids.
#include <cmath>
#include <limits>

#include "binding.h"

namespace quickdraft {

namespace {

constexpr int low_bits = 3;  // code = 8 * high + low, and the sketch's scales are 8 times the head's
constexpr int low_most = (1 << low_bits) - 1;
constexpr int code_most = 128 + low_most;
constexpr float overflow_scales = 1e25f;  // below this no sum of a row can overflow

// One thread's quantised rows, laid out as linear reads them.
struct HeadRows {
    std::vector<std::int8_t> codes;
    std::vector<float> scales, corrections, bound_corrections;
    float margin[row_block];  // what fp32 rounding can add to (upper bound - logit), at most
    bool bounded;             // false: numbers too large for the bound to hold
};

class BestHeadOp final : public Op {
  public:
    BestHeadOp(Engine& engine, const RowCount& rows, ConstRows x, const PackedWeight& head,
               const PackedWeight& sketch, float largest_scale, Rows out)
        : engine_(engine),
          rows_(rows),
          x_(x),
          head_(head.view),
          sketch_(sketch.view),
          largest_scale_(largest_scale),
          out_(out) {
        require(head_.format == WeightFormat::int8 && sketch_.format == WeightFormat::int5,
                "best_head: needs an int8 head and an int5 sketch");
        require(head_.outputs == sketch_.outputs && head_.inputs == sketch_.inputs,
                "best_head: head and sketch differ in shape");
        require_width("best_head", "x", x, head_.inputs);
        require_width("best_head", "out", out, head_.outputs);
        threads_.resize(engine.pool().threads());
        found_.resize(engine.pool().threads() * row_block);
        const std::size_t groups = head_.inputs / group_;
        for (HeadRows& own : threads_) {
            own.codes.resize(row_block * head_.inputs);
            for (auto* numbers : {&own.scales, &own.corrections, &own.bound_corrections}) {
                numbers->resize(row_block * groups);
            }
        }
    }

    void prepare(int) override {
        check_rows("best_head", rows_.count,
                   std::min({x_.shape(0), out_.shape(0), std::size_t{row_block}}));
    }

    void run(Worker& worker) override {
        HeadRows& own = threads_[worker.thread()];
        quantise(&own);
        const Range tiles = share((head_.outputs + tile_outputs - 1) / tile_outputs, worker);
        if (!own.bounded) return linear(own, head_, own.corrections, tiles);
        linear(own, sketch_, own.bound_corrections, tiles);
        const Range columns{tiles.first * tile_outputs, std::min(tiles.last * tile_outputs, head_.outputs)};
        for (int row = 0; row < rows_.count; ++row) {
            float* values = out_.data() + row * out_.shape(1);
            found_[row * worker.threads() + worker.thread()] =
                columns.first < columns.last
                    ? exact_tile(own, row,
                                 columns.first + engine_.kernels().argmax(values + columns.first,
                                                                          columns.last - columns.first))
                    : -std::numeric_limits<float>::infinity();
        }
        worker.barrier();
        for (int row = 0; row < rows_.count; ++row) refine(own, row, columns, worker.threads());
    }

    std::int64_t exact_tiles() const {  // of thread 0, since the op was made
        return exact_tiles_;
    }

  private:
    // Makes exact every id whose upper bound reaches the best logit found so far.
    void refine(const HeadRows& own, int row, Range columns, int threads) {
        const float* found = found_.data() + row * threads;
        float best = *std::max_element(found, found + threads);
        const float* values = out_.data() + row * out_.shape(1);
        int id = columns.first;
        while (true) {
            id = engine_.kernels().first_above(values, id, columns.last, best - own.margin[row]);
            if (id >= columns.last) return;
            best = std::max(best, exact_tile(own, row, id));
            id = (id / tile_outputs + 1) * tile_outputs;
        }
    }

    // The largest logit of this row in the id's tile, whose logits of all rows are now exact.
    float exact_tile(const HeadRows& own, int row, int id) {
        const int tile = id / tile_outputs, first = tile * tile_outputs;
        linear(own, head_, own.corrections, {tile, tile + 1});
        if (&own == threads_.data()) ++exact_tiles_;
        const float* values = out_.data() + row * out_.shape(1);
        return *std::max_element(values + first, values + std::min(first + tile_outputs, head_.outputs));
    }

    void linear(const HeadRows& own, const PackedView& weight, const std::vector<float>& corrections,
                Range tiles) {
        LinearArguments a{};
        a.weight = weight;
        a.rows = rows_.count;
        a.codes = own.codes.data();
        a.scales = own.scales.data();
        a.corrections = corrections.data();
        a.out = out_.data();
        a.stride = out_.shape(1);
        engine_.kernels().linear(a, tiles.first, tiles.last);
    }

    // The low bits add at most low_most * (sum of the positive codes of x) to a group's dot, in units of the
    // head's scale; all numbers here are multiples of 1/8 below 2^21, so exact.
    void quantise(HeadRows* own) {
        const int groups = head_.inputs / group_;
        own->bounded = true;
        for (int row = 0; row < rows_.count; ++row) {
            engine_.kernels().quantise_row(
                group_, layout_of(head_.format).unsigned_offset(), x_.data() + row * x_.shape(1),
                head_.inputs, own->codes.data() + row * group_, own->scales.data() + row,
                own->corrections.data() + row);
            float sizes = 0.0f, scales = 0.0f;
            for (int g = 0; g < groups; ++g) {
                const int at = g * row_block + row;
                const std::int8_t* codes = own->codes.data() + at * group_;
                int sum = 0, size = 0;
                for (int i = 0; i < group_; ++i) {
                    sum += codes[i];
                    size += std::abs(codes[i]);
                }
                const float positive = static_cast<float>((sum + size) / 2);
                own->bound_corrections[at] =
                    static_cast<float>(layout_of(sketch_.format).offset() * sum) -
                    positive * (static_cast<float>(low_most) / (1 << low_bits));
                sizes += own->scales[at] * static_cast<float>(size);
                scales += own->scales[at];
            }
            if (!(scales < overflow_scales)) own->bounded = false;
            // Each chain errs by at most (groups + 3) roundings of the sum of its terms' sizes; four times that.
            own->margin[row] = 4.0f * static_cast<float>(groups + 3) *
                                   std::numeric_limits<float>::epsilon() * code_most * largest_scale_ * sizes +
                               1e-28f;
        }
    }

    static constexpr int group_ = 32;
    Engine& engine_;
    const RowCount& rows_;
    ConstRows x_;
    const PackedView head_, sketch_;
    const float largest_scale_;
    Rows out_;
    std::vector<HeadRows> threads_;
    std::vector<float> found_;
    std::int64_t exact_tiles_ = 0;
};

}  // namespace

void bind_head(nb::module_& m) {
    nb::class_<BestHeadOp, Op>(m, "BestHeadOp").def_prop_ro("exact_tiles", &BestHeadOp::exact_tiles);
    m.def(
        "best_head",
        [](Engine& engine, RowCount& rows, ConstRows x, PackedWeight& head, PackedWeight& sketch,
           float largest_scale, Rows out) {
            return std::make_unique<BestHeadOp>(engine, rows, x, head, sketch, largest_scale, out);
        },
        nb::arg("engine"), nb::arg("rows"), nb::arg("x").noconvert(), nb::arg("head"), nb::arg("sketch"),
        nb::arg("largest_scale"), nb::arg("out").noconvert(), nb::keep_alive<0, 1>(),
        nb::keep_alive<0, 2>(), nb::keep_alive<0, 4>(), nb::keep_alive<0, 5>());
}

}  // namespace quickdraft
