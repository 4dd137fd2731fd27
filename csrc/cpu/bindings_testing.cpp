// Entry points that call one instruction set's kernel directly.
#include "bindings.h"

namespace caudal {
namespace {

Prologue prologue_of(const std::string& name) {
  if (name == "none") return Prologue::kNone;
  if (name == "rms_norm") return Prologue::kRmsNorm;
  if (name == "silu_mul") return Prologue::kSiluMul;
  throw std::invalid_argument("prologue must be none, rms_norm or silu_mul");
}

size_t panel_bytes(int64_t num_tokens, int64_t cols) {
  return static_cast<size_t>((num_tokens + 63) / 64 * 64 * (cols / 32) * kPanelBytesPerBlock);
}

NumpyArray<float> linear(const std::string& isa, F32Matrix x, const LinearWeight& weight,
                         int num_threads, const std::string& prologue,
                         std::optional<F32Vector> norm_weight, float eps,
                         std::optional<F32Matrix> residual) {
  const Runtime runtime(isa, num_threads);
  const Prologue kind = prologue_of(prologue);
  const int64_t in_cols = kind == Prologue::kSiluMul ? 2 * weight.cols : weight.cols;
  require(static_cast<int64_t>(x.shape(1)) == in_cols, "x: wrong number of columns");
  require(kind != Prologue::kRmsNorm ||
              (norm_weight && static_cast<int64_t>(norm_weight->size()) == weight.cols),
          "norm_weight: one value per column is needed");
  const size_t tokens = x.shape(0);
  const auto rows = static_cast<size_t>(weight.rows);
  require(!residual || (residual->shape(0) == tokens && residual->shape(1) == rows),
          "residual: wrong shape");
  auto out = new_array<float>({tokens, rows});
  const PageMemory panels(panel_bytes(static_cast<int64_t>(tokens), weight.cols), false);
  const LinearArgs args{.x = x.data(),
                        .x_stride = in_cols,
                        .num_tokens = static_cast<int>(tokens),
                        .prologue = kind,
                        .norm_weight = data_or_null(norm_weight),
                        .eps = eps,
                        .segments = weight.segments.data(),
                        .num_segments = static_cast<int>(weight.segments.size()),
                        .bias = weight.bias.empty() ? nullptr : weight.bias.data(),
                        .residual = data_or_null(residual),
                        .out = out.data(),
                        .out_stride = weight.rows,
                        .panels = panels.data()};
  const nb::gil_scoped_release release;
  run_kernel(runtime.table->linear, args, num_threads);
  return out;
}

NumpyArray<float> rms_norm(const std::string& isa, F32Matrix x, F32Vector weight, float eps,
                           int num_threads) {
  const Runtime runtime(isa, num_threads);
  require(weight.size() == x.shape(1), "weight: one value per column is needed");
  auto out = new_array<float>({x.shape(0), x.shape(1)});
  const auto cols = static_cast<int64_t>(x.shape(1));
  const RmsNormArgs args{.x = x.data(),
                         .x_stride = cols,
                         .num_tokens = static_cast<int>(x.shape(0)),
                         .cols = static_cast<int>(cols),
                         .weight = weight.data(),
                         .eps = eps,
                         .out = out.data(),
                         .out_stride = cols};
  const nb::gil_scoped_release release;
  run_kernel(runtime.table->rms_norm, args, num_threads);
  return out;
}

NumpyArray<float> silu_mul(const std::string& isa, F32Matrix gate_up, int num_threads) {
  const Runtime runtime(isa, num_threads);
  require(gate_up.shape(1) % 2 == 0, "gate_up: an even number of columns is needed");
  auto out = new_array<float>({gate_up.shape(0), gate_up.shape(1) / 2});
  const SiluMulArgs args{.gate_up = gate_up.data(),
                         .num_tokens = static_cast<int>(gate_up.shape(0)),
                         .cols = static_cast<int>(gate_up.shape(1) / 2),
                         .out = out.data()};
  const nb::gil_scoped_release release;
  run_kernel(runtime.table->silu_mul, args, num_threads);
  return out;
}

NumpyArray<float> embed(const std::string& isa, I32Vector input_ids, const LinearWeight& table,
                        int num_threads) {
  const Runtime runtime(isa, num_threads);
  require(table.segments.size() == 1, "table: a single format is needed");
  for (size_t i = 0; i < input_ids.size(); ++i) {
    require(input_ids.data()[i] >= 0 && input_ids.data()[i] < table.rows, "input_ids: out of range");
  }
  auto out = new_array<float>({input_ids.size(), static_cast<size_t>(table.cols)});
  Batch batch{};
  batch.num_tokens = static_cast<int>(input_ids.size());
  batch.input_ids = input_ids.data();
  const EmbedArgs args{
      .batch = &batch, .table = table.segments[0], .out = out.data(), .out_stride = table.cols};
  const nb::gil_scoped_release release;
  run_kernel(runtime.table->embed, args, num_threads);
  return out;
}

}  // namespace

void bind_testing(nb::module_& m) {
  using namespace nb::literals;
  m.def("linear", linear, "isa"_a, "x"_a, "weight"_a, "num_threads"_a = 1, "prologue"_a = "none",
        "norm_weight"_a = nb::none(), "eps"_a = 0.0f, "residual"_a = nb::none());
  m.def("rms_norm", rms_norm, "isa"_a, "x"_a, "weight"_a, "eps"_a, "num_threads"_a = 1);
  m.def("silu_mul", silu_mul, "isa"_a, "gate_up"_a, "num_threads"_a = 1);
  m.def("embed", embed, "isa"_a, "input_ids"_a, "table"_a, "num_threads"_a = 1);
}

}  // namespace caudal
