// Timing loops for `caudal bench kernels`: many calls inside one parallel region, each timed alone.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>

#include "attention_schedule.h"
#include "bindings.h"
#include "kv_cache.h"
#include "peaks.h"

namespace caudal {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::vector<double>;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Calls `step(i, worker)` on all threads for i = 0, 1, … until `budget` seconds are over, but at
// least `min_calls` times; returns each call's duration, barriers included.
template <class Step>
Seconds time_steps(int num_threads, double budget, size_t min_calls, Step step) {
  struct Shared {
    Step* step;
    double budget;
    size_t min_calls;
    std::atomic<bool> stop{false};
    Seconds times;
  } shared{&step, budget, min_calls, false, {}};
  run_parallel(
      num_threads,
      [](void* context, Worker& worker) {
        Shared& s = *static_cast<Shared*>(context);
        const Clock::time_point begin = Clock::now();
        for (size_t i = 0; !s.stop.load(); ++i) {
          barrier(worker);
          // All threads are here; none begins before the first one has read the clock.
          const Clock::time_point start = Clock::now();
          barrier(worker);
          (*s.step)(i, worker);
          barrier(worker);
          if (worker.index == 0) {
            s.times.push_back(seconds_since(start));
            if (i + 1 >= s.min_calls && seconds_since(begin) > s.budget) s.stop.store(true);
          }
          barrier(worker);
        }
      },
      &shared);
  return std::move(shared.times);
}

const PeakTable& peak_table(const std::string& isa) {
  const std::string name = select_table(isa).name;
#if defined(CAUDAL_X86)
  for (const PeakTable* table :
       {&amx::kPeaks, &avx512vnni::kPeaks, &avxvnni::kPeaks, &avx2::kPeaks}) {
    if (table->name == name) return *table;
  }
#endif
  return ref::kPeaks;
}

double best(const Seconds& times) {
  double least = times.front();
  for (double t : times) least = t < least ? t : least;
  return least;
}

double peak_ops(int64_t (*loop)(int64_t), int num_threads, double budget) {
  constexpr int64_t kIterations = 20000;
  std::atomic<int64_t> ops{0};
  const Seconds times = time_steps(num_threads, budget, 3, [&](size_t, Worker& worker) {
    const int64_t done = loop(kIterations);
    if (worker.index == 0) ops.store(done);
  });
  return static_cast<double>(ops.load()) * num_threads / best(times);
}

double peak_read(const PeakTable& table, const PageMemory& memory, int num_threads, double budget) {
  constexpr int64_t kTaskBytes = 256 * 1024;
  const auto num_tasks = static_cast<int64_t>(memory.size()) / kTaskBytes;
  double rate = 0;
  for (int64_t prefetch_bytes : {0, 1024, 4096}) {
    const Seconds times = time_steps(num_threads, budget / 3, 2, [&](size_t, Worker& worker) {
      for (int64_t t = next_task(worker); t < num_tasks; t = next_task(worker)) {
        table.read(memory.data() + t * kTaskBytes, kTaskBytes, prefetch_bytes);
      }
    });
    const double r = static_cast<double>(num_tasks * kTaskBytes) / best(times);
    rate = r > rate ? r : rate;
  }
  return rate;
}

// Peak rates per second of all threads together: operations, and bytes read from a buffer of
// `read_bytes`.
std::map<std::string, double> peaks(const std::string& isa, int num_threads, double budget,
                                    size_t read_bytes) {
  const Runtime runtime(isa, num_threads);
  const PeakTable& table = peak_table(isa);
  const ReleaseGil release;
  PageMemory memory(read_bytes, true);
  std::memset(memory.data(), 1, memory.size());
  return {{"int8_ops", peak_ops(table.int8_dot, num_threads, budget)},
          {"fp32_ops", peak_ops(table.fp32_fma, num_threads, budget)},
          {"read_bytes", peak_read(table, memory, num_threads, budget)}};
}

WeightFormat format_of(const std::string& name) {
  if (name == "w4" || name == "w4 wide" || name == "w4 bf16") return WeightFormat::kW4;
  if (name == "w8" || name == "w8 bf16") return WeightFormat::kW8;
  if (name == "f16") return WeightFormat::kF16;
  if (name == "f32") return WeightFormat::kF32;
  throw std::invalid_argument("format must be w4, w4 wide, w4 bf16, w8, w8 bf16, f16 or f32");
}

// Ordinary numbers in every format: halves of about 0.005, floats of about 0.1.
void fill_weights(std::byte* data, size_t bytes, WeightFormat format) {
  const auto block = static_cast<size_t>(block_bytes(format));
  std::vector<std::byte> pattern(block);
  uint32_t state = 1;
  for (size_t i = 0; i < block; ++i) {
    state = state * 1664525u + 1013904223u;
    pattern[i] = static_cast<std::byte>(state >> 24);
  }
  const bool is_quantised = format == WeightFormat::kW4 || format == WeightFormat::kW8;
  const size_t scales = format == WeightFormat::kW4 ? 256 : is_quantised ? 512 : 0;
  for (size_t i = scales; i < block; i += 2) {
    const bool is_high = format != WeightFormat::kF32 || i % 4 == 2;
    const uint16_t half = is_quantised ? 0x1d00 : is_high ? 0x3dcc : 0;
    std::memcpy(&pattern[i], &half, 2);
  }
  for (size_t i = 0; i + block <= bytes; i += block) std::memcpy(data + i, pattern.data(), block);
}

// Seconds of each call of a [rows, cols] linear, over copies of the matrix that fill `pool_bytes`.
Seconds time_linear(const std::string& isa, const std::string& format_name, int64_t rows,
                    int64_t cols, int num_tokens, int num_threads, size_t pool_bytes,
                    double budget) {
  const Runtime runtime(isa, num_threads);
  require(rows > 0 && cols > 0 && cols % 32 == 0, "cols: a positive multiple of 32 is needed");
  require(num_tokens > 0, "num_tokens must be positive");
  const WeightFormat format = format_of(format_name);
  const Activations activations = format_name.ends_with("bf16")   ? Activations::kBf16
                                  : format_name.ends_with("wide") ? Activations::kInt12
                                                                  : Activations::kInt8;
  require(runtime.table->has_bf16 || activations != Activations::kBf16,
          "these kernels do not multiply bf16");
  const ReleaseGil release;
  const auto matrix_bytes = static_cast<size_t>(packed_bytes(format, rows, cols));
  const size_t copies = pool_bytes > matrix_bytes ? pool_bytes / matrix_bytes : 1;
  const PageMemory weights(copies * matrix_bytes, true);
  for (size_t i = 0; i < copies; ++i) {
    fill_weights(weights.data() + i * matrix_bytes, matrix_bytes, format);
  }
  const auto tokens = static_cast<size_t>(num_tokens);
  std::vector<float> x(tokens * static_cast<size_t>(cols));
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i % 10007));
  std::vector<float> out(tokens * static_cast<size_t>(rows));
  const size_t blocks = (tokens + 63) / 64 * 64 * static_cast<size_t>(cols / 32);
  const PageMemory panels(blocks * static_cast<size_t>(kPanelBytesPerBlock), false);
  std::vector<PackedMatrix> matrices(copies);
  std::vector<LinearArgs> calls(copies);
  for (size_t i = 0; i < copies; ++i) {
    matrices[i] = {format, rows, cols, weights.data() + i * matrix_bytes, 3};
    calls[i] = {.x = x.data(),
                .x_stride = cols,
                .num_tokens = num_tokens,
                .prologue = Prologue::kNone,
                .norm_weight = nullptr,
                .eps = 0.0f,
                .segments = &matrices[i],
                .num_segments = 1,
                .bias = nullptr,
                .residual = nullptr,
                .out = out.data(),
                .out_stride = rows,
                .panels = panels.data(),
                .activations = activations,
                .gate_rows = 0,
                .gate_reader = {}};
  }
  return time_steps(num_threads, budget, 5, [&](size_t i, Worker& worker) {
    runtime.table->linear(calls[i % copies], worker);
  });
}

