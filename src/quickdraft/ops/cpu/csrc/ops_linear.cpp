// linear and embed: checks, activation scratch, and how outputs are shared between threads.
#include <nanobind/stl/vector.h>

#include "binding.h"

namespace quickdraft {

namespace {

// Up to this many rows every thread quantises all of x for itself, which costs less than meeting at a
// barrier.
constexpr int private_rows = 2;

// Room for `rows` quantised rows, in blocks: codes, then scales, then corrections.
struct Activations {
    std::int8_t* codes;
    float *scales, *corrections;

    static std::size_t groups(std::size_t rows, std::size_t inputs, std::size_t group) {
        return round_up(rows, row_block) * (inputs / group);
    }
    static std::size_t bytes(std::size_t rows, std::size_t inputs, std::size_t group) {
        return groups(rows, inputs, group) * (group + 2 * sizeof(float));
    }
    Activations(std::uint8_t* scratch, std::size_t rows, std::size_t inputs, std::size_t group)
        : codes(reinterpret_cast<std::int8_t*>(scratch)),
          scales(reinterpret_cast<float*>(scratch + groups(rows, inputs, group) * group)),
          corrections(scales + groups(rows, inputs, group)) {}
};

// Writes columns first .. first + outputs - 1 of `out`, whose rows (and bias, and residual) have `width`
// columns.
struct Columns {
    int first, width;
};

class LinearOp final : public Op {
  public:
    LinearOp(Engine& engine, const RowCount& rows, ConstRows x, const PackedWeight& weight, Rows out,
             std::optional<Vector> bias, std::optional<ConstRows> residual, Columns columns)
        : engine_(engine),
          rows_(rows),
          weight_(weight.view),
          x_(x),
          out_(out),
          bias_(bias),
          residual_(residual),
          columns_(columns),
          group_(layout_of(weight_.format).inputs),
          offset_(layout_of(weight_.format).unsigned_offset()) {
        require(columns.first >= 0 && columns.width - columns.first >= weight_.outputs,
                "linear: columns from " + std::to_string(columns.first) + " of " +
                    std::to_string(columns.width) + " have no room for " + std::to_string(weight_.outputs));
        require_width("linear", "x", x, weight_.inputs);
        require_width("linear", "out", out, columns.width);
        require(x.data() != out.data(), "linear: out must not be x");
        if (bias) require_size("linear", "bias", bias->size(), columns.width);
        if (residual) require_width("linear", "residual", *residual, columns.width);
        capacity_ = std::min(x.shape(0), out.shape(0));
        if (residual) capacity_ = std::min(capacity_, residual->shape(0));
        if (group_ != 0) {
            const std::size_t gathered = weight_.order == nullptr ? 0 : weight_.inputs * sizeof(float);
            engine.reserve(Activations::bytes(capacity_, weight_.inputs, group_),
                           Activations::bytes(private_rows, weight_.inputs, group_) + gathered);
        }
    }

    void prepare(int) override { check_rows("linear", rows_.count, capacity_); }

    void run(Worker& worker) override {
        LinearArguments a{};
        a.weight = weight_;
        a.rows = rows_.count;
        a.x = x_.data();
        a.bias = bias_ ? bias_->data() + columns_.first : nullptr;
        a.residual = residual_ ? residual_->data() + columns_.first : nullptr;
        a.out = out_.data() + columns_.first;
        a.stride = columns_.width;
        if (group_ != 0) quantise(worker, &a);
        const Range tiles = tiles_of(weight_, worker);
        engine_.kernels().linear(a, tiles.first, tiles.last);
    }

    bool fetches() const override { return true; }
    void fetch(const Worker& worker) const override { fetch_tiles(weight_, worker); }

  private:
    void quantise(Worker& worker, LinearArguments* a) {
        const bool alone = a->rows <= private_rows;
        const std::size_t inputs = weight_.inputs, groups = inputs / group_;
        const Activations to(alone ? engine_.thread_scratch(worker.thread()) : engine_.shared_scratch(),
                             alone ? private_rows : capacity_, inputs, group_);
        const Range mine = alone ? Range{0, a->rows} : share(a->rows, worker);
        for (int row = mine.first; row < mine.last; ++row) {
            const std::size_t at = row / row_block * groups * row_block + row % row_block;
            const float* x = a->x + row * inputs;
            if (weight_.order != nullptr) x = gathered(worker, x);
            engine_.kernels().quantise_row(group_, offset_, x, weight_.inputs, to.codes + at * group_,
                                           to.scales + at, to.corrections + at);
        }
        if (!alone) worker.barrier();
        a->codes = to.codes;
        a->scales = to.scales;
        a->corrections = to.corrections;
    }

