// A recorded forward pass: kernels, arguments and activation memory, replayed once per step.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <variant>
#include <vector>

#include "attention_schedule.h"
#include "kv_cache.h"
#include "runtime.h"

namespace caudal {

// What is fixed about a model besides its weights.
struct PlanShape {
  int num_heads;
  float attention_scale;
  std::vector<float> inv_freq;  // [rope_dim / 2]
  bool is_interleaved;
  float rope_attention_factor;
  int64_t vocab_size;
  int max_num_tokens;
  int max_num_seqs;
  int max_num_logits;
};

// An activation: float32 [rows, features] at a place in the arena. Rows are the step's tokens, or
// its logits rows after select_logits. Buffers may overlap where their lifetimes do not.
struct Buffer {
  int64_t offset;  // bytes, a multiple of 64
  int64_t features;
  bool is_logits;
};

struct RmsNorm {
  std::vector<float> weight;
  float eps;
};

enum class OpKind : int { kEmbed, kRmsNorm, kLinear, kRope, kAttention, kSiluMul, kSelect, kCount };

// What ends a run early: `*signal`, which another process may write, differs from `expected`.
struct Interrupt {
  const uint32_t* signal = nullptr;  // null: nothing does
  uint32_t expected = 0;
};

struct SelectArgs {
  const Batch* batch;
  const float* x;
  int64_t cols;
  float* out;
};

class Plan {
 public:
  // Throws std::invalid_argument if the shape contradicts itself or the cache.
  Plan(std::shared_ptr<Runtime> runtime, std::shared_ptr<KVCache> cache, PlanShape shape,
       int64_t arena_bytes);
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // Recording, in the order of execution. Buffers are referred to by the number that add_buffer
  // gave; -1 is none. Weights must stay alive as long as the plan. All throw std::invalid_argument
  // if shapes do not fit.
  int add_buffer(const Buffer& buffer);
  void add_embed(const LinearWeight& table, int out);
  void add_rms_norm(int x, const RmsNorm& norm, int out);
  // x is normalised (norm) or gated (is_gated: x holds gate, up) before the product.
  void add_linear(int x, const LinearWeight& weight, int out, const RmsNorm* norm, bool is_gated,
                  int residual);
  void add_rope_and_cache(int qkv, int layer, const RmsNorm* q_norm, const RmsNorm* k_norm, int out);
  void add_attention(int q, int layer, int out);
  void add_silu_mul(int gate_up, int out);
  void add_select(int x, int out);
  void finish(int logits);

  // Run one step. False if `interrupt` ended it between two ops: there are no logits then, and
  // the step's slots of the KV cache hold anything. Throws std::invalid_argument if the batch does
  // not fit the plan, contradicts itself or refers to tokens, positions, slots or blocks that do not
  // exist.
  bool run(const Batch& batch, Interrupt interrupt);

  const float* logits() const { return logits_; }
  int64_t logits_cols() const { return logits_cols_; }
  const PlanShape& shape() const { return shape_; }

  // Seconds that the first thread spent in each kind of op since the plan was made, waiting for
  // the others included.
  const std::array<double, static_cast<size_t>(OpKind::kCount)>& op_seconds() const {
    return op_seconds_;
  }

 private:
  using Args = std::variant<EmbedArgs, RmsNormArgs, LinearArgs, RopeTableArgs, RopeCacheArgs,
                            AttentionArgs, SiluMulArgs, SelectArgs>;
  struct Op {
    OpKind kind;
    bool is_logits;
    Args args;
  };

  const Buffer& buffer(int id) const;
  float* data(int id) const;
  const Buffer& expect(int id, int64_t features, bool is_logits) const;
  void add(OpKind kind, bool is_logits, Args args);
  bool can_join_gates(const float* gate_up, const LinearWeight& reader) const;
  void check_layer(int layer) const;
  void ensure_rope_table();
  void check_batch(const Batch& batch) const;
  void check_sequence(const Batch& batch, int seq) const;
  void set_num_rows();
  static void run_ops(void* plan, Worker& worker);
  void run_op(const Op& op, Worker& worker);
  bool is_due() const;

  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<KVCache> cache_;
  PlanShape shape_;
  PageMemory arena_;
  PageMemory panels_;
  PageMemory cos_sin_;
  PageMemory partials_;
  std::vector<Buffer> buffers_;
  std::vector<Op> ops_;
  int64_t panel_cols_ = 0;
  float* logits_ = nullptr;
  int64_t logits_cols_ = 0;

  // State of the step that runs.
  Batch batch_{};
  AttentionBuffers attention_buffers_;
  AttentionSchedule schedule_{};
  Interrupt interrupt_;
  // Ops from this one on are left out. Set by worker 0 before the barrier in front of that op, so
  // all workers leave at the same one.
  std::atomic<size_t> end_{0};
  std::array<uint64_t, static_cast<size_t>(OpKind::kCount)> op_ticks_{};
  std::array<double, static_cast<size_t>(OpKind::kCount)> op_seconds_{};
};

}  // namespace caudal
