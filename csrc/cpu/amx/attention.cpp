// Attention on the tile unit, over the tiled integer formats of the KV cache (arithmetic in
// attention_tiles.h).
//
// Sixteen rows at a time meet a split of keys: the tile unit makes the integer products of 16 keys
// while the vector unit turns those of the 16 before into scores; softmax runs on the whole split;
// then the tile unit multiplies the rounded weights with 64 values at a time. Keys are tile operands
// as they lie in the cache. Values are copied side by side, as a tile takes four blocks of them; the
// rows of a task share the copy. A few rows (decoding) are left to the vector unit, which takes
// values where they are.
#include "../simd_avx512.h"
#include "../attention_common.h"
#include "../attention_tiles.h"
#include "../isa_kernels.h"
#include "attention_rows.h"
#include "tile_products.h"

namespace caudal::amx {
namespace {

constexpr int kTileBytes = 1024;
constexpr int kDirectAhead = 4;  // blocks between a prefetch and its use
constexpr int kSplitBlocks = kSplitTokens / kBlockSize;
constexpr int kChunkTokens64 = 64;  // values of one tile
constexpr int kChunkBlocks = kChunkTokens64 / kBlockSize;
constexpr int kSplitChunks = kSplitTokens / kChunkTokens64;

// A thread's scratch memory for one task.
struct TaskMemory {
  alignas(64) uint8_t query[2][kMaxTaskRows * kMaxHeadDim];  // high bytes, low bytes
  alignas(64) float total[kMaxTaskRows * kMaxHeadDim];      // of the splits so far
  alignas(64) float total_max[kMaxTaskRows];
  alignas(64) float total_sum[kMaxTaskRows];
  alignas(64) float query_scale[kMaxTaskRows];
  int32_t visible[kMaxTaskRows];  // keys that the row sees, from position 0
  alignas(64) std::byte values[2 * kSplitTokens * kMaxHeadDim];  // [plane][chunk][columns] tiles
  // Of one tile of rows:
  alignas(64) float scores[kTileRows * kSplitTokens];
  alignas(64) uint8_t weights[2][kTileRows * kSplitTokens];  // high bytes, low bytes
  Dots dots[2];
};

// Up to 16 rows of a task against one split.
struct RowTile {
  int first;  // row of the task
  int num_rows;
  int limit[kTileRows];  // keys of the split that each row sees; ascending
  int num_blocks;        // that the last row sees something of
  float max[kTileRows];
  float sum[kTileRows];
  float weight_scale[kTileRows];
};

// Bytes of a query that one tile multiplies: the largest even share of at most 64.
inline int query_depth(int head_dim) {
  int parts = (head_dim + 63) / 64;
  while (head_dim % (4 * parts) != 0) ++parts;
  return head_dim / parts;
}

template <KVFormat kFormat>
class Task {
 public:
  static constexpr bool kInt16 = kFormat == KVFormat::kInt16Tiles;
  static constexpr int kPlanes = kInt16 ? 2 : 1;

  Task(const AttentionArgs& args, const AttentionTask& task, Worker& worker)
      : args_(args),
        task_(task),
        context_(args, task),
        memory_(*reinterpret_cast<TaskMemory*>(worker.scratch)),
        head_dim_(args.kv.head_dim),
        plane_(int64_t{kBlockSize} * head_dim_),
        depth_(query_depth(head_dim_)),
        lines_per_block_(static_cast<int>((2 * kPlanes * plane_ + 2 * kBlockSize * 4) / 64)),
        group_(args.num_heads / args.kv.num_kv_heads),
        num_rows_(task.query_count * group_),
        is_direct_(num_rows_ <= kMaxDirectRows) {}

