// The parts of this instruction set's linear kernel.
#pragma once

#include <immintrin.h>

#include "../linear_driver.h"

namespace caudal::avx512vnni {

// Fills the panels of `count` tokens from `token` on, in all formats that `panels` holds.
void quantize_tokens(const LinearArgs&, const PanelSet& panels, int64_t token, int64_t count);

void tile_w4(const TileArgs&);
void tile_w4_wide(const TileArgs&);
void tile_w8(const TileArgs&);
void tile_f16(const TileArgs&);
void tile_f32(const TileArgs&);
void run_tile(WeightFormat, const TileArgs&);

namespace {

// Adds bias and residual to one token's 16 outputs of a group and writes those that exist.
inline void store_rows(const TileArgs& args, int64_t group, int token, __m512 sum) {
  const int64_t row = group * kRowsPerGroup;
  const int64_t left = args.num_rows - row;
  const __mmask16 mask = left >= kRowsPerGroup ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
  const int64_t offset = token * args.stride + row;
  if (args.bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, args.bias + row));
  if (args.residual) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, args.residual + offset));
  _mm512_mask_storeu_ps(args.out + offset, mask, sum);
}

inline __m512 load_halves(const std::byte* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// Into the second level, which can wait for three times as many lines as the first.
inline void prefetch_far(const std::byte* p, int bytes) {
  for (int i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T1);
}

inline void prefetch(const std::byte* p, int bytes) {
  for (int i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T0);
}

// acc += the four u8 x s8 products of each lane; `quad` points to 4 activations.
inline __m512i dot_quad(__m512i acc, __m512i weights, const std::byte* quad) {
  asm("vpdpbusd %2%{1to16%}, %1, %0"
      : "+v"(acc)
      : "v"(weights), "m"(*reinterpret_cast<const int32_t*>(quad)));
  return acc;
}

// acc += the two s16 x s16 products of each lane; `pair` points to 2 activations.
inline __m512i dot_pair(__m512i acc, __m512i weights, const std::byte* pair) {
  asm("vpdpwssd %2%{1to16%}, %1, %0"
      : "+v"(acc)
      : "v"(weights), "m"(*reinterpret_cast<const int32_t*>(pair)));
  return acc;
}

inline __m512 broadcast(const std::byte* p) {
  return _mm512_set1_ps(*reinterpret_cast<const float*>(p));
}

}  // namespace
}  // namespace caudal::avx512vnni
