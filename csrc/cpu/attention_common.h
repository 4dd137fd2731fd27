// What all attention kernels share: the view of the cache, query rounding, the merge of splits.
//
// Included by object files with different ISA flags after their simd_*.h; nothing is shared.
#pragma once

#include "attention_schedule.h"
#include "kernels.h"
#include "numerics.h"

namespace caudal {
namespace {

constexpr int kMaxHeadDim = 256;
constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.44269504f;

inline int min_int(int a, int b) { return a < b ? a : b; }
inline int max_int(int a, int b) { return a > b ? a : b; }

// One task's view of the cache.
struct Context {
  const std::byte* head;  // of block 0
  const int32_t* block_table;
  int64_t block_stride;
  int num_tokens;  // seen by the last query of the task; of a shared one, at its end

  Context(const AttentionArgs& args, const AttentionTask& task)
      : head(args.kv.base + task.kv_head * args.kv.head_stride),
        block_table(args.batch->block_tables + task.seq * args.batch->block_table_stride),
        block_stride(args.kv.block_stride),
        num_tokens(task.is_shared
                       ? (task.split_begin + task.split_count) * kSplitTokens
                       : args.batch->seq_lens[task.seq] - args.batch->query_start_loc[task.seq + 1] +
                             task.query_begin + task.query_count) {}

  // Keys that a row of the task sees, from position 0.
  int num_visible(const AttentionTask& task, int row, int group) const {
    return task.is_shared ? num_tokens : num_tokens - task.query_count + 1 + row / group;
  }

  // Block number `index` of the sequence.
  const std::byte* block(int index) const { return head + block_table[index] * block_stride; }
};

// int16 up to quant_max with one scale, which takes in the softmax scale.
inline float quantize_query(const float* q, int head_dim, float scale, float quant_max,
                            int16_t* out) {
  F32 largest = F32::zero();
  for (int d = 0; d < head_dim; d += kLanes) {
    largest = F32::max_bits(largest, F32::abs(F32::load(q + d)));
  }
  const QuantScale s =
      quant_scale(__builtin_bit_cast(uint32_t, largest.max_lane_bits()), quant_max);
  const F32 factor = F32::set1(s.inverse);
  for (int d = 0; d < head_dim; d += kLanes) store_int16(F32::load(q + d) * factor, out + d);
  return s.d * scale;
}

// acc and total are merged as the next split after total: (max, sum) of each.
inline void merge_split(float* total, float& total_max, float& total_sum, const float* acc,
                        float max, float sum, int head_dim) {
  const float m = total_max > max ? total_max : max;
  alignas(64) float factor[kLanes] = {total_max - m, max - m};
  exp2_approx(F32::load(factor)).store(factor);
  const F32 a = F32::set1(factor[0]);
  const F32 b = F32::set1(factor[1]);
  for (int d = 0; d < head_dim; d += kLanes) {
    F32::fma(F32::load(acc + d), b, F32::load(total + d) * a).store(total + d);
  }
  total_max = m;
  total_sum = __builtin_fmaf(sum, factor[1], total_sum * factor[0]);
}

inline void write_output(const float* total, float sum, int head_dim, float* out) {
  const F32 inverse = F32::set1(1.0f / sum);
  for (int d = 0; d < head_dim; d += kLanes) (F32::load(total + d) * inverse).store(out + d);
}

// Merges the partial rows of one (sequence, head, queries).
inline void merge_partials(const AttentionArgs& args, const AttentionTask& task, Worker& worker) {
  const int head_dim = args.kv.head_dim;
  const int group = args.num_heads / args.kv.num_kv_heads;
  const int num_rows = task.query_count * group;
  const Context context(args, task);
  auto* total = reinterpret_cast<float*>(worker.scratch);
  for (int r = 0; r < num_rows; ++r) {
    const int visible = context.num_visible(task, r, group);
    const int64_t head = task.kv_head * group + r % group;
    float* out =
        args.out + ((task.query_begin + r / group) * int64_t{args.num_heads} + head) * head_dim;
    if (visible <= 0) {
      __builtin_memset(out, 0, head_dim * sizeof(float));
      continue;
    }
    const float* first = args.partials + (task.partial + r) * partial_stride(head_dim);
    float max = first[head_dim];
    float sum = first[head_dim + 1];
    __builtin_memcpy(total, first, head_dim * sizeof(float));
    for (int split = 1; split * kSplitTokens < visible; ++split) {
      const float* partial = first + split * task.partial_step * partial_stride(head_dim);
      merge_split(total, max, sum, partial, partial[head_dim], partial[head_dim + 1], head_dim);
    }
    write_output(total, sum, head_dim, out);
  }
}

// Runs the tasks that this thread claims, run(task, next), then merges. `next` is what the thread
// does afterwards, known early where the task has few rows, so that its first keys are on their way
// when this task ends; else null.
template <class Run>
inline void run_tasks(const AttentionArgs& args, Worker& worker, const Run& run) {
  constexpr int kFewRows = 16;
  const AttentionSchedule& schedule = *args.schedule;
  const int group = args.num_heads / args.kv.num_kv_heads;
  int64_t index = next_task(worker);
  while (index < schedule.num_tasks) {
    const AttentionTask& task = schedule.tasks[index];
    if (task.query_count * group <= kFewRows) {
      index = next_task(worker);
      run(task, index < schedule.num_tasks ? &schedule.tasks[index] : nullptr);
    } else {
      run(task, nullptr);
      index = next_task(worker);
    }
  }
  if (schedule.num_merges == 0) return;
  barrier(worker);
  for (int64_t i = next_task(worker); i < schedule.num_merges; i = next_task(worker)) {
    merge_partials(args, schedule.merges[i], worker);
  }
}

}  // namespace
}  // namespace caudal
