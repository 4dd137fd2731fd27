// w8 x 13-bit activations: int16 pairs, a quarter of a block (8 columns, 16 rows) in registers. `P` is
// how an instruction set sums products, see linear_isa.h.
#pragma once

#include "linear_kernels.h"

namespace caudal::avx2 {
namespace {

constexpr int kW8Bytes = static_cast<int>(kWeightBytes[static_cast<int>(WeightFormat::kW8)]);
constexpr int kW8PrefetchBytes = 4 * kW8Bytes;

// Column pairs i of rows 0 .. 7 in w[i], of rows 8 .. 15 in w[4 + i].
inline void widen_quarter(const std::byte* quarter, __m256i* w) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const auto* p = reinterpret_cast<const __m128i*>(quarter + 32 * i);
    w[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128(p));
    w[4 + i] = _mm256_cvtepi8_epi16(_mm_loadu_si128(p + 1));
  }
}

// Up to 3 tokens: all sums stay in registers.
template <class P, int kTokens>
void run_few_w8(const TileArgs& args) {
  const std::byte* block = args.weights;
  for (int64_t g = 0; g < args.num_groups; ++g) {
    __m256 acc[kTokens][2];
#pragma GCC unroll 3
    for (int t = 0; t < kTokens; ++t) acc[t][0] = acc[t][1] = _mm256_setzero_ps();
    const std::byte* panel = args.panel;
    for (int64_t b = 0; b < args.num_blocks; ++b) {
      prefetch(block + kW8PrefetchBytes, kW8Bytes);
      Rows dot[kTokens] = {};
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        __m256i w[8];
        widen_quarter(block + 128 * q, w);
#pragma GCC unroll 3
        for (int t = 0; t < kTokens; ++t) {
          dot[t] = add_products<P::add_words>(w, panel + 64 * t + 16 * q, dot[t]);
        }
      }
      const __m256 d_low = load_halves(block + 512);
      const __m256 d_high = load_halves(block + 528);
#pragma GCC unroll 3
      for (int t = 0; t < kTokens; ++t)
        accumulate(dot[t], d_low, d_high, panel + 64 * kTokens + 4 * t, acc[t]);
      block += kW8Bytes;
      panel += 68 * kTokens;
    }
#pragma GCC unroll 3
    for (int t = 0; t < kTokens; ++t) store_rows(args, g, t, acc[t][0], acc[t][1]);
  }
}

// More tokens: the sums lie in L1.
template <class P>
void run_many_w8(const TileArgs& args) {
  const int num_tokens = args.num_tokens;
  const std::byte* block = args.weights;
  alignas(32) __m256 acc[kMaxTileTokens][2];
  alignas(32) Rows part[kMaxTileTokens];
  for (int64_t g = 0; g < args.num_groups; ++g) {
    for (int t = 0; t < num_tokens; ++t) acc[t][0] = acc[t][1] = _mm256_setzero_ps();
    const std::byte* panel = args.panel;
    for (int64_t b = 0; b < args.num_blocks; ++b) {
      prefetch(block + kW8PrefetchBytes, kW8Bytes);
      __m256i w[8];
      widen_quarter(block, w);
      for (int t = 0; t < num_tokens; ++t) part[t] = add_products<P::add_words>(w, panel + 64 * t, Rows{});
      for (int q = 1; q < 3; ++q) {
        widen_quarter(block + 128 * q, w);
        for (int t = 0; t < num_tokens; ++t)
          part[t] = add_products<P::add_words>(w, panel + 64 * t + 16 * q, part[t]);
      }
      widen_quarter(block + 384, w);
      const __m256 d_low = load_halves(block + 512);
      const __m256 d_high = load_halves(block + 528);
      const std::byte* scale = panel + 64 * num_tokens;
      for (int t = 0; t < num_tokens; ++t) {
        const Rows dot = add_products<P::add_words>(w, panel + 64 * t + 48, part[t]);
        accumulate(dot, d_low, d_high, scale + 4 * t, acc[t]);
      }
      block += kW8Bytes;
      panel += 68 * num_tokens;
    }
    for (int t = 0; t < num_tokens; ++t) store_rows(args, g, t, acc[t][0], acc[t][1]);
  }
}

template <class P>
void run_w8(const TileArgs& args) {
  switch (args.num_tokens) {
    case 1:
      return run_few_w8<P, 1>(args);
    case 2:
      return run_few_w8<P, 2>(args);
    case 3:
      return run_few_w8<P, 3>(args);
    default:
      return run_many_w8<P>(args);
  }
}

}  // namespace
}  // namespace caudal::avx2
