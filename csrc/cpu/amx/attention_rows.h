// Attention of a few rows (decoding) over tiles of int8 in the vector unit, with keys and
// values where they are in the cache. Sums are exact integers, so the tile unit's are the same.
//
// The instruction multiplies unsigned with signed bytes: queries come with 128 added to each byte,
// and what that adds, 128 times the sum of the keys' bytes, is taken off again.
#pragma once

#include "../attention_common.h"

namespace caudal::amx {
namespace {

constexpr int kDirectColumns = 4;  // of 16 values; with three rows, 24 registers hold the sums

inline __m512i broadcast_dword(const uint8_t* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return _mm512_set1_epi32(x);
}

// acc + the sums of four products of unsigned and signed bytes; see I32::dot for the assembly.
inline __m512i dot_bytes(__m512i a, __m512i b, __m512i acc) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
}

inline __m512i combine_dots(__m512i high, __m512i low) {
  return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
}

// High and low bytes of rows, `stride` bytes apart.
struct RowBytes {
  const uint8_t* high;
  const uint8_t* low;
  int64_t stride;
};

// dots[r] = dot(query r, each of the 16 keys of a block), as in attention_tiles.h. As many bytes at
// `ahead` are prefetched.
template <int kRows>
inline void multiply_keys_direct(const RowBytes& query, int head_dim, const std::byte* keys,
                                 const std::byte* ahead, __m512i* dots) {
  const __m512i offset = _mm512_set1_epi8(static_cast<char>(128));
  __m512i high[kRows], low[kRows];
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r) high[r] = low[r] = _mm512_setzero_si512();
  __m512i extra = _mm512_setzero_si512();
  for (int d = 0; d < head_dim; d += 4) {
    prefetch(ahead + d * kBlockSize);
    const __m512i k = _mm512_loadu_si512(keys + d * kBlockSize);
    extra = dot_bytes(offset, k, extra);
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
      high[r] = dot_bytes(broadcast_dword(query.high + r * query.stride + d), k, high[r]);
      low[r] = dot_bytes(broadcast_dword(query.low + r * query.stride + d), k, low[r]);
    }
  }
  const __m512i surplus = combine_dots(extra, extra);
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r) {
    dots[r] = _mm512_sub_epi32(combine_dots(high[r], low[r]), surplus);
  }
}

// Sums of the products of rows' weights with kColumns x 16 columns of values, over the blocks of a
// split. Weights lie in the order of the tile unit's operands (see round_weights).
template <int kRows, int kColumns>
struct DirectValues {
  __m512i high[kRows][kColumns];
  __m512i low[kRows][kColumns];

  DirectValues() {
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) high[r][c] = low[r][c] = _mm512_setzero_si512();
    }
  }

  // weights: of the block's first four tokens; those of the next four are 16 bytes on. As many bytes
  // at `ahead` are prefetched.
  void add_block(const RowBytes& weights, int head_dim, const std::byte* values,
                 const std::byte* ahead) {
#pragma GCC unroll 4
    for (int i = 0; i < kBlockSize / 4; ++i) {
      const std::byte* line = values + i * int64_t{4} * head_dim;
      const std::byte* next = ahead + i * int64_t{4} * head_dim;
      __m512i w_high[kRows], w_low[kRows];
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r) {
        w_high[r] = broadcast_dword(weights.high + weights.stride * r + 16 * i);
        w_low[r] = broadcast_dword(weights.low + weights.stride * r + 16 * i);
      }
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) {
        prefetch(next + 64 * c);
        const __m512i v = _mm512_loadu_si512(line + 64 * c);
#pragma GCC unroll 3
        for (int r = 0; r < kRows; ++r) {
          high[r][c] = dot_bytes(w_high[r], v, high[r][c]);
          low[r][c] = dot_bytes(w_low[r], v, low[r][c]);
        }
      }
    }
  }
};

}  // namespace
}  // namespace caudal::amx
