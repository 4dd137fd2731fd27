// Register-tile kernels of attention: scores, softmax and weighted values of up to six rows against
// one chunk of keys. A row is one query of one head; rows of a group share every load.
//
// Included by object files with different ISA flags after their simd_*.h; nothing is shared.
//
// Arithmetic, for a row and the chunks of a split in order (m = -inf, l = 0, a = 0 at its start):
//   s[t] = sum over d in order, by fma, of (q[d] * scale * log2 e) * k[t][d]
//   m'   = max(m, s[t] of the tokens that the row sees);  c = 2^(m - m');  p[t] = 2^(s[t] - m')
//   l    = fma(l, c, sum p), summed as 16 lanes ((p0 + p1) + (p2 + p3)), then lane i + 8, 4, 2, 1
//   a    = fma over tokens in order of p[t] * v[t], starting from a * c
// int8: q and w[t] = p[t] * v_scale[t] are rounded to 15 bits with one scale a row (and chunk); the
// dot products are integers, s[t] = (dot * q_scale) * k_scale[t] and a = fma(dot, w_scale, a * c).
#pragma once

#include "attention_schedule.h"
#include "kernels.h"
#include "numerics.h"

namespace caudal {
namespace {

constexpr int kRegisterRows = 6;
constexpr int kChunkBlocks = kChunkTokens / kBlockSize;
constexpr int kVectorBytes = 32;      // 16 halves or 32 int8 in the cache
constexpr int kWideVectorBytes = 64;  // the same as floats or int16
constexpr float kQuantMax15 = 32767.0f;
constexpr float kInfinity = __builtin_inff();

inline int min_int(int a, int b) { return a < b ? a : b; }
inline int max_int(int a, int b) { return a > b ? a : b; }

// f16 cache: one multiply-add takes one dimension of 16 keys, or 16 dimensions of one value.
struct HalfCache {
  using Vector = F32;
  using Element = float;
  static constexpr int kStep = 1;
  static Vector load(const std::byte* p) { return F32::load_half(p); }
  static Vector load_wide(const std::byte* p) { return F32::load(reinterpret_cast<const float*>(p)); }
  static void store_wide(Vector x, std::byte* p) { x.store(reinterpret_cast<float*>(p)); }
  static Vector multiply_add(Vector a, Vector b, Vector sum) { return F32::fma(a, b, sum); }
};

// int8 cache: one multiply-add takes pairs of dimensions, or pairs of values.
struct Int8Cache {
  using Vector = I32;
  using Element = int32_t;
  static constexpr int kStep = 2;
  static Vector load(const std::byte* p) { return I32::load_pairs(p); }
  static Vector load_wide(const std::byte* p) { return I32::load(reinterpret_cast<const int32_t*>(p)); }
  static void store_wide(Vector x, std::byte* p) { x.store(reinterpret_cast<int32_t*>(p)); }
  static Vector multiply_add(Vector a, Vector b, Vector sum) { return I32::dot(a, b, sum); }
};

// One head's keys or values of a chunk, either in the cache (`block`) or widened into a panel,
// which only uses block[0]. `next` is what is needed one chunk later.
struct Source {
  const std::byte* block[kChunkBlocks];
  const std::byte* next[kChunkBlocks];
};

// Weights of a row are kChunkTokens floats apart, also where they are int16 pairs.
struct ValueArgs {
  const Source* source;
  const void* weights;
  int first;  // steps: tokens, or pairs of tokens
  int last;
  int head_dim;
  float* acc;  // [rows, head_dim]
  const float* correction;
  const float* weight_scale;
};

// scores[r][16 b + t], r < kRows, of kBlocks blocks from `first` on; rows of q and of scores are
// q_stride and kChunkTokens elements apart.
template <class Cache, bool kIsWide, int kRows, int kBlocks>
inline void score_tile(const Source& keys, int first, int num_steps,
                       const typename Cache::Element* q, int64_t q_stride, void* scores) {
  using Vector = typename Cache::Vector;
  Vector sum[kRows][kBlocks];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) sum[r][b] = Vector::zero();
  }
  const auto step = [&](int64_t s) __attribute__((always_inline)) {
    Vector k[kBlocks];
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      k[b] = kIsWide ? Cache::load_wide(keys.block[0] + kWideVectorBytes * (s * kChunkBlocks + first + b))
                     : Cache::load(keys.block[first + b] + kVectorBytes * s);
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const Vector x = Vector::set1(q[r * q_stride + s]);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) sum[r][b] = Cache::multiply_add(x, k[b], sum[r][b]);
    }
  };
  for (int64_t s = 0; s < num_steps; s += 2) {
    if constexpr (!kIsWide) {
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) prefetch(keys.next[first + b] + kVectorBytes * s);
    }
    step(s);
    step(s + 1);
  }
  auto* out = static_cast<typename Cache::Element*>(scores) + kLanes * first;
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) sum[r][b].store(out + r * kChunkTokens + kLanes * b);
  }
}

