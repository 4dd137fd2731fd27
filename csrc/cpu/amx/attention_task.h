// What the attention kernels of the tiled KV formats share: the blocks of a split and their
// prefetches, tiles of rows, and the merge of splits.
#pragma once

#include "../attention_common.h"
#include "tile_unit.h"

namespace caudal::amx {
namespace {

constexpr int kTileRows = 16;
constexpr int kSplitBlocks = kSplitTokens / kBlockSize;
constexpr int kDirectAhead = 4;  // blocks between a prefetch and its use

// To the second cache level; the first has too few requests under way to fetch from memory at its rate.
inline void prefetch_second(const std::byte* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
}

// What a task keeps of its rows, of the splits so far.
struct TaskRows {
  alignas(64) float total[kMaxTaskRows * kMaxHeadDim];
  float total_max[kMaxTaskRows];
  float total_sum[kMaxTaskRows];
  int32_t visible[kMaxTaskRows];  // keys that the row sees, from position 0
};

// Up to 16 rows of a task against one split.
struct RowTile {
  int first;  // row of the task
  int num_rows;
  int limit[kTileRows];  // keys of the split that each row sees; ascending
  int num_blocks;        // that the last row sees something of
  float max[kTileRows];
  float sum[kTileRows];
};

// Where the results of a split go.
struct Accumulators {
  float* out;
  int64_t stride;
  bool is_first;
  alignas(64) float old_factor[kTileRows];
  alignas(64) float new_factor[kTileRows];
};

class TaskBase {
 protected:
  // A block has keys, then as many bytes of values, then `scale_bytes`. Up to so many rows are left to
  // the vector unit; more are faster in the tile unit.
  TaskBase(const AttentionArgs& args, const AttentionTask& task, TaskRows& rows, int64_t value_bytes,
           int64_t scale_bytes, int max_direct_rows)
      : args_(args),
        task_(task),
        context_(args, task),
        rows_(rows),
        head_dim_(args.kv.head_dim),
        value_offset_(kBlockSize * args.kv.head_dim * value_bytes),
        lines_per_block_(static_cast<int>((2 * value_offset_ + scale_bytes) / 64)),
        group_(args.num_heads / args.kv.num_kv_heads),
        num_rows_(task.query_count * group_),
        is_direct_(num_rows_ <= max_direct_rows),
        first_split_(task.split_begin),
        end_split_(min_int((context_.num_tokens + kSplitTokens - 1) / kSplitTokens,
                           task.split_begin + task.split_count)) {
    for (int r = 0; r < num_rows_; ++r) rows_.visible[r] = context_.num_visible(task, r, group_);
  }

  int64_t output_offset(int row) const {
    const int64_t token = task_.query_begin + row / group_;
    const int64_t head = task_.kv_head * group_ + row % group_;
    return (token * args_.num_heads + head) * head_dim_;
  }

  // Finds the blocks of a split, and those that are needed after it, of which every phase prefetches
  // a share; `next` is what this thread does afterwards, or null.
  void start_split(int split, const AttentionTask* next) {
    num_blocks_ = find_blocks(context_, split, blocks_);
    num_next_ = 0;
    next_block_ = 0;
    next_line_ = 0;
    if (split + 1 < end_split_) {
      num_next_ = find_blocks(context_, split + 1, next_);
    } else if (next) {
      num_next_ = find_blocks(Context(args_, *next), next->split_begin, next_);
    }
  }

  void prefetch_lines(int count) {
    for (; count > 0 && next_block_ < num_next_; --count) {
      prefetch_second(next_[next_block_] + int64_t{64} * next_line_);
      if (++next_line_ == lines_per_block_) {
        next_line_ = 0;
        ++next_block_;
      }
    }
  }

  // What a direct row reads kDirectAhead blocks later: keys, values, then the next split's keys.
  const std::byte* ahead(int step, int num_blocks) const {
    const int later = step + kDirectAhead;
    if (later < num_blocks) return blocks_[later];
    if (later < 2 * num_blocks) return blocks_[later - num_blocks] + value_offset_;
    const int next = later - 2 * num_blocks;
    return next < num_next_ ? next_[next] : blocks_[0];
  }

  // Rows from `first` on against a split.
  RowTile tile_at(int split, int first) const {
    RowTile tile;
    tile.first = first;
    tile.num_rows = min_int(kTileRows, num_rows_ - first);
    const __m512i visible = _mm512_loadu_si512(rows_.visible + first);
    const __m512i seen = _mm512_sub_epi32(visible, _mm512_set1_epi32(split * kSplitTokens));
    const __m512i limit = _mm512_min_epi32(_mm512_max_epi32(seen, _mm512_setzero_si512()),
                                           _mm512_set1_epi32(kSplitTokens));
    _mm512_storeu_si512(tile.limit, limit);
    tile.num_blocks = (tile.limit[tile.num_rows - 1] + kBlockSize - 1) / kBlockSize;
    return tile;
  }

