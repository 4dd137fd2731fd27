// w4 x int8: 16 rows a register, a whole block of weights unpacked once for all tokens of the tile.
#include "linear_kernels.h"

namespace caudal::avx512vnni {
namespace {

constexpr int kBytes = static_cast<int>(kWeightBytes[static_cast<int>(WeightFormat::kW4)]);
constexpr int kPrefetchBytes = 16 * kBytes;

// Unpacks a block: w[i] holds columns 4 i .. 4 i + 3 of the 16 rows.
inline void unpack(const std::byte* block, __m512i* w) {
  const __m512i nibble = _mm512_set1_epi8(15);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i raw = _mm512_loadu_si512(block + 64 * i);
    w[i] = _mm512_and_si512(raw, nibble);
    w[4 + i] = _mm512_and_si512(_mm512_srli_epi16(raw, 4), nibble);
  }
}

// Adds one block to the sums of tokens kFirst .. kFirst + kCount - 1 of kTokens.
template <int kTokens, int kFirst, int kCount>
inline void add_tokens(const __m512i* w, __m512 scale, __m512 minimum, const std::byte* panel,
                       __m512* acc) {
  __m512i dot[kCount];
#pragma GCC unroll 4
  for (int t = 0; t < kCount; ++t) dot[t] = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 4
    for (int t = 0; t < kCount; ++t)
      dot[t] = dot_quad(dot[t], w[i], panel + 32 * (kFirst + t) + 4 * i);
  }
#pragma GCC unroll 4
  for (int t = 0; t < kCount; ++t) {
    const std::byte* d = panel + 32 * kTokens + 4 * (kFirst + t);
    const __m512 factor = _mm512_mul_ps(scale, broadcast(d));
    acc[kFirst + t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[t]), factor, acc[kFirst + t]);
    acc[kFirst + t] = _mm512_fmadd_ps(minimum, broadcast(d + 4 * kTokens), acc[kFirst + t]);
  }
}

template <int kTokens, int kFirst>
inline void add_block(const __m512i* w, __m512 scale, __m512 minimum, const std::byte* panel,
                      __m512* acc) {
  constexpr int kCount = kTokens - kFirst < 4 ? kTokens - kFirst : 4;
  add_tokens<kTokens, kFirst, kCount>(w, scale, minimum, panel, acc);
  if constexpr (kFirst + kCount < kTokens)
    add_block<kTokens, kFirst + kCount>(w, scale, minimum, panel, acc);
}

template <int kTokens>
void run_groups(const TileArgs& args) {
  const std::byte* block = args.weights;
  for (int64_t g = 0; g < args.num_groups; ++g) {
    __m512 acc[kTokens];
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) acc[t] = _mm512_setzero_ps();
    const std::byte* panel = args.panel;
    for (int64_t b = 0; b < args.num_blocks; ++b) {
      prefetch(block + kPrefetchBytes, kBytes);
      __m512i w[8];
      unpack(block, w);
      const __m512 scale = load_halves(block + 256);
      const __m512 minimum = load_halves(block + 288);
      add_block<kTokens, 0>(w, scale, minimum, panel, acc);
      block += kBytes;
      panel += 40 * kTokens;
    }
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) store_rows(args, g, t, acc[t]);
  }
}

using RunGroups = void (*)(const TileArgs&);
constexpr RunGroups kRunGroups[kMaxTileTokens] = {
    run_groups<1>,  run_groups<2>,  run_groups<3>,  run_groups<4>, run_groups<5>,  run_groups<6>,
    run_groups<7>,  run_groups<8>,  run_groups<9>,  run_groups<10>, run_groups<11>, run_groups<12>,
    run_groups<13>, run_groups<14>, run_groups<15>, run_groups<16>,
};

}  // namespace

void tile_w4(const TileArgs& args) {
  if (args.activations == Activations::kInt12) return tile_w4_wide(args);
  kRunGroups[args.num_tokens - 1](args);
}

}  // namespace caudal::avx512vnni
