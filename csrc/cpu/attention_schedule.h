// Cuts one step's attention into tasks; the list is made once and serves every layer.
//
// What is computed never depends on how it is cut. Keys are reduced in chunks of kChunkTokens
// inside splits of kSplitTokens, both at absolute positions of the context. Every split starts
// afresh, and splits are merged in order, with the same arithmetic inside a task or after a
// barrier.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace caudal {

constexpr int kChunkTokens = 64;   // keys per step of the online softmax
constexpr int kSplitTokens = 256;  // keys reduced before a merge
constexpr int kMaxTaskRows = 192;  // queries x heads of a group in one task, at most

// Memory that is reused from step to step.
struct AttentionBuffers {
  struct Item {
    int64_t cost;
    AttentionTask task;         // of the first head
    int64_t partials_per_head;  // between the partial rows of one head and the next
  };
  int64_t max_partials;  // rows that AttentionArgs::partials can hold
  std::vector<Item> items;
  std::vector<AttentionTask> tasks;
  std::vector<AttentionTask> merges;
};

// Floats of a partial row: head_dim accumulators, running maximum, sum, padding.
constexpr int64_t partial_stride(int head_dim) { return head_dim + 16; }

// Partial rows that allow a few sequences to use all of a cache of `max_context` tokens.
int64_t max_partial_rows(int num_heads, int64_t max_context);

// The schedule points into `buffers` and is valid until the next call. Split tasks (those with a
// partial) store row (split - split_begin) * partial_step + query * G + head of the group, where
// G = num_heads / num_kv_heads, from their `partial` on; the merge task counts from its own.
//
// Decoding sequences that begin with the same blocks, neighbours in the batch, attend to these
// together, which reads them once and has rows enough for a tile unit.
AttentionSchedule make_attention_schedule(const Batch& batch, int num_heads, int num_kv_heads,
                                          int num_threads, AttentionBuffers& buffers);

}  // namespace caudal