  // `next` is what this thread does afterwards, or null.
  void run(const AttentionTask* next) {
    load_queries();
    const int begin = task_.split_begin;
    const int end = min_int((context_.num_tokens + kSplitTokens - 1) / kSplitTokens,
                            begin + task_.split_count);
    for (int split = begin; split < end; ++split) {
      find_next(split + 1 < end ? split + 1 : -1, next);
      load_split(split);
      for (int row = 0; row < num_rows_; row += kTileRows) run_tile(split, row);
    }
    if (!is_direct_) asm volatile("tilerelease");
    if (task_.partial < 0) write_outputs(begin < end);
  }

 private:
  float* output(int row) const {
    const int64_t token = task_.query_begin + row / group_;
    const int64_t head = task_.kv_head * group_ + row % group_;
    return args_.out + (token * args_.num_heads + head) * head_dim_;
  }

  void load_queries() {
    const int first_visible = context_.num_tokens - task_.query_count + 1;
    for (int r = 0; r < num_rows_; ++r) {
      alignas(32) int16_t both[kMaxHeadDim];
      const float* q = args_.q + (output(r) - args_.out);
      memory_.visible[r] = first_visible + r / group_;
      memory_.query_scale[r] =
          quantize_query(q, head_dim_, args_.scale * kLog2E, kQuantMax16, both) * dot_unit(kFormat);
      uint8_t* high = memory_.query[0] + r * head_dim_;
      uint8_t* low = memory_.query[1] + r * head_dim_;
      const __m256i offset = _mm256_set1_epi8(is_direct_ ? static_cast<char>(128) : 0);
      for (int d = 0; d < head_dim_; d += kLanes) {
        const __m256i x = _mm256_load_si256(reinterpret_cast<const __m256i*>(both + d));
        const __m256i rounded = _mm256_add_epi16(x, _mm256_set1_epi16(128));
        store_bytes(_mm256_srai_epi16(rounded, 8), offset, high + d);
        store_bytes(x, offset, low + d);
      }
    }
  }

  static void store_bytes(__m256i x, __m256i offset, uint8_t* out) {
    const __m128i bytes = _mm256_cvtepi16_epi8(_mm256_add_epi8(x, offset));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
  }

  // The blocks of a split; for many rows its values as tiles [plane][chunk][column of 16].
  void load_split(int split) {
    const int num_columns = head_dim_ / kLanes;
    const int num_blocks = find_blocks(context_, split, blocks_);
    for (int b = 0; b < num_blocks && !is_direct_; ++b) {
      const std::byte* values = blocks_[b] + kPlanes * plane_;
      prefetch_lines(lines_per_block_ / 2);
      // Four tokens of each dimension are a row of a tile; the weights have their order.
      for (int p = 0; p < kPlanes; ++p) {
        std::byte* tiles = value_tile(p, b / kChunkBlocks, 0) + 64 * (b % kChunkBlocks);
        for (int i = 0; i < kBlockSize / 4; ++i) {
          for (int c = 0; c < num_columns; ++c) {
            _mm512_store_si512(tiles + c * kTileBytes + 64 * kChunkBlocks * i,
                               _mm512_loadu_si512(values));
            values += 64;
          }
        }
      }
    }
  }

  const float* key_scales(int block) const {
    return reinterpret_cast<const float*>(blocks_[block] + 2 * kPlanes * plane_);
  }
  const float* value_scales(int block) const { return key_scales(block) + kBlockSize; }

  std::byte* value_tile(int plane, int chunk, int column) const {
    const int64_t index = (int64_t{plane} * kSplitChunks + chunk) * (head_dim_ / kLanes) + column;
    return memory_.values + index * kTileBytes;
  }

  // The blocks that are needed next, of which every phase prefetches a share.
  void find_next(int split, const AttentionTask* next) {
    num_next_ = 0;
    next_block_ = 0;
    next_line_ = 0;
    if (split >= 0) {
      num_next_ = find_blocks(context_, split, next_);
    } else if (next) {
      num_next_ = find_blocks(Context(args_, *next), next->split_begin, next_);
    }
  }

