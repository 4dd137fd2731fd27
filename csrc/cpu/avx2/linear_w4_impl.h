// w4 x int8 or 12 bits. `P` is how an instruction set sums products, see linear_isa.h.
#pragma once

#include "linear_kernels.h"

namespace caudal::avx2 {
namespace {

constexpr int kW4Bytes = static_cast<int>(kWeightBytes[static_cast<int>(WeightFormat::kW4)]);
constexpr int kW4PrefetchBytes = 8 * kW4Bytes;

// Eight rows of 4 columns each: rows 0 .. 7 in w[0 .. 3], rows 8 .. 15 in w[4 .. 7].
inline void unpack_low(const std::byte* block, __m256i* w) {
  const __m256i nibble = _mm256_set1_epi8(15);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    w[i] = _mm256_and_si256(load_bytes(block + 64 * i), nibble);
    w[4 + i] = _mm256_and_si256(load_bytes(block + 64 * i + 32), nibble);
  }
}

inline void unpack_high(const std::byte* block, __m256i* w) {
  const __m256i nibble = _mm256_set1_epi8(15);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256i low = load_bytes(block + 64 * i);
    const __m256i high = load_bytes(block + 64 * i + 32);
    w[i] = _mm256_and_si256(_mm256_srli_epi16(low, 4), nibble);
    w[4 + i] = _mm256_and_si256(_mm256_srli_epi16(high, 4), nibble);
  }
}

// Sums over 32 columns in 32 bits; wide ones of 16 * high + low.
template <class P>
inline Rows widen(const Rows& dot) {
  return {P::template widen<1>(dot.low), P::template widen<1>(dot.high)};
}

template <class P>
inline Rows widen(const Rows& high, const Rows& low) {
  const Rows sum = widen<P>(low);
  return {_mm256_add_epi32(P::template widen<16>(high.low), sum.low),
          _mm256_add_epi32(P::template widen<16>(high.high), sum.high)};
}

// d and m of the 16 rows of a block.
struct Scales {
  __m256 d[2];
  __m256 m[2];
};

inline Scales load_scales(const std::byte* block) {
  return {{load_halves(block + 256), load_halves(block + 272)},
          {load_halves(block + 288), load_halves(block + 304)}};
}

// acc += dot * (d * dx), then acc += m * s
inline void accumulate(const Rows& dot, const Scales& s, const std::byte* scale,
                       const std::byte* scaled_sum, __m256* acc) {
  accumulate(dot, s.d[0], s.d[1], scale, acc);
  const __m256 sx = broadcast(scaled_sum);
  acc[0] = _mm256_fmadd_ps(s.m[0], sx, acc[0]);
  acc[1] = _mm256_fmadd_ps(s.m[1], sx, acc[1]);
}

// What both loops need to know of a panel.
template <bool kWide>
struct Layout {
  static constexpr int kValueBytes = kWide ? 64 : 32;
  static constexpr int kParts = kWide ? 2 : 1;  // high, low
  static constexpr int64_t kBlockBytes = kPanelBytes[kWide ? kInt12Panel : kInt8Panel];
};

template <class P, bool kWide>
inline Rows widen_parts(const Rows* parts) {
  if constexpr (kWide) {
    return widen<P>(parts[0], parts[1]);
  } else {
    return widen<P>(parts[0]);
  }
}

// Up to 3 tokens: all sums stay in registers.
template <class P, int kTokens, bool kWide>
void run_few_w4(const TileArgs& args) {
  using L = Layout<kWide>;
  const std::byte* block = args.weights;
  for (int64_t g = 0; g < args.num_groups; ++g) {
    __m256 acc[kTokens][2];
#pragma GCC unroll 3
    for (int t = 0; t < kTokens; ++t) acc[t][0] = acc[t][1] = _mm256_setzero_ps();
    const std::byte* panel = args.panel;
    for (int64_t b = 0; b < args.num_blocks; ++b) {
      prefetch(block + kW4PrefetchBytes, kW4Bytes);
      __m256i w[8];
      Rows dot[kTokens][L::kParts];
      unpack_low(block, w);
#pragma GCC unroll 3
      for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 2
        for (int p = 0; p < L::kParts; ++p)
          dot[t][p] = add_products<P::add_bytes>(w, panel + L::kValueBytes * t + 32 * p, Rows{});
      }
      unpack_high(block, w);
      const Scales scales = load_scales(block);
#pragma GCC unroll 3
      for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 2
        for (int p = 0; p < L::kParts; ++p)
          dot[t][p] = add_products<P::add_bytes>(w, panel + L::kValueBytes * t + 32 * p + 16, dot[t][p]);
        const std::byte* scale = panel + L::kValueBytes * kTokens + 4 * t;
        accumulate(widen_parts<P, kWide>(dot[t]), scales, scale, scale + 4 * kTokens, acc[t]);
      }
      block += kW4Bytes;
      panel += L::kBlockBytes * kTokens;
    }
#pragma GCC unroll 3
    for (int t = 0; t < kTokens; ++t) store_rows(args, g, t, acc[t][0], acc[t][1]);
  }
}

// More tokens: the weights of half a block stay in registers, the sums lie in L1.
template <class P, bool kWide>
void run_many_w4(const TileArgs& args) {
  using L = Layout<kWide>;
  const int num_tokens = args.num_tokens;
  const std::byte* block = args.weights;
  alignas(32) __m256 acc[kMaxTileTokens][2];
  alignas(32) Rows part[kMaxTileTokens][L::kParts];
  for (int64_t g = 0; g < args.num_groups; ++g) {
    for (int t = 0; t < num_tokens; ++t) acc[t][0] = acc[t][1] = _mm256_setzero_ps();
    const std::byte* panel = args.panel;
    for (int64_t b = 0; b < args.num_blocks; ++b) {
      prefetch(block + kW4PrefetchBytes, kW4Bytes);
      __m256i w[8];
      unpack_low(block, w);
      for (int t = 0; t < num_tokens; ++t) {
        for (int p = 0; p < L::kParts; ++p)
          part[t][p] = add_products<P::add_bytes>(w, panel + L::kValueBytes * t + 32 * p, Rows{});
      }
      unpack_high(block, w);
      const Scales scales = load_scales(block);
      const std::byte* scale = panel + L::kValueBytes * num_tokens;
      const std::byte* scaled_sum = scale + 4 * num_tokens;
      for (int t = 0; t < num_tokens; ++t) {
        Rows dot[L::kParts];
        for (int p = 0; p < L::kParts; ++p)
          dot[p] = add_products<P::add_bytes>(w, panel + L::kValueBytes * t + 32 * p + 16, part[t][p]);
        accumulate(widen_parts<P, kWide>(dot), scales, scale + 4 * t, scaled_sum + 4 * t, acc[t]);
      }
      block += kW4Bytes;
      panel += L::kBlockBytes * num_tokens;
    }
    for (int t = 0; t < num_tokens; ++t) store_rows(args, g, t, acc[t][0], acc[t][1]);
  }
}

template <class P, bool kWide>
void run_tile_w4(const TileArgs& args) {
  switch (args.num_tokens) {
    case 1:
      return run_few_w4<P, 1, kWide>(args);
    case 2:
      return run_few_w4<P, 2, kWide>(args);
    case 3:
      return run_few_w4<P, 3, kWide>(args);
    default:
      return run_many_w4<P, kWide>(args);
  }
}

template <class P>
void run_w4(const TileArgs& args) {
  const bool is_wide = args.activations == Activations::kInt12;
  (is_wide ? run_tile_w4<P, true> : run_tile_w4<P, false>)(args);
}

}  // namespace
}  // namespace caudal::avx2
