// Runs attention tasks with the kernels of attention_kernels.h.
//
// Few rows read keys and values straight from the cache, and prefetch the next chunk while they
// work on this one. Many rows (a prefill tile) widen a chunk into a panel once and share it. Both
// do the same arithmetic per row.
#pragma once

#include "attention_kernels.h"

namespace caudal {
namespace {

constexpr int kMaxDirectRows = 16;

// A thread's scratch memory for one task.
struct TileMemory {
  RowState rows;
  alignas(64) float query[kMaxTaskRows * kMaxHeadDim];  // times scale; int8: int16
  alignas(64) float acc[kMaxTaskRows * kMaxHeadDim];    // of the current split
  alignas(64) float total[kMaxTaskRows * kMaxHeadDim];  // of the splits before it
  alignas(64) float weights[kMaxTaskRows * kChunkTokens];
  alignas(64) std::byte key_panel[kChunkTokens * kMaxHeadDim * sizeof(float)];
  alignas(64) std::byte value_panel[kChunkTokens * kMaxHeadDim * sizeof(float)];
};

// The blocks of a chunk, for one head; those past the context repeat the first.
struct Chunk {
  const std::byte* block[kChunkBlocks];
  int num_blocks;
};

inline Chunk chunk_at(const Context& context, int begin) {
  const int left = min_int(context.num_tokens - begin, kChunkTokens);
  Chunk c;
  c.num_blocks = (left + kBlockSize - 1) / kBlockSize;
  for (int b = 0; b < kChunkBlocks; ++b) {
    c.block[b] = context.block(begin / kBlockSize + (b < c.num_blocks ? b : 0));
  }
  return c;
}

inline void scale_query(const float* q, int head_dim, float scale, float* out) {
  const F32 factor = F32::set1(scale);
  for (int d = 0; d < head_dim; d += kLanes) (F32::load(q + d) * factor).store(out + d);
}

template <class Cache>
class Tile {
 public:
  using Element = typename Cache::Element;

  Tile(const AttentionArgs& args, const AttentionTask& task, Worker& worker)
      : args_(args),
        task_(task),
        context_(args, task),
        memory_(*reinterpret_cast<TileMemory*>(worker.scratch)),
        head_dim_(args.kv.head_dim),
        group_(args.num_heads / args.kv.num_kv_heads),
        num_rows_(task.query_count * group_),
        is_wide_(num_rows_ > kMaxDirectRows) {
    const int most = max_tile_rows(is_wide_, Cache::kStep == 2);
    num_register_tiles_ = (num_rows_ + most - 1) / most;
  }

  // `next` is what this thread reads afterwards, or null.
  void run(const AttentionTask* next) {
    load_queries();
    const int begin = task_.split_begin * kSplitTokens;
    const int end = min_int(context_.num_tokens, begin + task_.split_count * kSplitTokens);
    Chunk chunk = chunk_at(context_, begin);
    for (int token = begin; token < end; token += kChunkTokens) {
      if (token % kSplitTokens == 0) start_split();
      const Chunk following = next_chunk(token + kChunkTokens, end, next, chunk);
      if (is_wide_) {
        process<true>(token, chunk, following);
      } else {
        process<false>(token, chunk, following);
      }
      chunk = following;
      const int after = token + kChunkTokens;
      if (after % kSplitTokens == 0 || after >= end) finish_split(token / kSplitTokens);
    }
    if (task_.partial < 0) write_outputs(begin < end);
  }

 private:
  int tile_begin(int tile) const { return tile * num_rows_ / num_register_tiles_; }

  float* output(int row) const {
    const int64_t token = task_.query_begin + row / group_;
    const int64_t head = task_.kv_head * group_ + row % group_;
    return args_.out + (token * args_.num_heads + head) * head_dim_;
  }

  // Scaled queries of a row and those after it: floats, or int16.
  void* query(int row) {
    return reinterpret_cast<std::byte*>(memory_.query) +
           int64_t{row} * head_dim_ * static_cast<int64_t>(sizeof(float)) / Cache::kStep;
  }

  int64_t value_offset() const {
    return static_cast<int64_t>(head_dim_) / Cache::kStep * kVectorBytes;
  }

  void load_queries() {
    const float scale = args_.scale * kLog2E;
    for (int r = 0; r < num_rows_; ++r) {
      const float* q = args_.q + (output(r) - args_.out);
      memory_.rows.visible[r] = context_.num_visible(task_, r, group_);
      if constexpr (Cache::kStep == 1) {
        scale_query(q, head_dim_, scale, static_cast<float*>(query(r)));
      } else {
        auto* out = static_cast<int16_t*>(query(r));
        memory_.rows.query_scale[r] = quantize_query(q, head_dim_, scale, kQuantMax15, out);
      }
    }
  }

