#include "plan.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace caudal {
namespace {

using Clock = std::chrono::steady_clock;

uint64_t read_ticks() {
#if defined(__x86_64__)
  return __rdtsc();
#else
  return static_cast<uint64_t>(Clock::now().time_since_epoch().count());
#endif
}

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

void require_in_range(int64_t value, int64_t end, const char* name, int64_t index) {
  if (value < 0 || value >= end) {
    throw std::invalid_argument(std::string(name) + "[" + std::to_string(index) + "] is " +
                                std::to_string(value) + ", not in 0 … " + std::to_string(end - 1));
  }
}

void select_rows(const SelectArgs& args, Worker& worker) {
  const Batch& batch = *args.batch;
  for (int64_t i = next_task(worker); i < batch.num_logits; i = next_task(worker)) {
    std::memcpy(args.out + i * args.cols, args.x + batch.logits_indices[i] * args.cols,
                static_cast<size_t>(args.cols) * sizeof(float));
  }
}

template <class... Visitors>
struct Overloaded : Visitors... {
  using Visitors::operator()...;
};
template <class... Visitors>
Overloaded(Visitors...) -> Overloaded<Visitors...>;

}  // namespace

Plan::Plan(std::shared_ptr<Runtime> runtime, std::shared_ptr<KVCache> cache, PlanShape shape,
           int64_t arena_bytes)
    : runtime_(std::move(runtime)), cache_(std::move(cache)), shape_(std::move(shape)) {
  const KVCacheShape& kv = cache_->shape();
  const auto rope_dim = static_cast<int64_t>(shape_.inv_freq.size()) * 2;
  require(shape_.num_heads > 0 && shape_.num_heads % kv.num_kv_heads == 0,
          "num_heads must be a multiple of num_kv_heads");
  require(rope_dim > 0 && rope_dim <= kv.head_dim, "rope_dim must be within head_dim");
  require(shape_.max_num_tokens > 0 && shape_.max_num_seqs > 0 && shape_.max_num_logits > 0,
          "the plan's capacities must be above 0");
  require(runtime_->table->has_tiles || !is_tiled(kv.format),
          "the KV cache's format needs a tile unit");
  require(arena_bytes >= 0, "arena_bytes must not be negative");
  const auto tokens = static_cast<size_t>(shape_.max_num_tokens);
  arena_ = PageMemory(static_cast<size_t>(arena_bytes), true);
  cos_sin_ = PageMemory(tokens * static_cast<size_t>(rope_dim) * sizeof(float), false);
  const int64_t rows = max_partial_rows(shape_.num_heads, kv.num_blocks * kBlockSize);
  attention_buffers_.max_partials = rows;
  partials_ = PageMemory(static_cast<size_t>(rows * partial_stride(kv.head_dim)) * sizeof(float), false);
}

int Plan::add_buffer(const Buffer& buffer) {
  const int64_t rows = buffer.is_logits ? shape_.max_num_logits : shape_.max_num_tokens;
  require(buffer.features > 0 && buffer.features <= (int64_t{1} << 31), "buffer: bad features");
  require(buffer.offset >= 0 && buffer.offset % 64 == 0, "buffer: offset must be a multiple of 64");
  require(buffer.offset + rows * buffer.features * 4 <= static_cast<int64_t>(arena_.size()),
          "buffer: outside the arena");
  buffers_.push_back(buffer);
  return static_cast<int>(buffers_.size()) - 1;
}

const Buffer& Plan::buffer(int id) const {
  require(id >= 0 && static_cast<size_t>(id) < buffers_.size(), "unknown buffer");
  return buffers_[static_cast<size_t>(id)];
}

float* Plan::data(int id) const {
  return id < 0 ? nullptr : reinterpret_cast<float*>(arena_.data() + buffer(id).offset);
}

const Buffer& Plan::expect(int id, int64_t features, bool is_logits) const {
  const Buffer& b = buffer(id);
  require(b.features == features, "a buffer has " + std::to_string(b.features) +
                                      " features where " + std::to_string(features) + " are needed");
  require(b.is_logits == is_logits, "a buffer of tokens meets one of logits rows");
  return b;
}

void Plan::add(OpKind kind, bool is_logits, Args args) {
  ops_.push_back({.kind = kind, .is_logits = is_logits, .args = args});
}

void Plan::check_layer(int layer) const {
  require(layer >= 0 && layer < cache_->shape().num_layers, "layer is outside the KV cache");
}