    // The row in the weight's order, behind the private rows of the thread's scratch.
    const float* gathered(Worker& worker, const float* x) {
        auto* row = reinterpret_cast<float*>(engine_.thread_scratch(worker.thread()) +
                                             Activations::bytes(private_rows, weight_.inputs, group_));
        for (int i = 0; i < weight_.inputs; ++i) row[i] = x[weight_.order[i]];
        return row;
    }

    Engine& engine_;
    const RowCount& rows_;
    const PackedView weight_;
    ConstRows x_;
    Rows out_;
    std::optional<Vector> bias_;
    std::optional<ConstRows> residual_;
    const Columns columns_;
    const int group_;  // inputs of a row that share a scale; 0: activations stay fp32
    const int offset_;
    std::size_t capacity_;
};

class EmbedOp final : public Op {
  public:
    // `instead` is the row of token `replaced`.
    EmbedOp(Engine& engine, const Batch& batch, const PackedWeight& table, Rows out, float scale,
            int replaced, std::optional<Vector> instead)
        : engine_(engine),
          batch_(batch),
          table_(table.view),
          out_(out),
          scale_(scale),
          replaced_(replaced),
          instead_(instead) {
        if (instead) require_size("embed", "the row of a token", instead->size(), table_.inputs);
        require_width("embed", "out", out, table_.inputs);
        require(table_.order == nullptr, "embed: a table whose inputs are in an order of their own");
        require(batch.vocabulary <= table_.outputs, "embed: a table of " + std::to_string(table_.outputs) +
                                                        " rows for a vocabulary of " +
                                                        std::to_string(batch.vocabulary));
    }
    void prepare(int) override { check_rows("embed", batch_.rows.count, out_.shape(0)); }
    bool only_first_thread() const override { return batch_.rows.count <= 1; }
    void run(Worker& worker) override {
        const int rows = batch_.rows.count;
        const Range mine =
            only_first_thread() ? Range{0, worker.thread() == 0 ? rows : 0} : share(rows, worker);
        for (int row = mine.first; row < mine.last; ++row) {
            float* to = out_.data() + static_cast<std::size_t>(row) * table_.inputs;
            if (instead_ && batch_.tokens[row] == replaced_) {
                std::copy_n(instead_->data(), table_.inputs, to);
            } else {
                engine_.kernels().embed_row(table_, batch_.tokens[row], to);
            }
            if (scale_ == 1.0f) continue;
            for (int i = 0; i < table_.inputs; ++i) to[i] *= scale_;
        }
    }

