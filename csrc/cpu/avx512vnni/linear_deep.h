// Products with activations of 64 bytes a block (13 bits as int16, 12 bits as two int8 parts): half a
// block of weights in eight registers meets all tokens of the tile in one pass. With more than eight
// tokens the sums leave the registers, but enough chains of products are under way to hide latency.
//
// A weight policy W provides
//   kFormat, kPanel, kPrefetchBytes
//   void unpack(const std::byte* block, int half, __m512i* w)
//   int offset(int half, int i): bytes from the token's values to the four that meet w[i]
//   __m512i dot(__m512i acc, __m512i weights, const std::byte* values)
//   Scales load_scales(block)
//   __m512 accumulate(__m512i dot, const Scales&, const std::byte* scale, int num_tokens, __m512 acc):
//     `scale` is the token's in the panel
#pragma once

#include "linear_kernels.h"

namespace caudal::avx512vnni {
namespace {

template <class W, int kTokens>
inline void dot_half(const std::byte* block, int half, const std::byte* panel, __m512i* dot) {
  __m512i w[8];
  W::unpack(block, half, w);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
      dot[t] = W::dot(dot[t], w[i], panel + 64 * t + W::offset(half, i));
    }
  }
}

template <class W, int kTokens>
void run_deep(const TileArgs& args) {
  constexpr int kBytes = static_cast<int>(kWeightBytes[static_cast<int>(W::kFormat)]);
  const std::byte* block = args.weights;
  for (int64_t g = 0; g < args.num_groups; ++g) {
    __m512 acc[kTokens];
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) acc[t] = _mm512_setzero_ps();
    const std::byte* panel = args.panel;
    for (int64_t b = 0; b < args.num_blocks; ++b) {
      prefetch(block + W::kPrefetchBytes, kBytes);
      __m512i dot[kTokens];
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) dot[t] = _mm512_setzero_si512();
      dot_half<W, kTokens>(block, 0, panel, dot);
      dot_half<W, kTokens>(block, 1, panel, dot);
      const auto s = W::load_scales(block);
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) {
        acc[t] = W::accumulate(dot[t], s, panel + 64 * kTokens + 4 * t, kTokens, acc[t]);
      }
      block += kBytes;
      panel += kPanelBytes[W::kPanel] * kTokens;
    }
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) store_rows(args, g, t, acc[t]);
  }
}

}  // namespace
}  // namespace caudal::avx512vnni
