// The vector unit's part of attention over bf16: the tile unit's sums, and reductions of sixteen rows.
#pragma once

#include "../simd_avx512.h"

namespace caudal::amx {
namespace {

// Pairs of bf16 in 32 bits.
inline F32 first_of(__m512i pairs) { return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))}; }

inline F32 second_of(__m512i pairs) {
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(_mm512_and_si512(pairs, mask))};
}

inline __m512i round_pair(F32 low, F32 high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.v, low.v));
}

// The tile unit's two chains of sums, for kRows rows and kCount x 16 columns.
template <int kRows, int kCount>
struct Chains {
  F32 even[kRows][kCount];
  F32 odd[kRows][kCount];

  Chains() {
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int c = 0; c < kCount; ++c) even[r][c] = odd[r][c] = F32::zero();
    }
  }

  // pairs: of each 16 columns; x: two values of each row, which are `stride` apart.
  [[gnu::always_inline]] void add(const __m512i* pairs, const float* x, int stride) {
    F32 first[kCount], second[kCount];
#pragma GCC unroll 2
    for (int c = 0; c < kCount; ++c) {
      first[c] = first_of(pairs[c]);
      second[c] = second_of(pairs[c]);
    }
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
      const F32 x0 = F32::set1(x[r * stride]);
      const F32 x1 = F32::set1(x[r * stride + 1]);
#pragma GCC unroll 2
      for (int c = 0; c < kCount; ++c) {
        even[r][c] = F32::fma(x0, first[c], even[r][c]);
        odd[r][c] = F32::fma(x1, second[c], odd[r][c]);
      }
    }
  }

  F32 sum(int r, int c) const { return even[r][c] + odd[r][c]; }
};

// Row r of the result is the reduction of rows[r], lane i with lane i + 8, 4, 2, 1.
template <class Op>
inline F32 reduce_rows(const F32* rows, Op op) {
  const auto halves = [&](int a, int b) {
    return op(F32{_mm512_shuffle_f32x4(rows[a].v, rows[b].v, 0x44)},
              F32{_mm512_shuffle_f32x4(rows[a].v, rows[b].v, 0xee)});
  };
  const auto quarters = [&](int a) {  // rows a, a + 4, a + 8, a + 12
    const F32 x = halves(a, a + 4);
    const F32 y = halves(a + 8, a + 12);
    return op(F32{_mm512_shuffle_f32x4(x.v, y.v, 0x88)}, F32{_mm512_shuffle_f32x4(x.v, y.v, 0xdd)});
  };
  const auto pairs = [&](int a) {
    const __m512d x = _mm512_castps_pd(quarters(a).v);
    const __m512d y = _mm512_castps_pd(quarters(a + 1).v);
    return op(F32{_mm512_castpd_ps(_mm512_unpacklo_pd(x, y))},
              F32{_mm512_castpd_ps(_mm512_unpackhi_pd(x, y))});
  };
  const F32 x = pairs(0);
  const F32 y = pairs(2);
  return op(F32{_mm512_shuffle_ps(x.v, y.v, 0x88)}, F32{_mm512_shuffle_ps(x.v, y.v, 0xdd)});
}

}  // namespace
}  // namespace caudal::amx