// Seconds of each call of one layer's attention.
Seconds time_attention(const std::string& isa, F32Matrix q, nb::handle batch_arrays, KVCache& cache,
                       int num_threads, double budget) {
  const Runtime runtime(isa, num_threads);
  const Batch batch = batch_from(batch_arrays);
  const KVCacheShape& kv = cache.shape();
  require(runtime.table->has_tiles || !is_tiled(kv.format), "cache: its format needs a tile unit");
  const auto num_heads = static_cast<int>(q.shape(1)) / kv.head_dim;
  require(num_heads > 0 && num_heads % kv.num_kv_heads == 0 &&
              q.shape(0) == static_cast<size_t>(batch.num_tokens),
          "q: wrong shape");
  std::vector<float> out(q.size());
  AttentionBuffers buffers;
  buffers.max_partials = max_partial_rows(num_heads, kv.num_blocks * kBlockSize);
  const auto partial_values =
      static_cast<size_t>(buffers.max_partials * partial_stride(kv.head_dim));
  const PageMemory partials(partial_values * sizeof(float), false);
  const AttentionSchedule schedule =
      make_attention_schedule(batch, num_heads, kv.num_kv_heads, num_threads, buffers);
  const ReleaseGil release;
  return time_steps(num_threads, budget, 5, [&](size_t i, Worker& worker) {
    const AttentionArgs args{
        .batch = &batch,
        .schedule = &schedule,
        .kv = cache.layer(static_cast<int>(i % static_cast<size_t>(kv.num_layers))),
        .q = q.data(),
        .out = out.data(),
        .num_heads = num_heads,
        .scale = 1.0f / std::sqrt(static_cast<float>(kv.head_dim)),
        .partials = reinterpret_cast<float*>(partials.data())};
    runtime.table->attention(args, worker);
  });
}

}  // namespace

void bind_bench(nb::module_& m) {
  using namespace nb::literals;
  m.def("peaks", peaks, "isa"_a, "num_threads"_a, "budget"_a, "read_bytes"_a);
  m.def("linear", time_linear, "isa"_a, "format"_a, "rows"_a, "cols"_a, "num_tokens"_a,
        "num_threads"_a, "pool_bytes"_a, "budget"_a);
  m.def("attention", time_attention, "isa"_a, "q"_a, "batch"_a, "cache"_a, "num_threads"_a,
        "budget"_a);
}

}  // namespace caudal
