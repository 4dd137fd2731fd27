// The parts of this instruction set's linear kernel.
#pragma once

#include "../simd_avx2.h"
// After the vector type:
#include "../linear_driver.h"

namespace caudal::avx2 {

// Fills the panels of `count` tokens from `token` on, in all formats that `panels` holds.
void quantize_tokens(const LinearArgs&, const PanelSet& panels, int64_t token, int64_t count);

void tile_f16(const TileArgs&);
void tile_f32(const TileArgs&);

namespace {

inline __m256i lane_mask(int64_t count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)),
                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline void store_masked(const TileArgs& args, int64_t row, int64_t offset, __m256i mask,
                         __m256 sum) {
  if (args.bias) sum = _mm256_add_ps(sum, _mm256_maskload_ps(args.bias + row, mask));
  if (args.residual) sum = _mm256_add_ps(sum, _mm256_maskload_ps(args.residual + offset, mask));
  _mm256_maskstore_ps(args.out + offset, mask, sum);
}

// Adds bias and residual to one token's 16 outputs of a group and writes those that exist.
inline void store_rows(const TileArgs& args, int64_t group, int64_t token, __m256 low,
                       __m256 high) {
  const int64_t row = group * kRowsPerGroup;
  const int64_t left = args.num_rows - row;
  const int64_t offset = token * args.stride + row;
  if (left < kRowsPerGroup) {
    store_masked(args, row, offset, lane_mask(left), low);
    store_masked(args, row + 8, offset + 8, lane_mask(left - 8), high);
    return;
  }
  if (args.bias) {
    low = _mm256_add_ps(low, _mm256_loadu_ps(args.bias + row));
    high = _mm256_add_ps(high, _mm256_loadu_ps(args.bias + row + 8));
  }
  if (args.residual) {
    low = _mm256_add_ps(low, _mm256_loadu_ps(args.residual + offset));
    high = _mm256_add_ps(high, _mm256_loadu_ps(args.residual + offset + 8));
  }
  _mm256_storeu_ps(args.out + offset, low);
  _mm256_storeu_ps(args.out + offset + 8, high);
}

// Integers for the 16 rows of a group.
struct Rows {
  __m256i low;
  __m256i high;
};

inline __m256i load_bytes(const std::byte* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

inline __m256 load_halves(const std::byte* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline __m256i broadcast_int(const std::byte* p) {
  return _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(p));
}

inline __m256 broadcast(const std::byte* p) {
  return _mm256_broadcast_ss(reinterpret_cast<const float*>(p));
}

// Adds products with 4 x 4 bytes of a token: w[0 .. 3] for rows 0 .. 7, w[4 .. 7] for rows 8 .. 15, which
// share each broadcast.
template <auto kAdd>
inline Rows add_products(const __m256i* w, const std::byte* values, Rows sums) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256i x = broadcast_int(values + 4 * i);
    sums.low = kAdd(sums.low, w[i], x);
    sums.high = kAdd(sums.high, w[4 + i], x);
  }
  return sums;
}

// acc += dot * (d * dx)
inline void accumulate(const Rows& dot, __m256 d_low, __m256 d_high, const std::byte* scale,
                       __m256* acc) {
  const __m256 dx = broadcast(scale);
  acc[0] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot.low), _mm256_mul_ps(d_low, dx), acc[0]);
  acc[1] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot.high), _mm256_mul_ps(d_high, dx), acc[1]);
}

inline void prefetch(const std::byte* p, int bytes) {
  for (int i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T0);
}

}  // namespace
}  // namespace caudal::avx2
