// w8 x 13-bit activations: int16 pairs, 16 rows a register, half a block of weights at a time.
#include "linear_kernels.h"

namespace caudal::avx512vnni {
namespace {

constexpr int kBytes = static_cast<int>(kWeightBytes[static_cast<int>(WeightFormat::kW8)]);
constexpr int kPrefetchBytes = 6 * kBytes;

// Widens 16 columns: w[i] holds columns 2 i and 2 i + 1 of the 16 rows.
inline void widen(const std::byte* half_block, __m512i* w) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const auto* p = reinterpret_cast<const __m256i*>(half_block + 32 * i);
    w[i] = _mm512_cvtepi8_epi16(_mm256_loadu_si256(p));
  }
}

template <int kCount>
inline void dot_half(const __m512i* w, const std::byte* values, __m512i* dot) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 8
    for (int t = 0; t < kCount; ++t) dot[t] = dot_pair(dot[t], w[i], values + 64 * t + 4 * i);
  }
}

template <int kCount>
inline void add_block(const std::byte* block, const std::byte* values, const std::byte* scales,
                      __m512* acc) {
  __m512i dot[kCount];
  __m512i w[8];
#pragma GCC unroll 8
  for (int t = 0; t < kCount; ++t) dot[t] = _mm512_setzero_si512();
  widen(block, w);
  dot_half<kCount>(w, values, dot);
  widen(block + 256, w);
  dot_half<kCount>(w, values + 32, dot);
  const __m512 scale = load_halves(block + 512);
#pragma GCC unroll 8
  for (int t = 0; t < kCount; ++t) {
    const __m512 factor = _mm512_mul_ps(scale, broadcast(scales + 4 * t));
    acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[t]), factor, acc[t]);
  }
}

// One group against tokens kFirst .. kFirst + kCount - 1 of a tile of kTokens. Weights, dots and
// sums of more than 8 tokens do not fit into the registers.
template <int kTokens, int kFirst, int kCount>
inline void run_group(const TileArgs& args, int64_t group) {
  static_assert(kCount <= 8);
  const std::byte* block = args.weights + group * args.num_blocks * kBytes;
  const std::byte* panel = args.panel;
  __m512 acc[kCount];
#pragma GCC unroll 8
  for (int t = 0; t < kCount; ++t) acc[t] = _mm512_setzero_ps();
  for (int64_t b = 0; b < args.num_blocks; ++b) {
    prefetch(block + kPrefetchBytes, kBytes);
    add_block<kCount>(block, panel + 64 * kFirst, panel + 64 * kTokens + 4 * kFirst, acc);
    block += kBytes;
    panel += 68 * kTokens;
  }
#pragma GCC unroll 8
  for (int t = 0; t < kCount; ++t) store_rows(args, group, kFirst + t, acc[t]);
}

template <int kTokens>
void run_groups(const TileArgs& args) {
  constexpr int kHalf = kTokens <= 8 ? kTokens : (kTokens + 1) / 2;
  for (int64_t g = 0; g < args.num_groups; ++g) {
    run_group<kTokens, 0, kHalf>(args, g);
    if constexpr (kHalf < kTokens) run_group<kTokens, kHalf, kTokens - kHalf>(args, g);
  }
}

using RunGroups = void (*)(const TileArgs&);
constexpr RunGroups kRunGroups[] = {
    run_groups<1>, run_groups<2>, run_groups<3>, run_groups<4>, run_groups<5>,
    run_groups<6>, run_groups<7>, run_groups<8>, run_groups<9>, run_groups<10>,
    run_groups<11>, run_groups<12>, run_groups<13>, run_groups<14>, run_groups<15>,
    run_groups<16>,
};

}  // namespace

void tile_w8(const TileArgs& args) { kRunGroups[args.num_tokens - 1](args); }

}  // namespace caudal::avx512vnni
