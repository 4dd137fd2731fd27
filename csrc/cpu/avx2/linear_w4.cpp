// w4 x int8: u8 x s8 products in int16 lanes; 16 x 15 x 127 fits, so a block needs one widening.
#include "linear_kernels.h"

namespace caudal::avx2 {
namespace {

constexpr int kBytes = static_cast<int>(kWeightBytes[static_cast<int>(WeightFormat::kW4)]);
constexpr int kPrefetchBytes = 8 * kBytes;

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

// Sums over 16 columns of the 16 rows; both halves share each broadcast.
struct Dot {
  __m256i low;
  __m256i high;
};

inline Dot dot_half(const __m256i* w, const std::byte* values) {
  const __m256i first = broadcast_int(values);
  Dot dot = {_mm256_maddubs_epi16(w[0], first), _mm256_maddubs_epi16(w[4], first)};
#pragma GCC unroll 3
  for (int i = 1; i < 4; ++i) {
    const __m256i quad = broadcast_int(values + 4 * i);
    dot.low = _mm256_add_epi16(dot.low, _mm256_maddubs_epi16(w[i], quad));
    dot.high = _mm256_add_epi16(dot.high, _mm256_maddubs_epi16(w[4 + i], quad));
  }
  return dot;
}

inline Dot add(Dot a, Dot b) {
  return {_mm256_add_epi16(a.low, b.low), _mm256_add_epi16(a.high, b.high)};
}

inline __m256 to_float(__m256i pairs) {
  return _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
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
inline void accumulate(const Dot& dot, const Scales& s, const std::byte* scale,
                       const std::byte* scaled_sum, __m256* acc) {
  const __m256 dx = broadcast(scale);
  const __m256 sx = broadcast(scaled_sum);
  acc[0] = _mm256_fmadd_ps(to_float(dot.low), _mm256_mul_ps(s.d[0], dx), acc[0]);
  acc[1] = _mm256_fmadd_ps(to_float(dot.high), _mm256_mul_ps(s.d[1], dx), acc[1]);
  acc[0] = _mm256_fmadd_ps(s.m[0], sx, acc[0]);
  acc[1] = _mm256_fmadd_ps(s.m[1], sx, acc[1]);
}

// Up to 3 tokens: all sums stay in registers.
template <int kTokens>
void run_few(const TileArgs& args) {
  const std::byte* block = args.weights;
  for (int64_t g = 0; g < args.num_groups; ++g) {
    __m256 acc[kTokens][2];
#pragma GCC unroll 3
    for (int t = 0; t < kTokens; ++t) acc[t][0] = acc[t][1] = _mm256_setzero_ps();
    const std::byte* panel = args.panel;
    for (int64_t b = 0; b < args.num_blocks; ++b) {
      prefetch(block + kPrefetchBytes, kBytes);
      __m256i w[8];
      Dot dot[kTokens];
      unpack_low(block, w);
#pragma GCC unroll 3
      for (int t = 0; t < kTokens; ++t) dot[t] = dot_half(w, panel + 32 * t);
      unpack_high(block, w);
      const Scales scales = load_scales(block);
#pragma GCC unroll 3
      for (int t = 0; t < kTokens; ++t) {
        dot[t] = add(dot[t], dot_half(w, panel + 32 * t + 16));
        const std::byte* scale = panel + 32 * kTokens + 4 * t;
        accumulate(dot[t], scales, scale, scale + 4 * kTokens, acc[t]);
      }
      block += kBytes;
      panel += 40 * kTokens;
    }
#pragma GCC unroll 3
    for (int t = 0; t < kTokens; ++t) store_rows(args, g, t, acc[t][0], acc[t][1]);
  }
}

// More tokens: the weights of half a block stay in registers, the sums lie in L1.
void run_many(const TileArgs& args) {
  const int num_tokens = args.num_tokens;
  const std::byte* block = args.weights;
  alignas(32) __m256 acc[kMaxTileTokens][2];
  alignas(32) Dot part[kMaxTileTokens];
  for (int64_t g = 0; g < args.num_groups; ++g) {
    for (int t = 0; t < num_tokens; ++t) acc[t][0] = acc[t][1] = _mm256_setzero_ps();
    const std::byte* panel = args.panel;
    for (int64_t b = 0; b < args.num_blocks; ++b) {
      prefetch(block + kPrefetchBytes, kBytes);
      __m256i w[8];
      unpack_low(block, w);
      for (int t = 0; t < num_tokens; ++t) part[t] = dot_half(w, panel + 32 * t);
      unpack_high(block, w);
      const Scales scales = load_scales(block);
      const std::byte* scale = panel + 32 * num_tokens;
      const std::byte* scaled_sum = scale + 4 * num_tokens;
      for (int t = 0; t < num_tokens; ++t) {
        const Dot dot = add(part[t], dot_half(w, panel + 32 * t + 16));
        accumulate(dot, scales, scale + 4 * t, scaled_sum + 4 * t, acc[t]);
      }
      block += kBytes;
      panel += 40 * num_tokens;
    }
    for (int t = 0; t < num_tokens; ++t) store_rows(args, g, t, acc[t][0], acc[t][1]);
  }
}

}  // namespace

void tile_w4(const TileArgs& args) {
  switch (args.num_tokens) {
    case 1:
      return run_few<1>(args);
    case 2:
      return run_few<2>(args);
    case 3:
      return run_few<3>(args);
    default:
      return run_many(args);
  }
}

}  // namespace caudal::avx2