  // Takes the maxima and sums of a tile into those so far, or into its partial rows.
  void merge_tile(int split, const RowTile& tile, Accumulators& to) {
    to.is_first = task_.partial >= 0 || split == 0;
    to.out = rows_.total + int64_t{tile.first} * head_dim_;
    to.stride = head_dim_;
    if (task_.partial >= 0) {
      to.stride = partial_stride(head_dim_);
      const int64_t row = int64_t{split - task_.split_begin} * task_.partial_step + tile.first;
      to.out = args_.partials + (task_.partial + row) * to.stride;
    }
    if (task_.partial < 0) return merge_sums(split, tile, to);
    for (int r = 0; r < tile.num_rows; ++r) {
      to.out[r * to.stride + head_dim_] = tile.max[r];
      to.out[r * to.stride + head_dim_ + 1] = tile.sum[r];
    }
  }

  // Adds 16 columns of a row's weighted values.
  [[gnu::always_inline]] static void accumulate(const RowTile& tile, const Accumulators& to, int r,
                                                int column, F32 a) {
    if (tile.limit[r] == 0) return;
    float* out = to.out + r * to.stride + kLanes * column;
    if (to.is_first) {
      a.store(out);
    } else {
      const F32 old = F32::load(out) * F32::set1(to.old_factor[r]);
      F32::fma(a, F32::set1(to.new_factor[r]), old).store(out);
    }
  }

  void write_outputs() {
    if (task_.partial >= 0) return;
    for (int r = 0; r < num_rows_; ++r) {
      float* out = args_.out + output_offset(r);
      if (first_split_ < end_split_ && rows_.visible[r] > 0) {
        write_output(rows_.total + r * head_dim_, rows_.total_sum[r], head_dim_, out);
      } else {
        __builtin_memset(out, 0, head_dim_ * sizeof(float));
      }
    }
  }

  // f<rows>(first row), in groups that the vector unit takes at once.
  template <class F>
  static void for_each_row_group(const RowTile& tile, const F& f) {
    int r = 0;
    for (; r + 3 <= tile.num_rows; r += 3) f.template operator()<3>(r);
    if (tile.num_rows - r == 2) f.template operator()<2>(r);
    if (tile.num_rows - r == 1) f.template operator()<1>(r);
  }

  // Lanes of `x` that are tokens below `limit`; `block` is the number of the 16 tokens in the split.
  static F32 keep_seen(F32 x, int block, int limit, F32 other) {
    return F32::keep_first(x, max_int(0, min_int(limit - kBlockSize * block, kLanes)), other);
  }

  const AttentionArgs& args_;
  const AttentionTask& task_;
  const Context context_;
  TaskRows& rows_;
  const int head_dim_;
  const int64_t value_offset_;  // bytes
  const int lines_per_block_;
  const int group_;
  const int num_rows_;
  const bool is_direct_;
  const int first_split_;
  const int end_split_;
  const std::byte* blocks_[kSplitBlocks];
  const std::byte* next_[kSplitBlocks];
  int num_blocks_ = 0;
  int num_next_ = 0;

 private:
  // The blocks of a split into `blocks`; returns their number.
  static int find_blocks(const Context& context, int split, const std::byte** blocks) {
    const int left = context.num_tokens - split * kSplitTokens;
    const int count = min_int(kSplitBlocks, (left + kBlockSize - 1) / kBlockSize);
    for (int b = 0; b < count; ++b) blocks[b] = context.block(split * kSplitBlocks + b);
    return count;
  }

  // The running maxima and sums, and what old and new accumulators are multiplied with.
  void merge_sums(int split, const RowTile& tile, Accumulators& to) {
    float* total_max = rows_.total_max + tile.first;
    float* total_sum = rows_.total_sum + tile.first;
    F32 max = F32::load(tile.max);
    F32 sum = F32::load(tile.sum);
    if (split > 0) {
      const F32 before = F32::load(total_max);
      const F32 m = F32::max(before, max);
      const F32 old_factor = exp2_approx(before - m);
      const F32 new_factor = exp2_approx(max - m);
      old_factor.store(to.old_factor);
      new_factor.store(to.new_factor);
      const __m512i limits = _mm512_loadu_si512(tile.limit);
      const __mmask16 is_seen = _mm512_cmpgt_epi32_mask(limits, _mm512_setzero_si512());
      const F32 merged = F32::fma(sum, new_factor, F32::load(total_sum) * old_factor);
      max.v = _mm512_mask_mov_ps(before.v, is_seen, m.v);
      sum.v = _mm512_mask_mov_ps(F32::load(total_sum).v, is_seen, merged.v);
    }
    max.store(total_max);
    sum.store(total_sum);
  }

  int next_block_ = 0;
  int next_line_ = 0;
};

}  // namespace
}  // namespace caudal::amx