void Plan::add_embed(const LinearWeight& table, int out) {
  require(table.segments.size() == 1, "an embedding table must be of a single format");
  require(table.rows >= shape_.vocab_size, "the embedding table has fewer rows than the vocabulary");
  expect(out, table.cols, false);
  add(OpKind::kEmbed, false,
      EmbedArgs{.batch = &batch_,
                .table = table.segments[0],
                .out = data(out),
                .out_stride = table.cols});
}

void Plan::add_rms_norm(int x, const RmsNorm& norm, int out) {
  const Buffer& in = buffer(x);
  const auto cols = static_cast<int64_t>(norm.weight.size());
  expect(x, cols, in.is_logits);
  expect(out, cols, in.is_logits);
  add(OpKind::kRmsNorm, in.is_logits,
      RmsNormArgs{.x = data(x),
                  .x_stride = cols,
                  .num_tokens = 0,
                  .cols = static_cast<int>(cols),
                  .weight = norm.weight.data(),
                  .eps = norm.eps,
                  .out = data(out),
                  .out_stride = cols});
}

// Whether the op that makes `gate_up`, the last one, can write silu(gate) * up itself, as `reader` wants
// it.
bool Plan::can_join_gates(const float* gate_up, const LinearWeight& reader) const {
  const auto* args = ops_.empty() ? nullptr : std::get_if<LinearArgs>(&ops_.back().args);
  if (args == nullptr || args->out != gate_up || !runtime_->table->has_gates) return false;
  const auto has_bf16_panels = [](const PackedMatrix* segments, size_t count, Activations activations) {
    return count == 1 && activations == Activations::kBf16 &&
           (segments->format == WeightFormat::kW4 || segments->format == WeightFormat::kW8);
  };
  return args->bias == nullptr && args->residual == nullptr && reader.cols % 32 == 0 &&
         has_bf16_panels(args->segments, static_cast<size_t>(args->num_segments), args->activations) &&
         has_bf16_panels(reader.segments.data(), reader.segments.size(), reader.activations);
}

void Plan::add_linear(int x, const LinearWeight& weight, int out, const RmsNorm* norm,
                      bool is_gated, int residual) {
  const Buffer& in = buffer(x);
  require(norm == nullptr || !is_gated, "a linear op has one prologue at most");
  require(norm == nullptr || static_cast<int64_t>(norm->weight.size()) == weight.cols,
          "the norm's weight differs in size from the linear's columns");
  expect(x, is_gated ? 2 * weight.cols : weight.cols, in.is_logits);
  expect(out, weight.rows, in.is_logits);
  if (residual >= 0) expect(residual, weight.rows, in.is_logits);
  if (weight.cols > panel_cols_) panel_cols_ = weight.cols;
  const bool is_joined = is_gated && can_join_gates(data(x), weight);
  if (is_joined) {
    auto& gates = std::get<LinearArgs>(ops_.back().args);
    gates.gate_rows = weight.cols;
    gates.gate_reader = weight.segments[0].format;
  }
  const Prologue prologue = norm != nullptr ? Prologue::kRmsNorm
                            : is_joined     ? Prologue::kPanels
                            : is_gated      ? Prologue::kSiluMul
                                            : Prologue::kNone;
  add(OpKind::kLinear, in.is_logits,
      LinearArgs{.x = data(x),
                 .x_stride = in.features,
                 .num_tokens = 0,
                 .prologue = prologue,
                 .norm_weight = norm != nullptr ? norm->weight.data() : nullptr,
                 .eps = norm != nullptr ? norm->eps : 0.0f,
                 .segments = weight.segments.data(),
                 .num_segments = static_cast<int>(weight.segments.size()),
                 .bias = weight.bias.empty() ? nullptr : weight.bias.data(),
                 .residual = data(residual),
                 .out = data(out),
                 .out_stride = weight.rows,
                 .panels = nullptr,
                 .activations = weight.activations,
                 .gate_rows = 0,
                 .gate_reader = {}});
}

// The table of the step's cos and sin, once before the first op that reads it.
void Plan::ensure_rope_table() {
  for (const Op& op : ops_) {
    if (std::holds_alternative<RopeTableArgs>(op.args)) return;
  }
  add(OpKind::kRope, false,
      RopeTableArgs{.batch = &batch_,
                    .inv_freq = shape_.inv_freq.data(),
                    .rope_dim = static_cast<int>(shape_.inv_freq.size()) * 2,
                    .attention_factor = shape_.rope_attention_factor,
                    .cos_sin = reinterpret_cast<float*>(cos_sin_.data())});
}

