// best_output: the logits of the outputs that can be the largest of a row, and upper bounds for all others.
// It reads the sketch of the weight, and of the weight itself only the tiles that hold such outputs.
#include <cmath>
#include <limits>

#include "binding.h"
#include "sketch.h"

namespace quickdraft {

namespace {

constexpr int most_rows = 2;  // with more, arithmetic costs more than the bytes saved
constexpr int group_inputs = layout_of(WeightFormat::int8).inputs;
constexpr int low_most = (1 << sketch_low_bits) - 1;
constexpr float scales_bound = 1e25f;  // sums of scales below it leave no sum of a row infinite
constexpr float negative_infinity = -std::numeric_limits<float>::infinity();

// One thread's quantised rows, as linear reads them.
struct QuantisedRows {
    std::vector<std::int8_t> codes;
    std::vector<float> scales, corrections, bound_corrections;
    bool bounded;  // false: not finite, or so large that a sum could overflow
};

class BestOutputOp final : public Op {
  public:
    BestOutputOp(Engine& engine, const RowCount& rows, ConstRows x, const PackedWeight& weight,
                 const Sketch& sketch, Rows out)
        : engine_(engine), rows_(rows), x_(x), weight_(weight.view), sketch_(sketch), out_(out) {
        const PackedView& bounds = sketch.weight.view;
        require(weight_.format == WeightFormat::int8 && weight_.outputs == bounds.outputs &&
                    weight_.inputs == bounds.inputs,
                "best_output: the sketch is of another weight");
        require_width("best_output", "x", x, weight_.inputs);
        require_width("best_output", "out", out, weight_.outputs);
        found_.resize(engine.pool().threads() * most_rows);
        own_.resize(engine.pool().threads());
        const std::size_t groups = weight_.inputs / group_inputs;
        for (QuantisedRows& own : own_) {
            own.codes.resize(row_block * groups * group_inputs);
            for (auto* numbers : {&own.scales, &own.corrections, &own.bound_corrections}) {
                numbers->resize(row_block * groups);
            }
        }
    }

    void prepare(int) override {
        check_rows("best_output", rows_.count,
                   std::min({x_.shape(0), out_.shape(0), std::size_t{most_rows}}));
    }

    void run(Worker& worker) override {
        QuantisedRows& own = own_[worker.thread()];
        own.bounded = true;
        for (int row = 0; row < rows_.count; ++row) quantise(&own, row);
        const Range tiles = tiles_of(weight_, worker);
        if (!own.bounded) return linear(own, weight_, own.corrections, tiles);
        linear(own, sketch_.weight.view, own.bound_corrections, tiles);
        const Range outputs{tiles.first * tile_outputs, std::min(tiles.last * tile_outputs, weight_.outputs)};
        for (int row = 0; row < rows_.count; ++row) {
            found_[row * worker.threads() + worker.thread()] = likely_best(own, row, outputs);
        }
        worker.barrier();
        for (int row = 0; row < rows_.count; ++row) {
            const float* found = found_.data() + row * worker.threads();
            refine(own, row, outputs, *std::max_element(found, found + worker.threads()));
        }
    }

    bool fetches() const override { return true; }
    void fetch(const Worker& worker) const override { fetch_tiles(sketch_.weight.view, worker); }

  private:
    // The largest logit in the tile of the output with the highest upper bound.
    float likely_best(const QuantisedRows& own, int row, Range outputs) {
        if (outputs.first >= outputs.last) return negative_infinity;
        const float* bounds = out_.data() + row * out_.shape(1) + outputs.first;
        return exact_tile(own, row,
                          outputs.first + engine_.kernels().argmax(bounds, outputs.last - outputs.first));
    }

