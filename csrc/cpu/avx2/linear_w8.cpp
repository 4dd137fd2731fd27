// w8 x 13-bit activations: int16 pairs, a quarter of a block (8 columns, 16 rows) in registers.
#include "linear_kernels.h"

namespace caudal::avx2 {
namespace {

constexpr int kBytes = static_cast<int>(kWeightBytes[static_cast<int>(WeightFormat::kW8)]);
constexpr int kPrefetchBytes = 4 * kBytes;

// Column pairs i of rows 0 .. 7 in w[i], of rows 8 .. 15 in w[4 + i].
inline void widen(const std::byte* quarter, __m256i* w) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const auto* p = reinterpret_cast<const __m128i*>(quarter + 32 * i);
    w[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128(p));
    w[4 + i] = _mm256_cvtepi8_epi16(_mm_loadu_si128(p + 1));
  }
}

struct Dot {
  __m256i low;
  __m256i high;
};

// Sums over 8 columns of the 16 rows.
inline Dot dot_quarter(const __m256i* w, const std::byte* values) {
  const __m256i first = broadcast_int(values);
  Dot dot = {_mm256_madd_epi16(w[0], first), _mm256_madd_epi16(w[4], first)};
#pragma GCC unroll 3
  for (int i = 1; i < 4; ++i) {
    const __m256i pair = broadcast_int(values + 4 * i);
    dot.low = _mm256_add_epi32(dot.low, _mm256_madd_epi16(w[i], pair));
    dot.high = _mm256_add_epi32(dot.high, _mm256_madd_epi16(w[4 + i], pair));
  }
  return dot;
}

inline Dot add(Dot a, Dot b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}

inline void accumulate(const Dot& dot, __m256 d_low, __m256 d_high, const std::byte* scale,
                       __m256* acc) {
  const __m256 dx = broadcast(scale);
  acc[0] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot.low), _mm256_mul_ps(d_low, dx), acc[0]);
  acc[1] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot.high), _mm256_mul_ps(d_high, dx), acc[1]);
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
      Dot dot[kTokens];
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        __m256i w[8];
        widen(block + 128 * q, w);
#pragma GCC unroll 3
        for (int t = 0; t < kTokens; ++t) {
          const Dot part = dot_quarter(w, panel + 64 * t + 16 * q);
          dot[t] = q == 0 ? part : add(dot[t], part);
        }
      }
      const __m256 d_low = load_halves(block + 512);
      const __m256 d_high = load_halves(block + 528);
#pragma GCC unroll 3
      for (int t = 0; t < kTokens; ++t)
        accumulate(dot[t], d_low, d_high, panel + 64 * kTokens + 4 * t, acc[t]);
      block += kBytes;
      panel += 68 * kTokens;
    }
#pragma GCC unroll 3
    for (int t = 0; t < kTokens; ++t) store_rows(args, g, t, acc[t][0], acc[t][1]);
  }
}

// More tokens: the sums lie in L1.
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
      widen(block, w);
      for (int t = 0; t < num_tokens; ++t) part[t] = dot_quarter(w, panel + 64 * t);
      for (int q = 1; q < 3; ++q) {
        widen(block + 128 * q, w);
        for (int t = 0; t < num_tokens; ++t)
          part[t] = add(part[t], dot_quarter(w, panel + 64 * t + 16 * q));
      }
      widen(block + 384, w);
      const __m256 d_low = load_halves(block + 512);
      const __m256 d_high = load_halves(block + 528);
      const std::byte* scale = panel + 64 * num_tokens;
      for (int t = 0; t < num_tokens; ++t) {
        const Dot dot = add(part[t], dot_quarter(w, panel + 64 * t + 48));
        accumulate(dot, d_low, d_high, scale + 4 * t, acc[t]);
      }
      block += kBytes;
      panel += 68 * num_tokens;
    }
    for (int t = 0; t < num_tokens; ++t) store_rows(args, g, t, acc[t][0], acc[t][1]);
  }
}

}  // namespace

void tile_w8(const TileArgs& args) {
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