  // The blocks of a split into `blocks`; returns their number.
  static int find_blocks(const Context& context, int split, const std::byte** blocks) {
    const int left = context.num_tokens - split * kSplitTokens;
    const int count = min_int(kSplitBlocks, (left + kBlockSize - 1) / kBlockSize);
    for (int b = 0; b < count; ++b) blocks[b] = context.block(split * kSplitBlocks + b);
    return count;
  }

  // To the second level: a split is larger than the first.
  void prefetch_lines(int count) {
    for (; count > 0 && next_block_ < num_next_; --count) {
      const std::byte* line = next_[next_block_] + int64_t{64} * next_line_;
      _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T1);
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
    if (later < 2 * num_blocks) return blocks_[later - num_blocks] + kPlanes * plane_;
    const int next = later - 2 * num_blocks;
    return next < num_next_ ? next_[next] : blocks_[0];
  }

  void prefetch_scales(int block) const {
    if (block >= num_next_) return;
    prefetch(next_[block] + 2 * kPlanes * plane_);
    prefetch(next_[block] + 2 * kPlanes * plane_ + 64);
  }

  void run_tile(int split, int first) {
    RowTile tile;
    tile.first = first;
    tile.num_rows = min_int(kTileRows, num_rows_ - first);
    for (int r = 0; r < tile.num_rows; ++r) {
      const int seen = memory_.visible[first + r] - split * kSplitTokens;
      tile.limit[r] = max_int(0, min_int(seen, kSplitTokens));
    }
    tile.num_blocks = (tile.limit[tile.num_rows - 1] + kBlockSize - 1) / kBlockSize;
    if (tile.num_blocks == 0) return;
    if (is_direct_) {
      score_direct(tile);
    } else {
      configure(tile.num_rows, depth_);
      if (depth_ == head_dim_) {
        score<true>(tile);
      } else {
        score<false>(tile);
      }
    }
    for (int r = 0; r < tile.num_rows; ++r) make_weights(tile, r);
    add_values(split, tile);
  }

  // Products of the rows with the keys of a block; a query that fits a tile is loaded already.
  template <int kPair, bool kIsOneTile>
  void multiply_keys(const RowTile& tile, int block) {
    const std::byte* keys = blocks_[block];
    zero_products<kPair>();
    if constexpr (kIsOneTile) {
      multiply<kPair, true, kInt16>(keys, keys + plane_);
    } else {
      for (int d = 0; d < head_dim_; d += depth_) {
        load_query(tile, d);
        multiply<kPair, true, kInt16>(keys + d * kBlockSize, keys + plane_ + d * kBlockSize);
      }
    }
    store_products<kPair>(memory_.dots[kPair]);
  }

  void load_query(const RowTile& tile, int dim) const {
    const int64_t offset = int64_t{tile.first} * head_dim_ + dim;
    load_rows(memory_.query[0] + offset, memory_.query[1] + offset, head_dim_);
  }

  template <bool kIsOneTile>
  [[gnu::noinline]] void score(RowTile& tile) {
    F32 max[kTileRows];
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) max[r] = F32::set1(-kInfinity);
    if constexpr (kIsOneTile) load_query(tile, 0);
    multiply_keys<0, kIsOneTile>(tile, 0);
    for (int b = 0; b < tile.num_blocks; b += 2) {
      if (b + 1 < tile.num_blocks) multiply_keys<1, kIsOneTile>(tile, b + 1);
      finish_scores(tile, b, memory_.dots[0], max);
      if (b + 1 == tile.num_blocks) break;
      if (b + 2 < tile.num_blocks) multiply_keys<0, kIsOneTile>(tile, b + 2);
      finish_scores(tile, b + 1, memory_.dots[1], max);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) tile.max[r] = max[r].max_lane();
  }

  [[gnu::always_inline]] void finish_scores(const RowTile& tile, int block, const Dots& dots,
                                            F32* max) {
    prefetch_lines(lines_per_block_ / 2);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      if (r >= tile.num_rows) break;
      max[r] = F32::max(max[r], store_scores(tile, r, block, dot_row(dots, r)));
    }
  }

