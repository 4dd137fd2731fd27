// Attention on the tile unit over a bf16 cache (arithmetic in attention_tiles.h).
//
// Sixteen rows at a time meet a split of keys. While the vector unit makes their weights, the tile unit
// multiplies keys with the next sixteen rows, and values with the weights of those before, a few
// instructions at a time: a core whose other hardware thread is busy does not look far ahead. Keys are
// tile operands as they lie in the cache. Values are copied side by side, as a tile takes two blocks
// of them; the rows of a task share the copy. A few rows (decoding) are left to the vector unit, which
// takes values where they are, with the tile unit's chains of sums.
#include "../simd_avx512.h"
#include "../attention_tiles.h"
#include "attention_kernels.h"
#include "attention_task.h"
#include "bf16_lanes.h"
#include "tile_unit.h"

namespace caudal::amx {
namespace {

constexpr int kMaxDirectRows = 5;
constexpr int kPairTokens = 32;  // values of one tile
constexpr int kPairBlocks = kPairTokens / kBlockSize;
constexpr int kScoreStride = kSplitTokens + kLanes;  // so that rows differ in their cache sets
constexpr int kColumns = 4;                          // of 16 values that are summed at a time
constexpr int kTiles = 3;                            // of rows under way

struct TaskMemory {
  TaskRows rows;
  alignas(64) uint16_t query[kMaxTaskRows * kMaxHeadDim];
  alignas(64) float direct_query[kMaxDirectRows * kMaxHeadDim];
  alignas(64) std::byte values[2 * kSplitTokens * kMaxHeadDim];  // [pair of blocks][columns] tiles
  alignas(64) float scores[2][kTileRows * kScoreStride];         // of this tile and the next
  alignas(64) uint16_t weights[2][kTileRows * kSplitTokens];
  alignas(64) float direct_weights[kMaxDirectRows * kSplitTokens];
  alignas(64) float sums[kColumns][kTileRows * kLanes];
};

// ------------------------------------------------------------------ the tile unit
//
// Registers 0 to 3 hold scores or sums, 4 and 5 queries or weights, 6 and 7 keys or values.

// `depth` values are multiplied per tile.
void configure(int num_rows, int depth) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? 2 * depth : 64);
    config.rows[i] = static_cast<uint8_t>(i < 6 ? num_rows : depth / 2);
  }
  load_config(config);
}

class Task : public TaskBase {
 public:
  Task(const AttentionArgs& args, const AttentionTask& task, Worker& worker)
      : TaskBase(args, task, memory_of(worker).rows, 2, 0, kMaxDirectRows),
        memory_(memory_of(worker)),
        depth_(bf16_depth(args.kv.head_dim)),
        num_columns_(args.kv.head_dim / kLanes) {}

  void run(const AttentionTask* next) {
    load_queries();
    for (int split = first_split_; split < end_split_; ++split) {
      start_split(split, next);
      if (is_direct_) {
        run_direct(split);
      } else {
        load_values();
        run_tiles(split);
      }
    }
    if (!is_direct_) release_tiles();
    write_outputs();
  }

 private:
  static TaskMemory& memory_of(Worker& worker) {
    return *reinterpret_cast<TaskMemory*>(worker.scratch);
  }