// The same for any number of blocks: as many at once as the registers hold.
template <class Cache, bool kIsWide, int kRows, int kBlocks, int kFirst = 0>
void score_blocks(const Source& keys, int num_steps, const typename Cache::Element* q,
                  int64_t q_stride, void* scores) {
  constexpr int kLeft = kBlocks - kFirst;
  constexpr int kCount = kLeft < tile_width(kRows) ? kLeft : tile_width(kRows);
  score_tile<Cache, kIsWide, kRows, kCount>(keys, kFirst, num_steps, q, q_stride, scores);
  if constexpr (kCount < kLeft) {
    score_blocks<Cache, kIsWide, kRows, kBlocks, kFirst + kCount>(keys, num_steps, q, q_stride, scores);
  }
}

// acc[r] = acc[r] * correction[r] + sum over tokens of weight[r][t] * v[t], for kVectors x 16 columns
// and the tokens of steps first .. last - 1. Values lie at column offset `column` of their rows.
template <class Cache, bool kIsWide, int kRows, int kVectors>
void value_tile(const ValueArgs& args, int column) {
  using Vector = typename Cache::Vector;
  using Element = typename Cache::Element;
  constexpr int kStepsPerBlock = kBlockSize / Cache::kStep;
  constexpr int kBytes = kIsWide ? kWideVectorBytes : kVectorBytes;
  const int64_t row_bytes = static_cast<int64_t>(args.head_dim / kLanes) * kBytes;
  const int64_t offset = static_cast<int64_t>(column / kLanes) * kBytes;
  const Element* weights = static_cast<const Element*>(args.weights);
  Vector sum[kRows][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) {
      if constexpr (Cache::kStep == 1) {
        sum[r][c] = F32::load(args.acc + r * args.head_dim + column + kLanes * c) *
                    F32::set1(args.correction[r]);
      } else {
        sum[r][c] = Vector::zero();
      }
    }
  }
  for (int s = args.first; s < args.last;) {
    const int b = s / kStepsPerBlock;
    const int end = min_int(args.last, (b + 1) * kStepsPerBlock);
    const int64_t skip = offset + (kIsWide ? s : s % kStepsPerBlock) * row_bytes;
    const std::byte* v = args.source->block[kIsWide ? 0 : b] + skip;
    const std::byte* next = args.source->next[b] + skip;
    for (; s < end; ++s, v += row_bytes, next += row_bytes) {
      if constexpr (!kIsWide) {
#pragma GCC unroll 2
        for (int c = 0; c < kVectors; c += 2) prefetch(next + kVectorBytes * c);
      }
      Vector x[kVectors];
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) {
        x[c] = kIsWide ? Cache::load_wide(v + kBytes * c) : Cache::load(v + kBytes * c);
      }
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const Vector w = Vector::set1(weights[r * kChunkTokens + s]);
#pragma GCC unroll 4
        for (int c = 0; c < kVectors; ++c) sum[r][c] = Cache::multiply_add(w, x[c], sum[r][c]);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) {
      float* acc = args.acc + r * args.head_dim + column + kLanes * c;
      if constexpr (Cache::kStep == 1) {
        sum[r][c].store(acc);
      } else {
        const F32 old = F32::load(acc) * F32::set1(args.correction[r]);
        F32::fma(sum[r][c].to_float(), F32::set1(args.weight_scale[r]), old).store(acc);
      }
    }
  }
}

