// Register-tile kernels of attention: scores, softmax and weighted values of up to six rows against
// one chunk of keys. A row is one query of one head; rows of a group share every load.
//
// Included by object files with different ISA flags after their simd_*.h; nothing is shared.
//
// Arithmetic, for a row and the chunks of a split in order (m = -inf, l = 0, a = 0 at its start):
//   s[t] = sum over d in order, by fma, of (q[d] * scale * log2 e) * k[t][d]
//   m'   = max(m, s[t] of the tokens that the row sees);  c = 2^(m - m');  p[t] = 2^(s[t] - m')
//   l    = fma(l, c, sum p), p summed over the blocks of the chunk by lane t % 16 as
//          (0 + 1) + (2 + 3), then lane i += lane i + 8, 4, 2, 1
//   a    = fma over tokens in order of p[t] * v[t], starting from a * c
// int8: q and w[t] = p[t] * v_scale[t] are rounded to 15 bits with one scale a row (and chunk); the
// dot products are integers, s[t] = (dot * q_scale) * k_scale[t] and a = fma(dot, w_scale, a * c).
#pragma once

#include "attention_common.h"

namespace caudal {
namespace {

constexpr int kMaxTileRows = 8;
constexpr int kChunkBlocks = kChunkTokens / kBlockSize;
constexpr int kVectorBytes = 32;      // 16 halves or 32 int8 in the cache
constexpr int kWideVectorBytes = 64;  // the same as floats or int16
constexpr float kQuantMax15 = 32767.0f;

// f16 cache: one multiply-add takes one dimension of 16 keys, or 16 dimensions of one value.
struct HalfCache {
  using Vector = F32;
  using Element = float;
  static constexpr int kStep = 1;
  static Vector load(const std::byte* p) { return F32::load_half(p); }
  static Vector load_wide(const std::byte* p) {
    return F32::load(reinterpret_cast<const float*>(p));
  }
  static void store_wide(Vector x, std::byte* p) { x.store(reinterpret_cast<float*>(p)); }
  static Vector multiply_add(Vector a, Vector b, Vector sum) { return F32::fma(a, b, sum); }
};

// int8 cache: one multiply-add takes pairs of dimensions, or pairs of values.
struct Int8Cache {
  using Vector = I32;
  using Element = int32_t;
  static constexpr int kStep = 2;
  static Vector load(const std::byte* p) { return I32::load_pairs(p); }
  static Vector load_wide(const std::byte* p) {
    return I32::load(reinterpret_cast<const int32_t*>(p));
  }
  static void store_wide(Vector x, std::byte* p) { x.store(reinterpret_cast<int32_t*>(p)); }
  static Vector multiply_add(Vector a, Vector b, Vector sum) { return I32::dot(a, b, sum); }
};

// One head's keys or values of a chunk, either in the cache (`block`) or widened into a panel,
// which only uses block[0]. `next` is what is needed one chunk later.
struct Source {
  const std::byte* block[kChunkBlocks];
  const std::byte* next[kChunkBlocks];
};

struct ScoreArgs {
  const void* query;  // [rows][num_steps] elements
  int num_steps;      // dimensions, or pairs of them
  float* scores;      // int32 for int8
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
void score_tile(const Source& keys, int first, const ScoreArgs& args) {
  using Vector = typename Cache::Vector;
  using Element = typename Cache::Element;
  constexpr int kStride = kIsWide ? kWideVectorBytes * kChunkBlocks : kVectorBytes;
  const auto* q = static_cast<const Element*>(args.query);
  const std::byte* block[kBlocks];
  const std::byte* next[kBlocks];
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
    block[b] = kIsWide ? keys.block[0] + kWideVectorBytes * (first + b) : keys.block[first + b];
    next[b] = keys.next[first + b];
  }
  Vector sum[kRows][kBlocks];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) sum[r][b] = Vector::zero();
  }
  const auto step = [&](int64_t s) __attribute__((always_inline)) {
    Vector k[kBlocks];
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      const std::byte* p =
          block[kIsWide ? 0 : b] + kStride * s + (kIsWide ? kWideVectorBytes * b : 0);
      k[b] = kIsWide ? Cache::load_wide(p) : Cache::load(p);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vector x = Vector::set1(q[r * args.num_steps + s]);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) sum[r][b] = Cache::multiply_add(x, k[b], sum[r][b]);
    }
  };
  for (int64_t s = 0; s < args.num_steps; s += 2) {
    if constexpr (!kIsWide) {
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) prefetch(next[b] + kVectorBytes * s);
    }
    step(s);
    step(s + 1);
  }
  auto* out = reinterpret_cast<Element*>(args.scores) + kLanes * first;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) sum[r][b].store(out + r * kChunkTokens + kLanes * b);
  }
}

