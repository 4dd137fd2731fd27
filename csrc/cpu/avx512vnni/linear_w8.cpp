// w8 x 13-bit activations: int16 pairs, 16 rows a register.
#include "linear_deep.h"

namespace caudal::avx512vnni {
namespace {

struct W8 {
  static constexpr WeightFormat kFormat = WeightFormat::kW8;
  static constexpr PanelKind kPanel = kInt13Panel;
  static constexpr int kPrefetchBytes = 10 * 544;

  // w[i] holds columns 2 i and 2 i + 1 of the half block.
  static void unpack(const std::byte* block, int half, __m512i* w) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const auto* p = reinterpret_cast<const __m256i*>(block + 256 * half + 32 * i);
      w[i] = _mm512_cvtepi8_epi16(_mm256_loadu_si256(p));
    }
  }

  static constexpr int offset(int half, int i) { return 32 * half + 4 * i; }

  static __m512i dot(__m512i acc, __m512i weights, const std::byte* values) {
    return dot_pair(acc, weights, values);
  }

  static __m512 load_scales(const std::byte* block) { return load_halves(block + 512); }

  static __m512 accumulate(__m512i dot, __m512 d, const std::byte* scale, int, __m512 acc) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(d, broadcast(scale)), acc);
  }
};

using RunDeep = void (*)(const TileArgs&);
constexpr RunDeep kRunDeep[kMaxTileTokens] = {
    run_deep<W8, 1>,  run_deep<W8, 2>,  run_deep<W8, 3>,  run_deep<W8, 4>,
    run_deep<W8, 5>,  run_deep<W8, 6>,  run_deep<W8, 7>,  run_deep<W8, 8>,
    run_deep<W8, 9>,  run_deep<W8, 10>, run_deep<W8, 11>, run_deep<W8, 12>,
    run_deep<W8, 13>, run_deep<W8, 14>, run_deep<W8, 15>, run_deep<W8, 16>,
};

}  // namespace

void tile_w8(const TileArgs& args) { kRunDeep[args.num_tokens - 1](args); }

}  // namespace caudal::avx512vnni