  // A row's products with the keys of a block become scores, -inf for tokens it does not see.
  [[gnu::always_inline]] F32 store_scores(const RowTile& tile, int row, int block, F32 dot) {
    const F32 query_scale = F32::set1(memory_.query_scale[tile.first + row]);
    F32 s = (dot * query_scale) * F32::load(key_scales(block));
    if (kBlockSize * (block + 1) > tile.limit[row]) {
      s = keep_seen(s, tile.limit[row] - kBlockSize * block, F32::set1(-kInfinity));
    }
    s.store(memory_.scores + kSplitTokens * row + kBlockSize * block);
    return s;
  }

  [[gnu::noinline]] void score_direct(RowTile& tile) {
    for_each_row_group(tile, [&]<int kRows>(int first) {
      F32 max[kRows];
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r) max[r] = F32::set1(-kInfinity);
      const RowBytes query = {memory_.query[0] + first * head_dim_,
                              memory_.query[1] + first * head_dim_, head_dim_};
      for (int b = 0; b < tile.num_blocks; ++b) {
        __m512i dots[kRows];
        multiply_keys_direct<kInt16, kRows>(query, head_dim_, blocks_[b], ahead(b, tile.num_blocks),
                                            dots);
#pragma GCC unroll 3
        for (int r = 0; r < kRows; ++r) {
          const F32 dot = {_mm512_cvtepi32_ps(dots[r])};
          max[r] = F32::max(max[r], store_scores(tile, first + r, b, dot));
        }
      }
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r) tile.max[first + r] = max[r].max_lane();
    });
  }

  // f<rows>(first row), in groups that the vector unit takes at once.
  template <class F>
  static void for_each_row_group(const RowTile& tile, const F& f) {
    static_assert(kDirectRows == 3);
    int r = 0;
    for (; r + 3 <= tile.num_rows; r += 3) f.template operator()<3>(r);
    if (tile.num_rows - r == 2) f.template operator()<2>(r);
    if (tile.num_rows - r == 1) f.template operator()<1>(r);
  }

  static F32 keep_seen(F32 x, int count, F32 other) {
    return F32::keep_first(x, max_int(0, min_int(count, kLanes)), other);
  }

  // A row's scores become rounded weights.
  [[gnu::noinline]] void make_weights(RowTile& tile, int row) {
    float* scores = memory_.scores + kSplitTokens * row;
    const int limit = tile.limit[row];
    const int num_chunks = (tile.num_blocks + kChunkBlocks - 1) / kChunkBlocks;
    const F32 max = F32::set1(limit > 0 ? tile.max[row] : 0.0f);
    F32 sum = F32::zero();
    F32 largest = F32::zero();
#pragma GCC unroll 2
    for (int b = 0; b < tile.num_blocks; ++b) {
      const F32 p = exp2_approx(F32::load(scores + kBlockSize * b) - max);
      sum = sum + p;
      F32 w = p * F32::load(value_scales(b));
      // The scale of an unseen token can be anything, NaN too.
      if (kBlockSize * (b + 1) > limit) w = keep_seen(w, limit - kBlockSize * b, F32::zero());
      largest = F32::max_bits(largest, w);
      w.store(scores + kBlockSize * b);
    }
    for (int b = tile.num_blocks; b < num_chunks * kChunkBlocks; ++b) {
      F32::zero().store(scores + kBlockSize * b);
    }
    const float top = largest.max_lane_bits();
    const bool is_tiny = top < kQuantMin;
    tile.sum[row] = sum.sum_lanes();
    tile.weight_scale[row] = is_tiny ? 0.0f : top * (dot_unit(kFormat) / kQuantMax16);
    round_weights(scores, is_tiny ? 0.0f : kQuantMax16 / top, num_chunks, row);
  }

  void round_weights(const float* w, float inverse, int num_chunks, int row) {
    const F32 factor = F32::set1(inverse);
    const __m512i low_byte = _mm512_set1_epi16(255);
    uint8_t* high = memory_.weights[0] + kSplitTokens * row;
    uint8_t* low = memory_.weights[1] + kSplitTokens * row;
    for (int c = 0; c < num_chunks; ++c, w += kChunkTokens64) {
      __m512i x[kChunkBlocks];
#pragma GCC unroll 4
      for (int b = 0; b < kChunkBlocks; ++b) {
        x[b] = _mm512_cvtps_epi32((F32::load(w + kBlockSize * b) * factor).v);
      }
      const __m512i a = _mm512_packus_epi32(x[0], x[1]);
      const __m512i b = _mm512_packus_epi32(x[2], x[3]);
      _mm512_store_si512(
          high + kChunkTokens64 * c,
          _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8)));
      _mm512_store_si512(low + kChunkTokens64 * c,
                         _mm512_packus_epi16(_mm512_and_si512(a, low_byte),
                                             _mm512_and_si512(b, low_byte)));
    }
  }

  // Products of the weights with 32 columns of the values, or the 16 that are left.
  template <int kPairs>
  void multiply_values(const RowTile& tile, int column) {
    zero_products<0>();
    if constexpr (kPairs == 2) zero_products<1>();
    for (int c = 0; kChunkBlocks * c < tile.num_blocks; ++c) {
      load_rows(memory_.weights[0] + kChunkTokens64 * c, memory_.weights[1] + kChunkTokens64 * c,
                kSplitTokens);
      multiply<0, false, kInt16>(value_tile(0, c, column), value_tile(kPlanes - 1, c, column));
      if constexpr (kPairs == 2) {
        multiply<1, false, kInt16>(value_tile(0, c, column + 1),
                                   value_tile(kPlanes - 1, c, column + 1));
      }
    }
    store_products<0>(memory_.dots[0]);
    if constexpr (kPairs == 2) store_products<1>(memory_.dots[1]);
  }

  void add_values(int split, RowTile& tile) {
    const bool is_first = task_.partial >= 0 || split == 0;
    alignas(64) float old_factor[kTileRows] = {};
    alignas(64) float new_factor[kTileRows];
    float* out = memory_.total + int64_t{tile.first} * head_dim_;
    int64_t stride = head_dim_;
    if (task_.partial >= 0) {
      stride = partial_stride(head_dim_);
      const int64_t row = int64_t{split - task_.split_begin} * num_rows_ + tile.first;
      out = args_.partials + (task_.partial + row) * stride;
    }
    for (int r = 0; r < tile.num_rows; ++r) {
      if (task_.partial >= 0) {
        out[r * stride + head_dim_] = tile.max[r];
        out[r * stride + head_dim_ + 1] = tile.sum[r];
      } else if (tile.limit[r] > 0) {
        merge_sums(split, tile, r, old_factor + r, new_factor + r);
      }
    }
    const Accumulators to = {out, stride, is_first, old_factor, new_factor};
    if (is_direct_) return add_direct_values(tile, to);
    if (depth_ != 64) configure(tile.num_rows, 64);
    const int num_columns = head_dim_ / kLanes;
    for (int c = 0; c < num_columns; c += 2) {
      const int count = min_int(2, num_columns - c);
      if (count == 2) {
        multiply_values<2>(tile, c);
      } else {
        multiply_values<1>(tile, c);
      }
      for (int i = 0; i < count; ++i) {
        for (int r = 0; r < tile.num_rows; ++r) {
          accumulate(tile, to, r, c + i, dot_row(memory_.dots[i], r));
        }
      }
    }
  }

  // Where the results of a split go.
  struct Accumulators {
    float* out;
    int64_t stride;
    bool is_first;
    const float* old_factor;
    const float* new_factor;
  };

  [[gnu::always_inline]] void accumulate(const RowTile& tile, const Accumulators& to, int r,
                                         int column, F32 dot) const {
    if (tile.limit[r] == 0) return;
    const F32 a = dot * F32::set1(tile.weight_scale[r]);
    float* out = to.out + r * to.stride + kLanes * column;
    if (to.is_first) {
      a.store(out);
    } else {
      const F32 old = F32::load(out) * F32::set1(to.old_factor[r]);
      F32::fma(a, F32::set1(to.new_factor[r]), old).store(out);
    }
  }

  void add_direct_values(const RowTile& tile, const Accumulators& to) {
    for_each_row_group(tile, [&]<int kRows>(int row) {
      int c = 0;
      const int num_columns = head_dim_ / kLanes;
      for (; c + kDirectColumns <= num_columns; c += kDirectColumns) {
        add_direct_columns<kRows, kDirectColumns>(tile, to, row, c);
      }
      for (; c < num_columns; ++c) add_direct_columns<kRows, 1>(tile, to, row, c);
    });
  }

  template <int kRows, int kColumns>
  void add_direct_columns(const RowTile& tile, const Accumulators& to, int row, int column) {
    DirectValues<kInt16, kRows, kColumns> sums;
    for (int b = 0; b < tile.num_blocks; ++b) {
      prefetch_scales(b);
      const int64_t first =
          kSplitTokens * row + kChunkTokens64 * (b / kChunkBlocks) + b % kChunkBlocks * 4;
      sums.add_block({memory_.weights[0] + first, memory_.weights[1] + first, kSplitTokens},
                     head_dim_, blocks_[b] + kPlanes * plane_ + 64 * column,
                     ahead(tile.num_blocks + b, tile.num_blocks) + 64 * column);
    }
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) {
        const __m512i dot = combine_dots(sums.high[r][c], sums.low[r][c]);
        accumulate(tile, to, row + r, column + c, {_mm512_cvtepi32_ps(dot)});
      }
    }
  }

  // The running maximum and sum, and what old and new accumulators are multiplied with.
  void merge_sums(int split, const RowTile& tile, int r, float* old_factor, float* new_factor) {
    float& total_max = memory_.total_max[tile.first + r];
    float& total_sum = memory_.total_sum[tile.first + r];
    if (split == 0) {
      total_max = tile.max[r];
      total_sum = tile.sum[r];
      return;
    }
    const float m = total_max > tile.max[r] ? total_max : tile.max[r];
    *old_factor = exp2_approx(F32x1{total_max - m}).v;
    *new_factor = exp2_approx(F32x1{tile.max[r] - m}).v;
    total_max = m;
    total_sum = __builtin_fmaf(tile.sum[r], *new_factor, total_sum * *old_factor);
  }

  void write_outputs(bool has_keys) {
    for (int r = 0; r < num_rows_; ++r) {
      if (has_keys && memory_.visible[r] > 0) {
        write_output(memory_.total + r * head_dim_, memory_.total_sum[r], head_dim_, output(r));
      } else {
        __builtin_memset(output(r), 0, head_dim_ * sizeof(float));
      }
    }
  }

  const AttentionArgs& args_;
  const AttentionTask& task_;
  const Context context_;
  TaskMemory& memory_;
  const int head_dim_;
  const int64_t plane_;  // bytes
  const int depth_;
  const int lines_per_block_;
  const int group_;
  const int num_rows_;
  const bool is_direct_;
  const std::byte* blocks_[kSplitBlocks];
  const std::byte* next_[kSplitBlocks];
  int num_next_ = 0;
  int next_block_ = 0;
  int next_line_ = 0;
};

template <KVFormat kFormat>
void run(const AttentionArgs& args, Worker& worker) {
  run_tasks(args, worker, [&](const AttentionTask& task, const AttentionTask* next) {
    Task<kFormat>(args, task, worker).run(next);
  });
}

}  // namespace

void attention(const AttentionArgs& args, Worker& worker) {
  switch (args.kv.format) {
    case KVFormat::kInt16Tiles:
      return run<KVFormat::kInt16Tiles>(args, worker);
    case KVFormat::kInt8Tiles:
      return run<KVFormat::kInt8Tiles>(args, worker);
    default:
      return avx512vnni::attention(args, worker);
  }
}

}  // namespace caudal::amx