void Plan::add_rope_and_cache(int qkv, int layer, const RmsNorm* q_norm, const RmsNorm* k_norm,
                              int out) {
  check_layer(layer);
  const KVCacheShape& kv = cache_->shape();
  const int64_t q_features = int64_t{shape_.num_heads} * kv.head_dim;
  const int64_t qkv_features = q_features + int64_t{2} * kv.num_kv_heads * kv.head_dim;
  for (const RmsNorm* norm : {q_norm, k_norm}) {
    require(norm == nullptr || norm->weight.size() == static_cast<size_t>(kv.head_dim),
            "q_norm and k_norm need head_dim values");
  }
  require(q_norm == nullptr || k_norm == nullptr || q_norm->eps == k_norm->eps,
          "q_norm and k_norm must share eps");
  expect(qkv, qkv_features, false);
  expect(out, q_features, false);
  ensure_rope_table();
  const RmsNorm* any_norm = q_norm != nullptr ? q_norm : k_norm;
  add(OpKind::kRope, false,
      RopeCacheArgs{.batch = &batch_,
                    .kv = cache_->layer(layer),
                    .qkv = data(qkv),
                    .qkv_stride = qkv_features,
                    .q_out = data(out),
                    .num_heads = shape_.num_heads,
                    .rope_dim = static_cast<int>(shape_.inv_freq.size()) * 2,
                    .interleaved = shape_.is_interleaved,
                    .cos_sin = reinterpret_cast<const float*>(cos_sin_.data()),
                    .q_norm = q_norm != nullptr ? q_norm->weight.data() : nullptr,
                    .k_norm = k_norm != nullptr ? k_norm->weight.data() : nullptr,
                    .eps = any_norm != nullptr ? any_norm->eps : 0.0f});
}

void Plan::add_attention(int q, int layer, int out) {
  check_layer(layer);
  const int64_t features = int64_t{shape_.num_heads} * cache_->shape().head_dim;
  expect(q, features, false);
  expect(out, features, false);
  add(OpKind::kAttention, false,
      AttentionArgs{.batch = &batch_,
                    .schedule = &schedule_,
                    .kv = cache_->layer(layer),
                    .q = data(q),
                    .out = data(out),
                    .num_heads = shape_.num_heads,
                    .scale = shape_.attention_scale,
                    .partials = reinterpret_cast<float*>(partials_.data())});
}

void Plan::add_silu_mul(int gate_up, int out) {
  const Buffer& in = buffer(gate_up);
  expect(out, in.features / 2, in.is_logits);
  add(OpKind::kSiluMul, in.is_logits,
      SiluMulArgs{.gate_up = data(gate_up),
                  .num_tokens = 0,
                  .cols = static_cast<int>(in.features / 2),
                  .out = data(out)});
}

void Plan::add_select(int x, int out) {
  const Buffer& in = buffer(x);
  expect(x, in.features, false);
  expect(out, in.features, true);
  add(OpKind::kSelect, true,
      SelectArgs{.batch = &batch_, .x = data(x), .cols = in.features, .out = data(out)});
}

void Plan::finish(int logits) {
  expect(logits, buffer(logits).features, true);
  logits_ = data(logits);
  logits_cols_ = buffer(logits).features;
  const int64_t rows = std::max(shape_.max_num_tokens, shape_.max_num_logits);
  const int64_t blocks = (rows + 63) / 64 * 64 * (panel_cols_ / 32);
  panels_ = PageMemory(static_cast<size_t>(blocks * kPanelBytesPerBlock), true);
  for (Op& op : ops_) {
    if (auto* args = std::get_if<LinearArgs>(&op.args)) args->panels = panels_.data();
  }
}

void Plan::check_sequence(const Batch& batch, int seq) const {
  const int begin = batch.query_start_loc[seq];
  const int end = batch.query_start_loc[seq + 1];
  require(begin < end && end <= batch.num_tokens, "query_start_loc must increase to num_tokens");
  const int seq_len = batch.seq_lens[seq];
  require(seq_len >= end - begin, "seq_lens: a sequence is shorter than its tokens of this step");
  const int64_t num_blocks = (int64_t{seq_len} + kBlockSize - 1) / kBlockSize;
  require(num_blocks <= batch.block_table_cols, "block_tables: a row is shorter than its sequence");
  const int32_t* table = batch.block_tables + seq * batch.block_table_stride;
  for (int64_t i = 0; i < num_blocks; ++i) {
    require_in_range(table[i], cache_->shape().num_blocks, "block_tables", i);
  }
  for (int t = begin; t < end; ++t) require_in_range(batch.positions[t], seq_len, "positions", t);
}

