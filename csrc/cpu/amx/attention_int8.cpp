// Attention on the tile unit over an int8 cache (arithmetic in attention_tiles.h).
//
// Sixteen rows at a time meet a split of keys: the tile unit makes the integer products of 16 keys
// while the vector unit turns those of the 16 before into scores; softmax runs on the whole split;
// then the tile unit multiplies the rounded weights with 64 values at a time. Keys are tile operands
// as they lie in the cache. Values are copied side by side, as a tile takes four blocks of them; the
// rows of a task share the copy. A few rows (decoding) are left to the vector unit, which takes
// values where they are.
#include "../simd_avx512.h"
#include "../attention_tiles.h"
#include "attention_kernels.h"
#include "attention_rows.h"
#include "attention_task.h"
#include "tile_products.h"

namespace caudal::amx {
namespace {

constexpr int kMaxDirectRows = 8;
constexpr int kChunkTokens64 = 64;  // values of one tile
constexpr int kChunkBlocks = kChunkTokens64 / kBlockSize;

// A thread's scratch memory for one task.
struct TaskMemory {
  TaskRows rows;
  alignas(64) uint8_t query[2][kMaxTaskRows * kMaxHeadDim];  // high bytes, low bytes
  alignas(64) float query_scale[kMaxTaskRows];
  alignas(64) std::byte values[kSplitTokens * kMaxHeadDim];  // [chunk][columns] tiles
  // Of one tile of rows:
  alignas(64) float scores[kTileRows * kSplitTokens];
  alignas(64) uint8_t weights[2][kTileRows * kSplitTokens];  // high bytes, low bytes
  float weight_scale[kTileRows];
  Dots dots[2];
};

// Bytes of a query that one tile multiplies: the largest even share of at most 64.
inline int query_depth(int head_dim) {
  int parts = (head_dim + 63) / 64;
  while (head_dim % (4 * parts) != 0) ++parts;
  return head_dim / parts;
}

class Task : public TaskBase {
 public:
  Task(const AttentionArgs& args, const AttentionTask& task, Worker& worker)
      : TaskBase(args, task, memory_of(worker).rows, 1, 2 * kBlockSize * 4, kMaxDirectRows),
        memory_(memory_of(worker)),
        depth_(query_depth(head_dim_)) {}

  void run(const AttentionTask* next) {
    load_queries();
    for (int split = first_split_; split < end_split_; ++split) {
      start_split(split, next);
      if (!is_direct_) load_values();
      for (int row = 0; row < num_rows_; row += kTileRows) run_tile(split, row);
    }
    if (!is_direct_) release_tiles();
    write_outputs();
  }

 private:
  static TaskMemory& memory_of(Worker& worker) {
    return *reinterpret_cast<TaskMemory*>(worker.scratch);
  }

  void load_queries() {
    for (int r = 0; r < num_rows_; ++r) {
      alignas(32) int16_t both[kMaxHeadDim];
      memory_.query_scale[r] = quantize_query(args_.q + output_offset(r), head_dim_,
                                              args_.scale * kLog2E, kQuantMax16, both);
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

  // The values of a split as tiles: four tokens of each dimension are a row; the weights have their
  // order.
  void load_values() {
    const int num_columns = head_dim_ / kLanes;
    for (int b = 0; b < num_blocks_; ++b) {
      const std::byte* values = blocks_[b] + value_offset_;
      prefetch_lines(lines_per_block_ / 2);
      std::byte* tiles = value_tile(b / kChunkBlocks, 0) + 64 * (b % kChunkBlocks);
      for (int i = 0; i < kBlockSize / 4; ++i, tiles += 64 * kChunkBlocks) {
        for (int c = 0; c < num_columns; ++c, values += 64) {
          _mm512_store_si512(tiles + c * kTileBytes, _mm512_loadu_si512(values));
        }
      }
    }
  }

  const float* key_scales(int block) const {
    return reinterpret_cast<const float*>(blocks_[block] + 2 * value_offset_);
  }
  const float* value_scales(int block) const { return key_scales(block) + kBlockSize; }

  std::byte* value_tile(int chunk, int column) const {
    return memory_.values + (chunk * (head_dim_ / kLanes) + column) * kTileBytes;
  }

  void prefetch_scales(int block) const {
    if (block >= num_next_) return;
    prefetch(next_[block] + 2 * value_offset_);
    prefetch(next_[block] + 2 * value_offset_ + 64);
  }

  void run_tile(int split, int first) {
    RowTile tile = tile_at(split, first);
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
      multiply<kPair, true>(keys);
    } else {
      for (int d = 0; d < head_dim_; d += depth_) {
        load_query(tile, d);
        multiply<kPair, true>(keys + d * kBlockSize);
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
      s = keep_seen(s, block, tile.limit[row], F32::set1(-kInfinity));
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
        multiply_keys_direct<kRows>(query, head_dim_, blocks_[b], ahead(b, tile.num_blocks), dots);
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
      if (kBlockSize * (b + 1) > limit) w = keep_seen(w, b, limit, F32::zero());
      largest = F32::max_bits(largest, w);
      w.store(scores + kBlockSize * b);
    }
    for (int b = tile.num_blocks; b < num_chunks * kChunkBlocks; ++b) {
      F32::zero().store(scores + kBlockSize * b);
    }
    const float top = largest.max_lane_bits();
    const bool is_tiny = top < kQuantMin;
    tile.sum[row] = sum.sum_lanes();
    memory_.weight_scale[row] = is_tiny ? 0.0f : top * (1.0f / kQuantMax16);
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
      multiply<0, false>(value_tile(c, column));
      if constexpr (kPairs == 2) multiply<1, false>(value_tile(c, column + 1));
    }
    store_products<0>(memory_.dots[0]);
    if constexpr (kPairs == 2) store_products<1>(memory_.dots[1]);
  }

  void add_values(int split, RowTile& tile) {
    Accumulators to;
    merge_tile(split, tile, to);
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
          accumulate(tile, to, r, c + i,
                     dot_row(memory_.dots[i], r) * F32::set1(memory_.weight_scale[r]));
        }
      }
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
    DirectValues<kRows, kColumns> sums;
    for (int b = 0; b < tile.num_blocks; ++b) {
      prefetch_scales(b);
      const int64_t first =
          kSplitTokens * row + kChunkTokens64 * (b / kChunkBlocks) + b % kChunkBlocks * 4;
      sums.add_block({memory_.weights[0] + first, memory_.weights[1] + first, kSplitTokens},
                     head_dim_, blocks_[b] + value_offset_ + 64 * column,
                     ahead(tile.num_blocks + b, tile.num_blocks) + 64 * column);
    }
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) {
        const __m512i dot = combine_dots(sums.high[r][c], sums.low[r][c]);
        const F32 factor = F32::set1(memory_.weight_scale[row + r]);
        accumulate(tile, to, row + r, column + c, F32{_mm512_cvtepi32_ps(dot)} * factor);
      }
    }
  }

  TaskMemory& memory_;
  const int depth_;  // bytes of a query that one tile multiplies
};

}  // namespace

void attention_int8(const AttentionArgs& args, Worker& worker) {
  run_tasks(args, worker, [&](const AttentionTask& task, const AttentionTask* next) {
    Task(args, task, worker).run(next);
  });
}

}  // namespace caudal::amx