  private:
    Engine& engine_;
    const Batch& batch_;
    const PackedView table_;
    Rows out_;
    float scale_;
    int replaced_;
    std::optional<Vector> instead_;
};

using Codes8 = Array<const std::uint8_t, nb::ndim<2>>;
using Codes16 = Array<const std::uint16_t, nb::ndim<2>>;
using Steps = Array<const std::int8_t, nb::ndim<2>>;
using Order = Array<const std::int32_t, nb::ndim<1>>;

// The array's numbers, [outputs, expected] where they are `wanted` and absent where they are not.
template <class Numbers>
auto numbers(const char* name, const std::optional<Numbers>& given, bool wanted, std::size_t outputs,
             std::size_t expected) {
    require(given.has_value() == wanted,
            std::string(name) + (wanted ? " are missing" : " are not of this format"));
    require(!given || (given->shape(0) == outputs && given->shape(1) == expected),
            std::string(name) + " are " + (given ? shape_text(given->shape(0), given->shape(1)) : "") +
                "; expected " + shape_text(outputs, expected));
    return given ? given->data() : nullptr;
}

std::unique_ptr<PackedWeight> pack_groups_of(Engine& engine, const std::string& name, Codes8 codes,
                                             Codes16 scales, std::optional<Steps> scale_steps,
                                             std::optional<Codes16> minimums,
                                             std::optional<Steps> minimum_steps, std::optional<Order> order,
                                             bool paired) {
    const WeightFormat format = format_named(name);
    const GroupLayout layout = layout_of(format);
    require(layout.inputs != 0, name + " has no groups");
    require(!paired || (layout.bits == 4 && !layout.two_level), name + " does not take codes in pairs");
    const std::size_t outputs = codes.shape(0), inputs = codes.shape(1) * (paired ? 2 : 1);
    const std::size_t groups = inputs / layout.inputs;
    const bool steps = layout.two_level, zero_steps = layout.zero && layout.bits < 8;
    // One number may stand for several groups, unless another level does that already.
    std::size_t shares = groups / layout.sharing(), repeat = 1;
    if (!steps && scales.shape(1) > 0 && shares % scales.shape(1) == 0) repeat = shares / scales.shape(1);
    shares /= repeat;
    require(!order || order->size() == inputs, "an order of " + std::to_string(order ? order->size() : 0) +
                                                   " inputs; expected " + std::to_string(inputs));
    const GroupSource source{codes.data(),
                             numbers("scales", std::optional<Codes16>(scales), true, outputs, shares),
                             numbers("minimums", minimums, layout.minimum && !zero_steps, outputs, shares),
                             numbers("scale steps", scale_steps, steps, outputs, groups),
                             numbers("minimum steps", minimum_steps, (steps && layout.minimum) || zero_steps,
                                     outputs, zero_steps ? shares : groups),
                             static_cast<int>(repeat),
                             order ? order->data() : nullptr,
                             paired};
    nb::gil_scoped_release unlocked;
    return pack_groups(engine, format, source, static_cast<int>(outputs), static_cast<int>(inputs));
}

// `parts` (descriptor, offset, outputs) lie one after the other in the weight.
std::unique_ptr<PackedWeight> pack_blocks_of(Engine& engine, const std::string& name,
                                             const std::vector<std::tuple<int, std::int64_t, int>>& parts,
                                             int inputs) {
    const BlockType& type = block_type_named(name);
    require(inputs > 0 && inputs % type.inputs == 0, name + " needs a multiple of " +
                                                         std::to_string(type.inputs) + " inputs; got " +
                                                         std::to_string(inputs));
    std::vector<FilePart> rows;
    for (const auto& [file, offset, outputs] : parts) {
        require(outputs >= 0 && offset >= 0,
                "a part of " + std::to_string(outputs) + " outputs at byte " + std::to_string(offset));
        rows.push_back({file, offset, outputs});
    }
    nb::gil_scoped_release unlocked;
    return pack_blocks(engine, type, rows, inputs);
}

}  // namespace

void bind_linear(nb::module_& m) {
    m.def(
        "linear",
        [](Engine& engine, RowCount& rows, ConstRows x, PackedWeight& weight, Rows out,
           std::optional<Vector> bias, std::optional<ConstRows> residual, int first_column,
           int width) -> std::unique_ptr<Op> {
            return std::make_unique<LinearOp>(engine, rows, x, weight, out, bias, residual,
                                              Columns{first_column, width});
        },
        nb::arg("engine"), nb::arg("rows"), nb::arg("x").noconvert(), nb::arg("weight"),
        nb::arg("out").noconvert(), nb::arg("bias").noconvert().none(),
        nb::arg("residual").noconvert().none(), nb::arg("first_column"), nb::arg("width"),
        nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>(), nb::keep_alive<0, 4>());
    m.def(
        "embed",
        [](Engine& engine, Batch& batch, PackedWeight& table, Rows out, float scale, int replaced,
           std::optional<Vector> instead) -> std::unique_ptr<Op> {
            return std::make_unique<EmbedOp>(engine, batch, table, out, scale, replaced, instead);
        },
        nb::arg("engine"), nb::arg("batch"), nb::arg("table"), nb::arg("out").noconvert(), nb::arg("scale"),
        nb::arg("replaced"), nb::arg("instead").noconvert().none(), nb::keep_alive<0, 1>(),
        nb::keep_alive<0, 2>(), nb::keep_alive<0, 3>());

    nb::class_<PackedWeight>(m, "PackedWeight")
        .def_prop_ro("shape",
                     [](const PackedWeight& w) { return std::make_tuple(w.view.outputs, w.view.inputs); })
        .def_prop_ro("nbytes", [](const PackedWeight& w) { return w.memory.size; })
        .def_prop_ro("format", [](const PackedWeight& w) { return name_of(w.view.format); });

    m.def(
        "pack_float32",
        [](Engine& engine, Array<const float, nb::ndim<2>> values) {
            nb::gil_scoped_release unlocked;
            return pack_dense(engine, WeightFormat::float32, values.data(), values.shape(0), values.shape(1));
        },
        nb::arg("engine"), nb::arg("values").noconvert());
    m.def(
        "pack_sixteen_bit",
        [](Engine& engine, Codes16 values, bool bfloat16) {
            nb::gil_scoped_release unlocked;
            return pack_dense(engine, bfloat16 ? WeightFormat::bfloat16 : WeightFormat::float16,
                              values.data(), values.shape(0), values.shape(1));
        },
        nb::arg("engine"), nb::arg("values").noconvert(), nb::arg("bfloat16"));
    m.def("pack_groups", pack_groups_of, nb::arg("engine"), nb::arg("format"), nb::arg("codes").noconvert(),
          nb::arg("scales").noconvert(), nb::arg("scale_steps").noconvert().none(),
          nb::arg("minimums").noconvert().none(), nb::arg("minimum_steps").noconvert().none(),
          nb::arg("order").noconvert().none(), nb::arg("paired"));
    m.def("pack_blocks", pack_blocks_of, nb::arg("engine"), nb::arg("type"), nb::arg("parts"),
          nb::arg("inputs"));
}

}  // namespace quickdraft