  Chunk next_chunk(int token, int end, const AttentionTask* next, const Chunk& current) const {
    if (token < end) return chunk_at(context_, token);
    if (!next) return current;
    return chunk_at(Context(args_, *next), next->split_begin * kSplitTokens);
  }

  void start_split() {
    __builtin_memset(memory_.acc, 0, static_cast<size_t>(num_rows_) * head_dim_ * sizeof(float));
    for (int r = 0; r < num_rows_; ++r) {
      memory_.rows.max[r] = -kInfinity;
      memory_.rows.sum[r] = 0.0f;
    }
  }

  template <bool kIsWide>
  void process(int token, const Chunk& chunk, const Chunk& next) {
    Source keys, values;
    ChunkScales scales;
    const int64_t value_begin = value_offset();
    for (int b = 0; b < kChunkBlocks; ++b) {
      keys.block[b] = chunk.block[b];
      keys.next[b] = next.block[b];
      values.block[b] = chunk.block[b] + value_begin;
      values.next[b] = next.block[b] + value_begin;
      scales.key[b] = reinterpret_cast<const float*>(chunk.block[b] + 2 * value_begin);
      scales.value[b] = scales.key[b] + kBlockSize;
      if constexpr (Cache::kStep == 2) prefetch(next.block[b] + 2 * value_begin);
      if constexpr (Cache::kStep == 2) prefetch(next.block[b] + 2 * value_begin + 64);
    }
    if constexpr (kIsWide) {
      widen_keys(chunk);
      keys.block[0] = memory_.key_panel;
    }
    if constexpr (!kIsWide) prefetch_rest(chunk, next, 0);
    for (int tile = 0; tile < num_register_tiles_; ++tile) {
      if constexpr (kIsWide) prefetch_part(next, tile);
      score<kIsWide>(token, tile, keys, scales);
    }
    if constexpr (kIsWide) {
      widen_values(chunk);
      values.block[0] = memory_.value_panel;
    } else {
      prefetch_rest(chunk, next, value_begin);
    }
    for (int tile = 0; tile < num_register_tiles_; ++tile) add_values<kIsWide>(token, tile, values);
  }

  void widen_keys(const Chunk& chunk) {
    const int num_steps = head_dim_ / Cache::kStep;
    for (int b = 0; b < chunk.num_blocks; ++b) {
      const std::byte* from = chunk.block[b];
      std::byte* to = memory_.key_panel + b * kWideVectorBytes;
      for (int s = 0; s < num_steps; ++s) {
        Cache::store_wide(Cache::load(from + s * kVectorBytes),
                          to + s * kWideVectorBytes * kChunkBlocks);
      }
    }
  }

  void widen_values(const Chunk& chunk) {
    const int num_vectors = head_dim_ / Cache::kStep;
    for (int b = 0; b < chunk.num_blocks; ++b) {
      const std::byte* from = chunk.block[b] + value_offset();
      std::byte* to = memory_.value_panel + b * num_vectors * kWideVectorBytes;
      for (int i = 0; i < num_vectors; ++i) {
        Cache::store_wide(Cache::load(from + i * kVectorBytes), to + i * kWideVectorBytes);
      }
    }
  }

  // The kernels prefetch as many blocks as they read; the next chunk can have more.
  void prefetch_rest(const Chunk& chunk, const Chunk& next, int64_t offset) const {
    for (int b = chunk.num_blocks; b < next.num_blocks; ++b) {
      for (int64_t i = 0; i < value_offset(); i += 64) prefetch(next.block[b] + offset + i);
    }
  }

  // The share of the next chunk's cache lines that falls to one register tile.
  void prefetch_part(const Chunk& next, int tile) const {
    const int lines_per_block = static_cast<int>(2 * value_offset() / 64);
    const int num_lines = lines_per_block * next.num_blocks;
    const int end = num_lines * (tile + 1) / num_register_tiles_;
    for (int i = num_lines * tile / num_register_tiles_; i < end; ++i) {
      prefetch(next.block[i / lines_per_block] + i % lines_per_block * 64);
    }
  }

  template <bool kIsWide>
  void score(int token, int tile, const Source& keys, const ChunkScales& scales);

  template <bool kIsWide>
  void add_values(int token, int tile, const Source& values);