  void load_queries() {
    const F32 factor = F32::set1(args_.scale * kLog2E);
    for (int r = 0; r < num_rows_; ++r) {
      const float* q = args_.q + output_offset(r);
      for (int d = 0; d < head_dim_; d += kLanes) {
        const __m256bh rounded = _mm512_cvtneps_pbh((F32::load(q + d) * factor).v);
        const auto bits = reinterpret_cast<__m256i>(rounded);
        if (is_direct_) {
          widen(bits).store(memory_.direct_query + r * head_dim_ + d);
        } else {
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(memory_.query + r * head_dim_ + d), bits);
        }
      }
    }
  }

  // ---------------------------------------------------------------- many rows

  std::byte* value_tile(int pair, int column) const {
    return memory_.values + (int64_t{pair} * num_columns_ + column) * kTileBytes;
  }

  // Values of a split as tiles of two blocks, the last perhaps with one and zeros.
  void load_values() {
    for (int b = 0; b < num_blocks_; ++b) {
      prefetch_lines(lines_per_block_ / 2);
      const std::byte* values = blocks_[b] + value_offset_;
      std::byte* tiles = value_tile(b / kPairBlocks, 0) + kTileBytes / 2 * (b % kPairBlocks);
      for (int pair = 0; pair < kBlockSize / 2; ++pair, tiles += 64) {
        for (int c = 0; c < num_columns_; ++c, values += 64) {
          _mm512_store_si512(tiles + c * kTileBytes, _mm512_loadu_si512(values));
        }
      }
    }
    if (num_blocks_ % kPairBlocks == 0) return;
    for (int c = 0; c < num_columns_; ++c) {
      __builtin_memset(value_tile(num_blocks_ / kPairBlocks, c) + kTileBytes / 2, 0, kTileBytes / 2);
    }
  }

  // Three tiles of rows are under way: the one whose weights are made, the next one's scores, and the
  // weighted values of the one before.
  void run_tiles(int split) {
    if (split == first_split_) configure(min_int(kTileRows, num_rows_), kPairTokens);
    const int num_tiles = (num_rows_ + kTileRows - 1) / kTileRows;
    for (int i = -1; i <= num_tiles; ++i) {
      if (i + 1 < num_tiles) start_keys(split, i + 1);
      if (i > 0) start_values(split, i - 1);
      if (i >= 0 && i < num_tiles) {
        make_weights<false>(tiles_[i % kTiles], scores(i), weights(i), [this] { step(); });
      }
      while (step()) {
      }
    }
  }

  float* scores(int index) const { return memory_.scores[index % 2]; }
  uint16_t* weights(int index) const { return memory_.weights[index % 2]; }

  // A few instructions of the tile unit; false if there is nothing left.
  [[gnu::always_inline]] bool step() {
    if (keys_.block < keys_.num_blocks) {
      step_keys();
    } else if (values_.column < values_.end_column) {
      step_values();
    } else {
      return false;
    }
    return true;
  }

  const uint16_t* query(int dim) const {
    return memory_.query + int64_t{keys_.first} * head_dim_ + dim;
  }

  void start_keys(int split, int index) {
    RowTile& tile = tiles_[index % kTiles];
    tile = tile_at(split, index * kTileRows);
    keys_ = {tile.first, tile.num_blocks, scores(index), 0, 0};
    if (depth_ != kPairTokens) {
      configure(min_int(kTileRows, num_rows_), depth_);
      while (keys_.block < keys_.num_blocks) step_keys();
      configure(min_int(kTileRows, num_rows_), kPairTokens);
    } else if (head_dim_ <= 2 * depth_) {
      load_tile<4>(query(0), 2 * head_dim_);
      if (head_dim_ > depth_) load_tile<5>(query(depth_), 2 * head_dim_);
    }
  }

  // Adds a part of the dimensions to the scores with a block of keys, or stores them.
  void step_keys() {
    const int dim = keys_.dim;
    if (dim == head_dim_) {
      store_tile<0>(keys_.scores + kBlockSize * keys_.block, 4 * kScoreStride);
      ++keys_.block;
      keys_.dim = 0;
      return;
    }
    if (dim == 0) zero_tile<0>();
    load_tile<6>(blocks_[keys_.block] + int64_t{2} * kBlockSize * dim);
    if (dim == 0 && head_dim_ <= 2 * depth_ && depth_ == kPairTokens) {
      multiply_bf16<0, 4, 6>();
    } else if (head_dim_ <= 2 * depth_ && depth_ == kPairTokens) {
      multiply_bf16<0, 5, 6>();
    } else {
      load_tile<5>(query(dim), 2 * head_dim_);
      multiply_bf16<0, 5, 6>();
    }
    keys_.dim += depth_;
  }

  void start_values(int split, int index) {
    const RowTile& tile = tiles_[index % kTiles];
    const int num_pairs = (tile.num_blocks + kPairBlocks - 1) / kPairBlocks;
    values_.index = index;
    values_.num_pairs = num_pairs;
    values_.end_column = num_pairs > 0 ? num_columns_ : 0;
    values_.column = 0;
    values_.step = 0;
    if (num_pairs > 0) merge_tile(split, tile, values_.to);
  }

  // Adds the weighted values of two blocks, half of kColumns x 16 columns of them; or takes the sums
  // of four rows to where they go.
  void step_values() {
    const int pair = values_.step / 2;
    const int count = min_int(kColumns, num_columns_ - values_.column);
    if (pair < values_.num_pairs) {
      const std::byte* tile = value_tile(pair, values_.column);
      if (values_.step % 2 == 0) {
        if (pair == 0) zero_sums();
        load_tile<4>(weights(values_.index) + kPairTokens * pair, 2 * kSplitTokens);
        multiply_pair<0>(tile, count);
      } else {
        multiply_pair<2>(tile, count);
      }
      ++values_.step;
    } else if (values_.step == 2 * values_.num_pairs) {
      store_tile<0>(memory_.sums[0]);
      if (count > 1) store_tile<1>(memory_.sums[1]);
      if (count > 2) store_tile<2>(memory_.sums[2]);
      if (count > 3) store_tile<3>(memory_.sums[3]);
      ++values_.step;
    } else {
      const int row = 4 * (values_.step - 2 * values_.num_pairs - 1);
      add_rows(row, count);
      ++values_.step;
      if (row + 4 < tiles_[values_.index % kTiles].num_rows) return;
      values_.column += count;
      values_.step = 0;
    }
  }

  static void zero_sums() {
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
  }

  template <int kFirst>
  static void multiply_pair(const std::byte* tile, int count) {
    if (count <= kFirst) return;
    load_tile<6>(tile + kFirst * kTileBytes);
    multiply_bf16<kFirst, 4, 6>();
    if (count <= kFirst + 1) return;
    load_tile<7>(tile + (kFirst + 1) * kTileBytes);
    multiply_bf16<kFirst + 1, 4, 7>();
  }

  void add_rows(int first, int count) {
    const RowTile& tile = tiles_[values_.index % kTiles];
    const int end = min_int(first + 4, tile.num_rows);
    for (int r = first; r < end; ++r) {
      for (int i = 0; i < count; ++i) {
        accumulate(tile, values_.to, r, values_.column + i, F32::load(memory_.sums[i] + kLanes * r));
      }
    }
  }

  // ---------------------------------------------------------------- weights

  // Scores of a tile's rows become rounded weights, zero for tokens that a row does not see and up to
  // an even number of blocks. Calls `step` now and then.
  template <bool kDirect, class Step>
  void make_weights(RowTile& tile, float* scores, uint16_t* weights, const Step& step) {
    if (tile.num_blocks == 0) return;
    const int num_even = (tile.num_blocks + 1) / 2 * 2;
    F32 reduced[kTileRows];
    for (int r = 0; r < tile.num_rows; ++r) {
      float* row = scores + r * kScoreStride;
      for (int b = tile.limit[r] / kBlockSize; b < num_even; ++b) {
        float* block = row + kBlockSize * b;
        keep_seen(F32::load(block), b, tile.limit[r], F32::set1(-kInfinity)).store(block);
      }
      F32 max0 = F32::load(row);
      F32 max1 = F32::load(row + kLanes);
      for (int b = 2; b < num_even; b += 2) {
        max0 = F32::max(max0, F32::load(row + kLanes * b));
        max1 = F32::max(max1, F32::load(row + kLanes * b + kLanes));
      }
      reduced[r] = F32::max(max0, max1);
      step();
    }
    for (int r = tile.num_rows; r < kTileRows; ++r) reduced[r] = F32::zero();
    reduce_rows(reduced, [](F32 a, F32 b) { return F32::max(a, b); }).store(tile.max);
    for (int r = 0; r < tile.num_rows; ++r) {
      const F32 max = F32::set1(tile.limit[r] > 0 ? tile.max[r] : 0.0f);
      const float* row = scores + r * kScoreStride;
      F32 sum0 = F32::zero();
      F32 sum1 = F32::zero();
      const auto make_pair = [&](int b) {
        const F32 p0 = exp2_coarse(F32::load(row + kLanes * b) - max);
        const F32 p1 = exp2_coarse(F32::load(row + kLanes * b + kLanes) - max);
        sum0 = sum0 + p0;
        sum1 = sum1 + p1;
        const __m512i rounded = round_pair(p0, p1);
        if constexpr (kDirect) {
          float* w = memory_.direct_weights + r * kSplitTokens + kLanes * b;
          widen(_mm512_castsi512_si256(rounded)).store(w);
          widen(_mm512_extracti64x4_epi64(rounded, 1)).store(w + kLanes);
        } else {
          _mm512_store_si512(weights + r * kSplitTokens + kLanes * b, rounded);
        }
      };
      int b = 0;
      for (; b + 4 <= num_even; b += 4) {
        make_pair(b);
        make_pair(b + 2);
        step();
      }
      if (b < num_even) make_pair(b);
      reduced[r] = sum0 + sum1;
    }
    reduce_rows(reduced, [](F32 a, F32 b) { return a + b; }).store(tile.sum);
  }

  static F32 widen(__m256i x) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
  }

  // ---------------------------------------------------------------- a few rows

  void run_direct(int split) {
    RowTile tile = tile_at(split, 0);
    if (tile.num_blocks == 0) return;
    float* scores = memory_.scores[0];
    for_each_row_group(tile, [&]<int kRows>(int first) {
      int b = 0;
      for (; b + 2 <= tile.num_blocks; b += 2) score_direct<kRows, 2>(first, b, tile.num_blocks);
      if (b < tile.num_blocks) score_direct<kRows, 1>(first, b, tile.num_blocks);
    });
    make_weights<true>(tile, scores, nullptr, [] {});
    Accumulators to;
    merge_tile(split, tile, to);
    for_each_row_group(tile, [&]<int kRows>(int first) { add_direct<kRows>(tile, to, first); });
  }

  // Scores of kRows rows with kBlocks blocks of keys.
  template <int kRows, int kBlocks>
  void score_direct(int first, int block, int num_blocks) {
    const std::byte* keys[kBlocks];
    const std::byte* later[kBlocks];
    F32 total[kRows][kBlocks];
#pragma GCC unroll 2
    for (int b = 0; b < kBlocks; ++b) {
      keys[b] = blocks_[block + b];
      later[b] = ahead(block + b, num_blocks);
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r) total[r][b] = F32::zero();
    }
    const float* q = memory_.direct_query + first * head_dim_;
    for (int part = 0; part < head_dim_; part += depth_) {
      Chains<kRows, kBlocks> chains;
      for (int d = part; d < part + depth_; d += 2) {
        __m512i k[kBlocks];
#pragma GCC unroll 2
        for (int b = 0; b < kBlocks; ++b) {
          prefetch_second(later[b] + 32 * d);
          k[b] = _mm512_loadu_si512(keys[b] + 32 * d);
        }
        chains.add(k, q + d, head_dim_);
      }
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int b = 0; b < kBlocks; ++b) total[r][b] = total[r][b] + chains.sum(r, b);
      }
    }
    float* scores = memory_.scores[0] + first * kScoreStride + kBlockSize * block;
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int b = 0; b < kBlocks; ++b) total[r][b].store(scores + r * kScoreStride + kBlockSize * b);
    }
  }

  // Weighted values of kRows rows, two blocks after two blocks.
  template <int kRows>
  void add_direct(const RowTile& tile, const Accumulators& to, int first) {
    alignas(64) float total[kRows * kMaxHeadDim];
    for (int b = 0; b < tile.num_blocks; b += kPairBlocks) {
      int c = 0;
      for (; c + 2 <= num_columns_; c += 2) add_pair<kRows, 2>(tile, first, b, c, total);
      if (c < num_columns_) add_pair<kRows, 1>(tile, first, b, c, total);
    }
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < num_columns_; ++c) {
        accumulate(tile, to, first + r, c, F32::load(total + r * kMaxHeadDim + kLanes * c));
      }
    }
  }

  template <int kRows, int kCount>
  [[gnu::always_inline]] void add_pair(const RowTile& tile, int first, int block, int column,
                                       float* total) const {
    Chains<kRows, kCount> chains;
    const int64_t line = int64_t{4} * head_dim_;
    const int end = min_int(block + kPairBlocks, tile.num_blocks);
    for (int b = block; b < end; ++b) {
      const std::byte* values = blocks_[b] + value_offset_ + 64 * column;
      const std::byte* later = ahead(tile.num_blocks + b, tile.num_blocks) + 64 * column;
      const float* w = memory_.direct_weights + first * kSplitTokens + kBlockSize * b;
      for (int t = 0; t < kBlockSize; t += 2, values += line, later += line) {
        __m512i v[kCount];
#pragma GCC unroll 2
        for (int c = 0; c < kCount; ++c) {
          prefetch_second(later + 64 * c);
          v[c] = _mm512_loadu_si512(values + 64 * c);
        }
        chains.add(v, w + t, kSplitTokens);
      }
    }
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int c = 0; c < kCount; ++c) {
        float* sum = total + r * kMaxHeadDim + kLanes * (column + c);
        const F32 before = block == 0 ? F32::zero() : F32::load(sum);
        (before + chains.sum(r, c)).store(sum);
      }
    }
  }

  // Scores that are being made.
  struct KeyWork {
    int first;  // row
    int num_blocks;
    float* scores;
    int block;
    int dim;
  };

  // Weighted values that are being made.
  struct ValueWork {
    int index;  // of the tile
    int num_pairs;
    int end_column;
    int column;
    int step;  // of these columns
    Accumulators to;
  };

  TaskMemory& memory_;
  const int depth_;
  const int num_columns_;
  RowTile tiles_[kTiles];
  KeyWork keys_ = {};
  ValueWork values_ = {};
};

}  // namespace

void attention_bf16(const AttentionArgs& args, Worker& worker) {
  run_tasks(args, worker, [&](const AttentionTask& task, const AttentionTask* next) {
    Task(args, task, worker).run(next);
  });
}

}  // namespace caudal::amx