// Calls f with the constant equal to n (1 .. kMax).
template <int kMax, class F>
inline void with_constant(int n, const F& f) {
  if constexpr (kMax > 1) {
    if (n < kMax) return with_constant<kMax - 1>(n, f);
  }
  f.template operator()<kMax>();
}

// Calls f<width>(begin) for passes over n items, at most kMax wide and about equally wide.
template <int kMax, class F>
inline void for_each_pass(int n, const F& f) {
  const int num_passes = (n + kMax - 1) / kMax;
  for (int pass = 0; pass < num_passes; ++pass) {
    const int begin = n * pass / num_passes;
    with_constant<kMax>(n * (pass + 1) / num_passes - begin,
                        [&]<int kWidth>() { f.template operator()<kWidth>(begin); });
  }
}

template <class Cache, bool kIsWide, int kRows>
void score_rows(const Source& keys, int num_blocks, const ScoreArgs& args) {
  for_each_pass<tile_width(kRows)>(num_blocks, [&]<int kBlocks>(int first) {
    score_tile<Cache, kIsWide, kRows, kBlocks>(keys, first, args);
  });
}

// acc[r] = acc[r] * correction[r] + sum over tokens of weight[r][t] * v[t], for kVectors x 16
// columns and the tokens of steps first .. last - 1. Values lie at column offset `column` of their
// rows.
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
#pragma GCC unroll 8
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
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vector w = Vector::set1(weights[r * kChunkTokens + s]);
#pragma GCC unroll 4
        for (int c = 0; c < kVectors; ++c) sum[r][c] = Cache::multiply_add(w, x[c], sum[r][c]);
      }
    }
  }
#pragma GCC unroll 8
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