// All columns, in passes as wide as the registers allow and about equally wide.
template <class Cache, bool kIsWide, int kRows>
void value_rows(const ValueArgs& args) {
  constexpr int kMax = tile_width(kRows);
  const int num_vectors = args.head_dim / kLanes;
  const int num_passes = (num_vectors + kMax - 1) / kMax;
  for (int pass = 0; pass < num_passes; ++pass) {
    const int begin = num_vectors * pass / num_passes;
    const int width = num_vectors * (pass + 1) / num_passes - begin;
    const int column = begin * kLanes;
    if (width == 1) value_tile<Cache, kIsWide, kRows, 1>(args, column);
    if constexpr (kMax >= 2) {
      if (width == 2) value_tile<Cache, kIsWide, kRows, 2>(args, column);
    }
    if constexpr (kMax >= 4) {
      if (width == 3) value_tile<Cache, kIsWide, kRows, 3>(args, column);
      if (width == 4) value_tile<Cache, kIsWide, kRows, 4>(args, column);
    }
  }
}

// What a row carries from chunk to chunk, and what the softmax tells the values.
struct RowState {
  alignas(64) float max[kMaxTaskRows];
  float sum[kMaxTaskRows];
  float correction[kMaxTaskRows];
  float weight_scale[kMaxTaskRows];  // int8
  float query_scale[kMaxTaskRows];   // int8
  float total_max[kMaxTaskRows];
  float total_sum[kMaxTaskRows];
  int32_t visible[kMaxTaskRows];  // keys that the row sees, from position 0
};

// Tokens of the chunk starting at `begin` that the row sees; <= 0: none.
inline int visible_in_chunk(const RowState& rows, int row, int begin) {
  return min_int(rows.visible[row] - begin, kChunkTokens);
}

// int8 scales of 16 keys and values each, per block of a chunk; null for f16.
struct ChunkScales {
  const float* key[kChunkBlocks];
  const float* value[kChunkBlocks];
};

// Turns a row's dot products into scores, -inf for tokens at or above `limit`; returns the maximum.
template <class Cache, int kBlocks>
inline float finish_scores(float* scores, const ChunkScales& scales, float query_scale, int limit) {
  const bool is_cut = limit < kLanes * kBlocks;
  F32 largest = F32::set1(-kInfinity);
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
    F32 x;
    if constexpr (Cache::kStep == 1) {
      x = F32::load(scores + kLanes * b);
    } else {
      const F32 dot = I32::load(reinterpret_cast<const int32_t*>(scores) + kLanes * b).to_float();
      x = (dot * F32::set1(query_scale)) * F32::load(scales.key[b]);
    }
    if (is_cut) {
      const int count = max_int(0, min_int(kLanes, limit - kLanes * b));
      x = F32::keep_first(x, count, F32::set1(-kInfinity));
    }
    if (is_cut || Cache::kStep == 2) x.store(scores + kLanes * b);
    largest = F32::max(largest, x);
  }
  return largest.max_lane();
}

