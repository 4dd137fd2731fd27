// Entry points that call one instruction set's kernel directly.
#include "attention_schedule.h"
#include "bindings.h"
#include "kv_cache.h"

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
  require(runtime.table->has_bf16 || weight.activations != Activations::kBf16,
          "weight: these kernels do not multiply bf16");
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
                        .panels = panels.data(),
                        .activations = weight.activations,
                        .gate_rows = 0,
                        .gate_reader = {}};
  const ReleaseGil release;
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
  const ReleaseGil release;
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
  const ReleaseGil release;
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
  const ReleaseGil release;
  run_kernel(runtime.table->embed, args, num_threads);
  return out;
}

NumpyArray<float> rope_table(const std::string& isa, I32Vector positions, F32Vector inv_freq,
                             float attention_factor, int num_threads) {
  const Runtime runtime(isa, num_threads);
  auto out = new_array<float>({positions.size(), 2, inv_freq.size()});
  Batch batch{};
  batch.num_tokens = static_cast<int>(positions.size());
  batch.positions = positions.data();
  const RopeTableArgs args{.batch = &batch,
                           .inv_freq = inv_freq.data(),
                           .rope_dim = static_cast<int>(inv_freq.size()) * 2,
                           .attention_factor = attention_factor,
                           .cos_sin = out.data()};
  const ReleaseGil release;
  run_kernel(runtime.table->rope_table, args, num_threads);
  return out;
}

NumpyArray<float> rope_and_cache(const std::string& isa, F32Matrix qkv, nb::handle batch_arrays,
                                 Array<float, 3> cos_sin, KVCache& cache, int layer,
                                 bool is_interleaved, std::optional<F32Vector> q_norm,
                                 std::optional<F32Vector> k_norm, float eps, int num_threads) {
  const Runtime runtime(isa, num_threads);
  const Batch batch = batch_from(batch_arrays);
  const KVCacheShape& kv = cache.shape();
  const auto tokens = static_cast<size_t>(batch.num_tokens);
  const auto num_heads = static_cast<int>(qkv.shape(1)) / kv.head_dim - 2 * kv.num_kv_heads;
  require(num_heads > 0 && qkv.shape(1) % static_cast<size_t>(kv.head_dim) == 0,
          "qkv: not whole heads");
  require(qkv.shape(0) == tokens && cos_sin.shape(0) == tokens && cos_sin.shape(1) == 2 &&
              cos_sin.shape(2) * 2 <= static_cast<size_t>(kv.head_dim),
          "qkv and cos_sin: wrong shape");
  require(layer >= 0 && layer < kv.num_layers, "layer: outside the KV cache");
  auto out = new_array<float>({tokens, static_cast<size_t>(num_heads * kv.head_dim)});
  const RopeCacheArgs args{.batch = &batch,
                           .kv = cache.layer(layer),
                           .qkv = qkv.data(),
                           .qkv_stride = static_cast<int64_t>(qkv.shape(1)),
                           .q_out = out.data(),
                           .num_heads = num_heads,
                           .rope_dim = static_cast<int>(cos_sin.shape(2)) * 2,
                           .interleaved = is_interleaved,
                           .cos_sin = cos_sin.data(),
                           .q_norm = data_or_null(q_norm),
                           .k_norm = data_or_null(k_norm),
                           .eps = eps};
  const ReleaseGil release;
  run_kernel(runtime.table->rope_and_cache, args, num_threads);
  return out;
}