template <class Cache, bool kIsWide, int kRows>
void value_rows(const ValueArgs& args) {
  for_each_pass<tile_width(kRows)>(args.head_dim / kLanes, [&]<int kVectors>(int first) {
    value_tile<Cache, kIsWide, kRows, kVectors>(args, first * kLanes);
  });
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

// f over all of x in the order ((0, 1), (2, 3)).
template <int kCount, class F>
inline F32 combine(const F32* x, const F& f) {
  if constexpr (kCount == 1) {
    return x[0];
  } else {
    return f(combine<kCount / 2>(x, f), combine<kCount / 2>(x + kCount / 2, f));
  }
}

// Turns a row's dot products into scores, -inf for tokens at or above `limit`; returns the maximum.
template <class Cache, int kVectors>
inline float finish_scores(float* scores, const ChunkScales& scales, float query_scale, int limit) {
  F32 x[kVectors];
#pragma GCC unroll 4
  for (int b = 0; b < kVectors; ++b) {
    if constexpr (Cache::kStep == 1) {
      x[b] = F32::load(scores + kLanes * b);
    } else {
      const F32 dot = I32::load(reinterpret_cast<const int32_t*>(scores) + kLanes * b).to_float();
      x[b] = (dot * F32::set1(query_scale)) * F32::load(scales.key[b]);
    }
  }
  const bool is_cut = limit < kLanes * kVectors;
  if (is_cut) {
#pragma GCC unroll 4
    for (int b = 0; b < kVectors; ++b) {
      const int count = max_int(0, min_int(kLanes, limit - kLanes * b));
      x[b] = F32::keep_first(x[b], count, F32::set1(-kInfinity));
    }
  }
  if (is_cut || Cache::kStep == 2) {
#pragma GCC unroll 4
    for (int b = 0; b < kVectors; ++b) x[b].store(scores + kLanes * b);
  }
  return combine<kVectors>(x, [](F32 a, F32 b) { return F32::max(a, b); }).max_lane();
}

struct WeightSums {
  float sum;      // of p
  float largest;  // int8: of p * v_scale
};

// Turns a row's scores into p, or p * v_scale for int8.
template <class Cache, int kVectors>
inline WeightSums make_weights(float* scores, const ChunkScales& scales, float max, int limit) {
  F32 x[kVectors];
#pragma GCC unroll 4
  for (int b = 0; b < kVectors; ++b) {
    x[b] = exp2_approx(F32::load(scores + kLanes * b) - F32::set1(max));
  }
  WeightSums sums{};
  sums.sum = combine<kVectors>(x, [](F32 a, F32 b) { return a + b; }).sum_lanes();
  if constexpr (Cache::kStep == 2) {
#pragma GCC unroll 4
    for (int b = 0; b < kVectors; ++b) {
      x[b] = x[b] * F32::load(scales.value[b]);
      // The scale of a slot without a token can be anything, NaN too.
      const int count = max_int(0, min_int(kLanes, limit - kLanes * b));
      if (count < kLanes) x[b] = F32::keep_first(x[b], count, F32::zero());
    }
    const auto larger = [](F32 a, F32 b) { return F32::max_bits(a, b); };
    sums.largest = combine<kVectors>(x, larger).max_lane_bits();
  }
#pragma GCC unroll 4
  for (int b = 0; b < kVectors; ++b) x[b].store(scores + kLanes * b);
  return sums;
}

// int8: the rows' weights as int16 pairs in place of the floats.
template <int kVectors>
inline void quantize_weights(float* weights, int num_rows, const float* largest, float* scale) {
  alignas(64) float inverse[kLanes];
  alignas(64) float new_scale[kLanes];
  const F32 top = F32::load(largest);
  const F32 least = F32::set1(kQuantMin);
  F32::zero_if_less(top, least, F32::set1(kQuantMax15) / top).store(inverse);
  F32::zero_if_less(top, least, top * F32::set1(1.0f / kQuantMax15)).store(new_scale);
  for (int r = 0; r < num_rows; ++r) {
    float* row = weights + r * kChunkTokens;
    scale[r] = new_scale[r];
    const F32 factor = F32::set1(inverse[r]);
#pragma GCC unroll 4
    for (int b = 0; b < kVectors; ++b) {
      const F32 w = F32::load(row + kLanes * b) * factor;
      store_int16(w, reinterpret_cast<int16_t*>(row) + kLanes * b);
    }
  }
}

// Online softmax of up to kMaxTileRows rows from `row` on against the chunk starting at `begin`, of
// which kVectors blocks are looked at; scores become weights. Rows that see nothing of the chunk
// keep their state (correction 1) and get int8 weights 0.
template <class Cache, int kVectors>
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
    const float m = finish_scores<Cache, kVectors>(scores + r * kChunkTokens, scales,
                                                   rows.query_scale[row + r], limit);
    old_max[r] = rows.max[row + r];
    new_max[r] = rows.max[row + r] = old_max[r] > m ? old_max[r] : m;
  }
  for (int r = 0; r < num_rows; ++r) {
    float* p = scores + r * kChunkTokens;
    const int limit = visible_in_chunk(rows, row + r, begin);
    if (limit > 0) {
      const WeightSums sums = make_weights<Cache, kVectors>(p, scales, new_max[r], limit);
      sum[r] = sums.sum;
      largest[r] = sums.largest;
    } else if (Cache::kStep == 2) {
      __builtin_memset(p, 0, kVectors * kLanes * sizeof(float));
    }
  }
  exp2_approx(F32::load(old_max) - F32::load(new_max)).store(correction);
  for (int r = 0; r < num_rows; ++r) {
    rows.correction[row + r] = correction[r];
    rows.sum[row + r] = __builtin_fmaf(rows.sum[row + r], correction[r], sum[r]);
  }
  if constexpr (Cache::kStep == 2) {
    quantize_weights<kVectors>(scores, num_rows, largest, rows.weight_scale + row);
  }
}

}  // namespace
}  // namespace caudal