// Everything that a kernel uses as an index. Cheap: a few compares per token and block.
void Plan::check_batch(const Batch& batch) const {
  require(logits_ != nullptr, "the plan is not finished");
  require(batch.num_tokens >= 1 && batch.num_tokens <= shape_.max_num_tokens,
          "the batch has " + std::to_string(batch.num_tokens) + " tokens, the plan holds 1 to " +
              std::to_string(shape_.max_num_tokens));
  require(batch.num_seqs >= 1 && batch.num_seqs <= shape_.max_num_seqs,
          "the batch has " + std::to_string(batch.num_seqs) + " sequences, the plan holds 1 to " +
              std::to_string(shape_.max_num_seqs));
  require(batch.num_logits <= shape_.max_num_logits,
          "the batch wants " + std::to_string(batch.num_logits) + " rows of logits, the plan holds " +
              std::to_string(shape_.max_num_logits));
  require(batch.query_start_loc[0] == 0, "query_start_loc must start at 0");
  for (int i = 0; i < batch.num_seqs; ++i) check_sequence(batch, i);
  require(batch.query_start_loc[batch.num_seqs] == batch.num_tokens,
          "query_start_loc must end at num_tokens");
  const int64_t num_slots = cache_->shape().num_blocks * kBlockSize;
  for (int t = 0; t < batch.num_tokens; ++t) {
    require_in_range(batch.input_ids[t], shape_.vocab_size, "input_ids", t);
    require_in_range(batch.slot_mapping[t], num_slots, "slot_mapping", t);
  }
  for (int i = 0; i < batch.num_logits; ++i) {
    require_in_range(batch.logits_indices[i], batch.num_tokens, "logits_indices", i);
  }
}

void Plan::set_num_rows() {
  for (Op& op : ops_) {
    const int rows = op.is_logits ? batch_.num_logits : batch_.num_tokens;
    std::visit(
        [rows](auto& args) {
          if constexpr (requires { args.num_tokens; }) args.num_tokens = rows;
        },
        op.args);
  }
}

bool Plan::run(const Batch& batch, Interrupt interrupt) {
  check_batch(batch);
  batch_ = batch;
  interrupt_ = interrupt;
  end_.store(ops_.size(), std::memory_order_relaxed);
  set_num_rows();
  schedule_ = make_attention_schedule(batch_, shape_.num_heads, cache_->shape().num_kv_heads,
                                      runtime_->num_threads, attention_buffers_);
  op_ticks_ = {};
  const auto start = Clock::now();
  const uint64_t start_ticks = read_ticks();
  run_parallel(runtime_->num_threads, run_ops, this);
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  const auto ticks = static_cast<double>(read_ticks() - start_ticks);
  for (size_t kind = 0; kind < op_ticks_.size(); ++kind) {
    op_seconds_[kind] += static_cast<double>(op_ticks_[kind]) / ticks * seconds;
  }
  return end_.load(std::memory_order_relaxed) == ops_.size();
}

bool Plan::is_due() const {
  if (interrupt_.signal == nullptr) return false;
  return __atomic_load_n(interrupt_.signal, __ATOMIC_RELAXED) != interrupt_.expected;
}

void Plan::run_ops(void* plan, Worker& worker) {
  Plan& self = *static_cast<Plan*>(plan);
  const Op* previous = nullptr;
  uint64_t start = read_ticks();
  const auto count_ticks = [&] {
    if (worker.index != 0) return;
    const uint64_t now = read_ticks();
    self.op_ticks_[static_cast<size_t>(previous->kind)] += now - start;
    start = now;
  };
  for (size_t i = 0; i < self.ops_.size(); ++i) {
    const Op& op = self.ops_[i];
    if (op.is_logits && self.batch_.num_logits == 0) continue;
    if (previous != nullptr) {
      if (worker.index == 0 && self.is_due()) self.end_.store(i, std::memory_order_relaxed);
      barrier(worker);
      count_ticks();
      // An end further on is that of a faster worker 0, already at the next barrier.
      if (self.end_.load(std::memory_order_relaxed) <= i) return;
    }
    previous = &op;
    self.run_op(op, worker);
  }
  count_ticks();
}

void Plan::run_op(const Op& op, Worker& worker) {
  const KernelTable& table = *runtime_->table;
  std::visit(Overloaded{
                 [&](const EmbedArgs& args) { table.embed(args, worker); },
                 [&](const RmsNormArgs& args) { table.rms_norm(args, worker); },
                 [&](const LinearArgs& args) { table.linear(args, worker); },
                 [&](const RopeTableArgs& args) { table.rope_table(args, worker); },
                 [&](const RopeCacheArgs& args) { table.rope_and_cache(args, worker); },
                 [&](const AttentionArgs& args) { table.attention(args, worker); },
                 [&](const SiluMulArgs& args) { table.silu_mul(args, worker); },
                 [&](const SelectArgs& args) { select_rows(args, worker); },
             },
             op.args);
}

}  // namespace caudal