// Turns a row's scores into p[t]; returns their sum.
template <int kBlocks>
inline float exponentials(float* scores, float max) {
  F32 p[kBlocks];
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
    p[b] = exp2_approx(F32::load(scores + kLanes * b) - F32::set1(max));
    p[b].store(scores + kLanes * b);
  }
  F32 sum = p[0];
  if constexpr (kBlocks == 2) sum = p[0] + p[1];
  if constexpr (kBlocks == 3) sum = (p[0] + p[1]) + p[2];
  if constexpr (kBlocks == 4) sum = (p[0] + p[1]) + (p[2] + p[3]);
  return sum.sum_lanes();
}

// int8: p[t] -> p[t] * v_scale[t], 0 from `limit` on; returns the largest.
template <int kBlocks>
inline float scale_weights(float* weights, const ChunkScales& scales, int limit) {
  F32 largest = F32::zero();
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
    F32 w = F32::load(weights + kLanes * b) * F32::load(scales.value[b]);
    const int count = max_int(0, min_int(kLanes, limit - kLanes * b));
    if (count < kLanes) w = F32::keep_first(w, count, F32::zero());
    w.store(weights + kLanes * b);
    largest = F32::max_bits(largest, w);
  }
  return largest.max_lane_bits();
}

// int8: the rows' weights as int16 pairs in place of the floats.
template <int kBlocks>
inline void quantize_weights(float* weights, int num_rows, const float* largest, float* scale) {
  alignas(64) float inverse[kLanes];
  const F32 top = F32::load(largest);
  const F32 least = F32::set1(kQuantMin);
  F32::zero_if_less(top, least, F32::set1(kQuantMax15) / top).store(inverse);
  alignas(64) float new_scale[kLanes];
  F32::zero_if_less(top, least, top * F32::set1(1.0f / kQuantMax15)).store(new_scale);
  for (int r = 0; r < num_rows; ++r) {
    float* row = weights + r * kChunkTokens;
    scale[r] = new_scale[r];
    const F32 factor = F32::set1(inverse[r]);
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      const F32 w = F32::load(row + kLanes * b) * factor;
      store_int16(w, reinterpret_cast<int16_t*>(row) + kLanes * b);
    }
  }
}

// Online softmax of up to kRegisterRows rows from `row` on against the chunk starting at `begin`;
// scores become weights. Rows that see nothing of the chunk keep their state (correction 1).
template <class Cache, int kBlocks>
void softmax_rows(RowState& rows, int row, int num_rows, int begin, const ChunkScales& scales,
                  float* scores) {
  alignas(64) float old_max[kLanes] = {};
  alignas(64) float new_max[kLanes] = {};
  alignas(64) float sum[kLanes] = {};
  alignas(64) float largest[kLanes] = {};
  alignas(64) float correction[kLanes];
  for (int r = 0; r < num_rows; ++r) {
    const int limit = visible_in_chunk(rows, row + r, begin);
    if (limit <= 0) continue;
    const float m = finish_scores<Cache, kBlocks>(scores + r * kChunkTokens, scales,
                                                  rows.query_scale[row + r], limit);
    old_max[r] = rows.max[row + r];
    new_max[r] = old_max[r] > m ? old_max[r] : m;
    rows.max[row + r] = new_max[r];
  }
  for (int r = 0; r < num_rows; ++r) {
    float* p = scores + r * kChunkTokens;
    const int limit = visible_in_chunk(rows, row + r, begin);
    if (limit > 0) sum[r] = exponentials<kBlocks>(p, new_max[r]);
    if constexpr (Cache::kStep == 2) largest[r] = scale_weights<kBlocks>(p, scales, limit);
  }
  exp2_approx(F32::load(old_max) - F32::load(new_max)).store(correction);
  for (int r = 0; r < num_rows; ++r) {
    rows.correction[row + r] = correction[r];
    rows.sum[row + r] = __builtin_fmaf(rows.sum[row + r], correction[r], sum[r]);
  }
  if constexpr (Cache::kStep == 2) {
    quantize_weights<kBlocks>(scores, num_rows, largest, rows.weight_scale + row);
  }
}

}  // namespace
}  // namespace caudal
