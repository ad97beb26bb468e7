// linear and embed: checks, activation scratch, and how outputs are shared between threads.
#include "binding.h"

namespace quickdraft {

namespace {

// Up to this many rows every thread quantises all of x for itself, which costs less than meeting at a
// barrier.
constexpr int private_rows = 2;

bool quantised(WeightFormat format) {
    return format != WeightFormat::float32 && format != WeightFormat::float16 &&
           format != WeightFormat::bfloat16;
}

// Room for `rows` quantised rows, in blocks: codes, then scales, then corrections.
struct Activations {
    std::int8_t* codes;
    float *scales, *corrections;

    static std::size_t groups(std::size_t rows, std::size_t inputs) {
        return round_up(rows, row_block) * (inputs / group_inputs);
    }
    static std::size_t bytes(std::size_t rows, std::size_t inputs) {
        return groups(rows, inputs) * (group_inputs + 2 * sizeof(float));
    }
    Activations(std::uint8_t* scratch, std::size_t rows, std::size_t inputs)
        : codes(reinterpret_cast<std::int8_t*>(scratch)),
          scales(reinterpret_cast<float*>(scratch + groups(rows, inputs) * group_inputs)),
          corrections(scales + groups(rows, inputs)) {}
};

class LinearOp final : public Op {
  public:
    LinearOp(Engine& engine, const RowCount& rows, ConstRows x, const PackedWeight& weight, Rows out,
             std::optional<Vector> bias, std::optional<ConstRows> residual)
        : engine_(engine),
          rows_(rows),
          weight_(weight.view),
          x_(x),
          out_(out),
          bias_(bias),
          residual_(residual) {
        require_width("linear", "x", x, weight_.inputs);
        require_width("linear", "out", out, weight_.outputs);
        require(x.data() != out.data(), "linear: out must not be x");
        if (bias) require_size("linear", "bias", bias->size(), weight_.outputs);
        if (residual) require_width("linear", "residual", *residual, weight_.outputs);
        capacity_ = std::min(x.shape(0), out.shape(0));
        if (residual) capacity_ = std::min(capacity_, residual->shape(0));
        if (quantised(weight_.format)) {
            engine.reserve(Activations::bytes(capacity_, weight_.inputs),
                           Activations::bytes(private_rows, weight_.inputs));
        }
    }

    void prepare(int) override { check_rows("linear", rows_.count, capacity_); }

    void run(Worker& worker) override {
        LinearArguments a{};
        a.weight = weight_;
        a.rows = rows_.count;
        a.x = x_.data();
        a.bias = bias_ ? bias_->data() : nullptr;
        a.residual = residual_ ? residual_->data() : nullptr;
        a.out = out_.data();
        if (quantised(weight_.format)) quantise(worker, &a);
        const Range tiles = share((weight_.outputs + tile_outputs - 1) / tile_outputs, worker);
        engine_.kernels().linear(a, tiles.first, tiles.last);
    }

  private:
    void quantise(Worker& worker, LinearArguments* a) {
        const bool alone = a->rows <= private_rows;
        const std::size_t inputs = weight_.inputs, groups = inputs / group_inputs;
        const Activations to(alone ? engine_.thread_scratch(worker.thread()) : engine_.shared_scratch(),
                             alone ? private_rows : capacity_, inputs);
        const Range mine = alone ? Range{0, a->rows} : share(a->rows, worker);
        for (int row = mine.first; row < mine.last; ++row) {
            const std::size_t at = row / row_block * groups * row_block + row % row_block;
            engine_.kernels().quantise_row(weight_.format, a->x + row * inputs, weight_.inputs,
                                           to.codes + at * group_inputs, to.scales + at, to.corrections + at);
        }
        if (!alone) worker.barrier();
        a->codes = to.codes;
        a->scales = to.scales;
        a->corrections = to.corrections;
    }

