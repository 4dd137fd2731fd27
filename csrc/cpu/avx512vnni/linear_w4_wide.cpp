// w4 x 12-bit activations, each in two int8 parts: 16 * high + low.
#include "linear_deep.h"

namespace caudal::avx512vnni {
namespace {

constexpr int kBytes = 320;
constexpr int kPrefetchBytes = 16 * kBytes;

struct Scales {
  __m512 d;
  __m512 m;
};

inline Scales load_w4_scales(const std::byte* block) {
  return {load_halves(block + 256), load_halves(block + 288)};
}

inline __m512 accumulate_w4(__m512i dot, const Scales& s, const std::byte* scale, int num_tokens,
                            __m512 acc) {
  const __m512 factor = _mm512_mul_ps(s.d, broadcast(scale));
  acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), factor, acc);
  return _mm512_fmadd_ps(s.m, broadcast(scale + 4 * num_tokens), acc);
}

// Many tokens: weights times 16 meet the high parts, so that one sum takes both.
struct W4Wide {
  static constexpr WeightFormat kFormat = WeightFormat::kW4;
  static constexpr PanelKind kPanel = kInt12Panel;
  static constexpr int kPrefetchBytes = avx512vnni::kPrefetchBytes;

  // Half 0 is the low nibbles. Times 16 in w[0 .. 3], as they are in w[4 .. 7].
  static void unpack(const std::byte* block, int half, __m512i* w) {
    const __m512i low = _mm512_set1_epi8(0x0f);
    const __m512i high = _mm512_set1_epi8(static_cast<char>(0xf0));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i raw = _mm512_loadu_si512(block + 64 * i);
      w[i] = _mm512_and_si512(half == 0 ? _mm512_slli_epi16(raw, 4) : raw, high);
      w[4 + i] = _mm512_and_si512(half == 0 ? raw : _mm512_srli_epi16(raw, 4), low);
    }
  }

  static constexpr int offset(int half, int i) { return 16 * half + (i < 4 ? 4 * i : 16 + 4 * i); }

  static __m512i dot(__m512i acc, __m512i weights, const std::byte* values) {
    return dot_quad(acc, weights, values);
  }

  static Scales load_scales(const std::byte* block) { return load_w4_scales(block); }

  static __m512 accumulate(__m512i dot, const Scales& s, const std::byte* scale, int num_tokens,
                           __m512 acc) {
    return accumulate_w4(dot, s, scale, num_tokens, acc);
  }
};

constexpr int kNearBlocks = 8;
constexpr int kFarBlocks = 48;

// Few tokens: unpacking dominates, so the weights are unpacked once and two sums are combined.
template <int kTokens>
void run_few(const TileArgs& args) {
  const __m512i nibble = _mm512_set1_epi8(15);
  const std::byte* block = args.weights;
  for (int64_t g = 0; g < args.num_groups; ++g) {
    __m512 acc[kTokens];
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) acc[t] = _mm512_setzero_ps();
    const std::byte* panel = args.panel;
    for (int64_t b = 0; b < args.num_blocks; ++b) {
      prefetch(block + kNearBlocks * kBytes, kBytes);
      prefetch_far(block + kFarBlocks * kBytes, kBytes);
      __m512i high[kTokens], low[kTokens];
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) high[t] = low[t] = _mm512_setzero_si512();
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m512i raw = _mm512_loadu_si512(block + 64 * i);
        const __m512i w0 = _mm512_and_si512(raw, nibble);
        const __m512i w1 = _mm512_and_si512(_mm512_srli_epi16(raw, 4), nibble);
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) {
          const std::byte* values = panel + 64 * t + 4 * i;
          high[t] = dot_quad(dot_quad(high[t], w0, values), w1, values + 16);
          low[t] = dot_quad(dot_quad(low[t], w0, values + 32), w1, values + 48);
        }
      }
      const Scales s = load_w4_scales(block);
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) {
        const __m512i dot = _mm512_add_epi32(_mm512_slli_epi32(high[t], 4), low[t]);
        acc[t] = accumulate_w4(dot, s, panel + 64 * kTokens + 4 * t, kTokens, acc[t]);
      }
      block += kBytes;
      panel += kPanelBytes[kInt12Panel] * kTokens;
    }
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) store_rows(args, g, t, acc[t]);
  }
}

using RunWide = void (*)(const TileArgs&);
constexpr RunWide kRunWide[kMaxTileTokens] = {
    run_few<1>,           run_few<2>,           run_few<3>,           run_few<4>,
    run_deep<W4Wide, 5>,  run_deep<W4Wide, 6>,  run_deep<W4Wide, 7>,  run_deep<W4Wide, 8>,
    run_deep<W4Wide, 9>,  run_deep<W4Wide, 10>, run_deep<W4Wide, 11>, run_deep<W4Wide, 12>,
    run_deep<W4Wide, 13>, run_deep<W4Wide, 14>, run_deep<W4Wide, 15>, run_deep<W4Wide, 16>,
};

}  // namespace

void tile_w4_wide(const TileArgs& args) { kRunWide[args.num_tokens - 1](args); }

}  // namespace caudal::avx512vnni