  void finish_split(int split) {
    RowState& rows = memory_.rows;
    for (int r = 0; r < num_rows_; ++r) {
      const float* acc = memory_.acc + r * head_dim_;
      if (task_.partial >= 0) {
        const int64_t row =
            task_.partial + int64_t{split - task_.split_begin} * task_.partial_step + r;
        float* partial = args_.partials + row * partial_stride(head_dim_);
        __builtin_memcpy(partial, acc, head_dim_ * sizeof(float));
        partial[head_dim_] = rows.max[r];
        partial[head_dim_ + 1] = rows.sum[r];
      } else if (split == 0) {
        __builtin_memcpy(memory_.total + r * head_dim_, acc, head_dim_ * sizeof(float));
        rows.total_max[r] = rows.max[r];
        rows.total_sum[r] = rows.sum[r];
      } else if (rows.visible[r] > split * kSplitTokens) {
        merge_split(memory_.total + r * head_dim_, rows.total_max[r], rows.total_sum[r], acc,
                    rows.max[r], rows.sum[r], head_dim_);
      }
    }
  }

  void write_outputs(bool has_keys) {
    for (int r = 0; r < num_rows_; ++r) {
      if (has_keys && memory_.rows.visible[r] > 0) {
        write_output(memory_.total + r * head_dim_, memory_.rows.total_sum[r], head_dim_,
                     output(r));
      } else {
        __builtin_memset(output(r), 0, head_dim_ * sizeof(float));
      }
    }
  }

  const AttentionArgs& args_;
  const AttentionTask& task_;
  const Context context_;
  TileMemory& memory_;
  const int head_dim_;
  const int group_;
  const int num_rows_;
  const bool is_wide_;
  int num_register_tiles_;
};

template <class Cache>
template <bool kIsWide>
void Tile<Cache>::score(int token, int tile, const Source& keys, const ChunkScales& scales) {
  const int row = tile_begin(tile);
  const int num_rows = tile_begin(tile + 1) - row;
  // Later rows see more.
  const int limit = visible_in_chunk(memory_.rows, row + num_rows - 1, token);
  if (limit <= 0) return;
  const ScoreArgs args{query(row), head_dim_ / Cache::kStep, memory_.weights + row * kChunkTokens};
  const int num_blocks = (limit + kBlockSize - 1) / kBlockSize;
  with_constant<max_tile_rows(kIsWide, Cache::kStep == 2)>(
      num_rows, [&]<int kRows>() { score_rows<Cache, kIsWide, kRows>(keys, num_blocks, args); });
  if (num_blocks > kChunkBlocks / 2) {
    softmax_rows<Cache, kChunkBlocks>(memory_.rows, row, num_rows, token, scales, args.scores);
  } else {
    softmax_rows<Cache, kChunkBlocks / 2>(memory_.rows, row, num_rows, token, scales, args.scores);
  }
}

template <class Cache>
template <bool kIsWide>
void Tile<Cache>::add_values(int token, int tile, const Source& values) {
  const int row = tile_begin(tile);
  const int num_rows = tile_begin(tile + 1) - row;
  const int limit = visible_in_chunk(memory_.rows, row + num_rows - 1, token);
  if (limit <= 0) return;
  const int common = max_int(0, visible_in_chunk(memory_.rows, row, token));
  ValueArgs v{&values,
              memory_.weights + row * kChunkTokens,
              0,
              common,
              head_dim_,
              memory_.acc + row * head_dim_,
              memory_.rows.correction + row,
              memory_.rows.weight_scale + row};
  // Integer weights of unseen tokens are 0, which is exact whatever the cache holds there.
  if constexpr (Cache::kStep == 2) v.last = (limit + 1) / 2;
  with_constant<max_tile_rows(kIsWide, Cache::kStep == 2)>(
      num_rows, [&]<int kRows>() { value_rows<Cache, kIsWide, kRows>(v); });
  if (Cache::kStep == 2 || common == limit) return;
  // On the diagonal rows differ in their last tokens; an unseen value must not even meet a zero
  // weight, as it could be infinite.
  const float one = 1.0f;
  v.first = common;
  v.correction = &one;
  for (int r = 0; r < num_rows; ++r) {
    v.last = visible_in_chunk(memory_.rows, row + r, token);
    v.weights = memory_.weights + (row + r) * kChunkTokens;
    v.acc = memory_.acc + (row + r) * head_dim_;
    if (v.last > common) value_rows<Cache, kIsWide, 1>(v);
  }
}

template <class Cache>
void run_attention(const AttentionArgs& args, Worker& worker) {
  run_tasks(args, worker, [&](const AttentionTask& task, const AttentionTask* next) {
    Tile<Cache>(args, task, worker).run(next);
  });
}

}  // namespace
}  // namespace caudal