    Engine& engine_;
    const RowCount& rows_;
    const PackedView weight_;
    ConstRows x_;
    Rows out_;
    std::optional<Vector> bias_;
    std::optional<ConstRows> residual_;
    std::size_t capacity_;
};

class EmbedOp final : public Op {
  public:
    EmbedOp(Engine& engine, const Batch& batch, const PackedWeight& table, Rows out)
        : engine_(engine), batch_(batch), table_(table.view), out_(out) {
        require_width("embed", "out", out, table_.inputs);
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
            engine_.kernels().embed_row(table_, batch_.tokens[row],
                                        out_.data() + static_cast<std::size_t>(row) * table_.inputs);
        }
    }

  private:
    Engine& engine_;
    const Batch& batch_;
    const PackedView table_;
    Rows out_;
};

}  // namespace

void bind_linear(nb::module_& m) {
    m.def(
        "linear",
        [](Engine& engine, RowCount& rows, ConstRows x, PackedWeight& weight, Rows out,
           std::optional<Vector> bias, std::optional<ConstRows> residual) -> std::unique_ptr<Op> {
            return std::make_unique<LinearOp>(engine, rows, x, weight, out, bias, residual);
        },
        nb::arg("engine"), nb::arg("rows"), nb::arg("x").noconvert(), nb::arg("weight"),
        nb::arg("out").noconvert(), nb::arg("bias").noconvert().none(),
        nb::arg("residual").noconvert().none(), nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>(),
        nb::keep_alive<0, 4>());
    m.def(
        "embed",
        [](Engine& engine, Batch& batch, PackedWeight& table, Rows out) -> std::unique_ptr<Op> {
            return std::make_unique<EmbedOp>(engine, batch, table, out);
        },
        nb::arg("engine"), nb::arg("batch"), nb::arg("table"), nb::arg("out").noconvert(),
        nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>(), nb::keep_alive<0, 3>());

    nb::class_<PackedWeight>(m, "PackedWeight")
        .def_prop_ro("shape",
                     [](const PackedWeight& w) { return std::make_tuple(w.view.outputs, w.view.inputs); })
        .def_prop_ro("nbytes", [](const PackedWeight& w) { return w.bytes.size(); })
        .def_prop_ro("format", [](const PackedWeight& w) { return name_of(w.view.format); });

    using Codes16 = Array<const std::uint16_t, nb::ndim<2>>;
    const auto check_groups = [](const char* name, std::size_t outputs, std::size_t inputs,
                                 const Codes16& scales) {
        require(scales.shape(0) == outputs && scales.shape(1) == inputs / group_inputs,
                std::string(name) + " are " + shape_text(scales.shape(0), scales.shape(1)) + "; expected " +
                    shape_text(outputs, inputs / group_inputs));
    };
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
    m.def(
        "pack_int8",
        [check_groups](Engine& engine, Array<const std::int8_t, nb::ndim<2>> codes, Codes16 scales) {
            check_groups("scales", codes.shape(0), codes.shape(1), scales);
            nb::gil_scoped_release unlocked;
            return pack_int8(engine, codes.data(), scales.data(), codes.shape(0), codes.shape(1));
        },
        nb::arg("engine"), nb::arg("codes").noconvert(), nb::arg("scales").noconvert());
    m.def(
        "pack_int4",
        [check_groups](Engine& engine, Array<const std::uint8_t, nb::ndim<2>> codes, Codes16 scales,
                       std::optional<Codes16> minimums) {
            check_groups("scales", codes.shape(0), codes.shape(1), scales);
            if (minimums) check_groups("minimums", codes.shape(0), codes.shape(1), *minimums);
            nb::gil_scoped_release unlocked;
            return pack_int4(engine, codes.data(), scales.data(), minimums ? minimums->data() : nullptr,
                             codes.shape(0), codes.shape(1));
        },
        nb::arg("engine"), nb::arg("codes").noconvert(), nb::arg("scales").noconvert(),
        nb::arg("minimums").noconvert().none());
}

}  // namespace quickdraft