NumpyArray<float> attention(const std::string& isa, F32Matrix q, nb::handle batch_arrays,
                            KVCache& cache, int layer, float scale, int num_threads) {
  const Runtime runtime(isa, num_threads);
  const Batch batch = batch_from(batch_arrays);
  const KVCacheShape& kv = cache.shape();
  require(runtime.table->has_tiles || !is_tiled(kv.format), "cache: its format needs a tile unit");
  const auto num_heads = static_cast<int>(q.shape(1)) / kv.head_dim;
  require(num_heads > 0 && num_heads % kv.num_kv_heads == 0 &&
              q.shape(1) % static_cast<size_t>(kv.head_dim) == 0 &&
              q.shape(0) == static_cast<size_t>(batch.num_tokens),
          "q: wrong shape");
  require(layer >= 0 && layer < kv.num_layers, "layer: outside the KV cache");
  auto out = new_array<float>({q.shape(0), q.shape(1)});
  AttentionBuffers buffers;
  buffers.max_partials = max_partial_rows(num_heads, kv.num_blocks * kBlockSize);
  const PageMemory partials(
      static_cast<size_t>(buffers.max_partials * partial_stride(kv.head_dim)) * sizeof(float), false);
  const AttentionSchedule schedule =
      make_attention_schedule(batch, num_heads, kv.num_kv_heads, num_threads, buffers);
  const AttentionArgs args{.batch = &batch,
                           .schedule = &schedule,
                           .kv = cache.layer(layer),
                           .q = q.data(),
                           .out = out.data(),
                           .num_heads = num_heads,
                           .scale = scale,
                           .partials = reinterpret_cast<float*>(partials.data())};
  const ReleaseGil release;
  run_kernel(runtime.table->attention, args, num_threads);
  return out;
}

// (sequences, splits) of every task of head 0 whose sequences share blocks.
std::vector<std::tuple<int, int>> shared_attention(nb::handle batch_arrays, int num_heads,
                                                   int num_kv_heads, int num_threads) {
  const Batch batch = batch_from(batch_arrays);
  AttentionBuffers buffers;
  buffers.max_partials = max_partial_rows(num_heads, int64_t{1} << 16);
  make_attention_schedule(batch, num_heads, num_kv_heads, num_threads, buffers);
  std::vector<std::tuple<int, int>> shared;
  for (const AttentionTask& task : buffers.tasks) {
    if (task.is_shared && task.kv_head == 0) {
      shared.emplace_back(task.query_count, task.split_count);
    }
  }
  return shared;
}

SampleResult sample_with(const std::string& isa, MutableArray<float, 2> logits, nb::handle params,
                         int num_threads) {
  return sample(Runtime(isa, num_threads), logits, params);
}

NumpyArray<int32_t> best_allowed_with(const std::string& isa, Array<float, 2> logits,
                                      I32Vector logit_rows, Array<int32_t, 2> mask_words) {
  return best_allowed(Runtime(isa, 1), logits, logit_rows, mask_words);
}

}  // namespace

void bind_testing(nb::module_& m) {
  using namespace nb::literals;
  m.def("linear", linear, "isa"_a, "x"_a, "weight"_a, "num_threads"_a = 1, "prologue"_a = "none",
        "norm_weight"_a = nb::none(), "eps"_a = 0.0f, "residual"_a = nb::none());
  m.def("rms_norm", rms_norm, "isa"_a, "x"_a, "weight"_a, "eps"_a, "num_threads"_a = 1);
  m.def("silu_mul", silu_mul, "isa"_a, "gate_up"_a, "num_threads"_a = 1);
  m.def("embed", embed, "isa"_a, "input_ids"_a, "table"_a, "num_threads"_a = 1);
  m.def("rope_table", rope_table, "isa"_a, "positions"_a, "inv_freq"_a, "attention_factor"_a = 1.0f,
        "num_threads"_a = 1);
  m.def("rope_and_cache", rope_and_cache, "isa"_a, "qkv"_a, "batch"_a, "cos_sin"_a, "cache"_a,
        "layer"_a = 0, "is_interleaved"_a = false, "q_norm"_a = nb::none(), "k_norm"_a = nb::none(),
        "eps"_a = 0.0f, "num_threads"_a = 1);
  m.def("attention", attention, "isa"_a, "q"_a, "batch"_a, "cache"_a, "layer"_a = 0, "scale"_a = 1.0f,
        "num_threads"_a = 1);
  m.def("shared_attention", shared_attention, "batch"_a, "num_heads"_a, "num_kv_heads"_a,
        "num_threads"_a = 1);
  m.def("sample", sample_with, "isa"_a, "logits"_a, "params"_a, "num_threads"_a = 1);
  m.def("best_allowed", best_allowed_with, "isa"_a, "logits"_a, "logit_rows"_a, "mask_words"_a);
  m.def("num_pool_threads", num_pool_threads);
}

}  // namespace caudal