    // Makes every output exact whose upper bound reaches `best`, a logit of this row. Rounding needs no
    // margin: both chains multiply by the same numbers up to a power of two, no product of the sketch's is
    // the smaller one, and rounding keeps order. Only where the weight's scale is flushed to zero and the
    // sketch's is not can a bound be lower, by less than 8 * 2^-126 * 2^17 a group.
    void refine(const QuantisedRows& own, int row, Range outputs, float best) {
        const float* values = out_.data() + row * out_.shape(1);
        const float flushed = 1e-31f * static_cast<float>(weight_.inputs / group_inputs);
        for (int from = outputs.first;;) {
            const float below = std::nextafter(best - flushed, negative_infinity);
            from = engine_.kernels().first_above(values, from, outputs.last, below);
            if (from >= outputs.last) return;
            best = std::max(best, exact_tile(own, row, from));
            from = (from / tile_outputs + 1) * tile_outputs;
        }
    }

    // Logits of this output's tile for all rows; the largest of this row.
    float exact_tile(const QuantisedRows& own, int row, int output) {
        const int tile = output / tile_outputs, first = tile * tile_outputs;
        linear(own, weight_, own.corrections, {tile, tile + 1});
        const float* values = out_.data() + row * out_.shape(1);
        return *std::max_element(values + first, values + std::min(first + tile_outputs, weight_.outputs));
    }

    void linear(const QuantisedRows& own, const PackedView& weight, const std::vector<float>& corrections,
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

    // The sketch's corrections hold the most its missing bits can add: multiples of 1/8 below 2^17, exact.
    void quantise(QuantisedRows* own, int row) {
        const int groups = weight_.inputs / group_inputs;
        engine_.kernels().quantise_row(group_inputs, layout_of(weight_.format).unsigned_offset(),
                                       x_.data() + row * x_.shape(1), weight_.inputs,
                                       own->codes.data() + row * group_inputs, own->scales.data() + row,
                                       own->corrections.data() + row);
        float scales = 0.0f;
        for (int g = 0; g < groups; ++g) {
            const int at = g * row_block + row;
            const std::int8_t* codes = own->codes.data() + at * group_inputs;
            int sum = 0, positive = 0;
            for (int i = 0; i < group_inputs; ++i) {
                sum += codes[i];
                positive += std::max<int>(codes[i], 0);
            }
            own->bound_corrections[at] = static_cast<float>(layout_of(WeightFormat::int5).offset() * sum) -
                                         static_cast<float>(low_most * positive) / (1 << sketch_low_bits);
            scales += own->scales[at];
        }
        own->bounded &= scales < scales_bound;  // false for NaN
    }

    Engine& engine_;
    const RowCount& rows_;
    ConstRows x_;
    const PackedView weight_;
    const Sketch& sketch_;
    Rows out_;
    std::vector<QuantisedRows> own_;  // of each thread
    std::vector<float> found_;        // [most_rows][threads], a logit each
};

}  // namespace

void bind_head(nb::module_& m) {
    m.attr("BEST_OUTPUT_ROWS") = most_rows;
    nb::class_<Sketch>(m, "Sketch").def_prop_ro("nbytes", [](const Sketch& sketch) {
        return sketch.weight.memory.size;
    });
    m.def(
        "sketch",
        [](Engine& engine, const PackedWeight& weight) {
            nb::gil_scoped_release unlocked;
            return sketch_of(engine, weight);
        },
        nb::arg("engine"), nb::arg("weight"));
    m.def(
        "best_output",
        [](Engine& engine, RowCount& rows, ConstRows x, PackedWeight& weight, Sketch& sketch,
           Rows out) -> std::unique_ptr<Op> {
            return std::make_unique<BestOutputOp>(engine, rows, x, weight, sketch, out);
        },
        nb::arg("engine"), nb::arg("rows"), nb::arg("x").noconvert(), nb::arg("weight"), nb::arg("sketch"),
        nb::arg("out").noconvert(), nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>(), nb::keep_alive<0, 4>(),
        nb::keep_alive<0, 5>());
}

}  // namespace quickdraft
