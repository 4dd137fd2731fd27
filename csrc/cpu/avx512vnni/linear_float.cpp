// f16 and f32 weights x float activations: one chain of fma per row and token, in order of k.
#include "linear_kernels.h"

namespace caudal::avx512vnni {
namespace {

constexpr int kPrefetchBytes = 4096;

inline __m512 load_rows(const uint16_t* p) {
  return load_halves(reinterpret_cast<const std::byte*>(p));
}
inline __m512 load_rows(const float* p) { return _mm512_loadu_ps(p); }

// kGroups groups at once: with few tokens a single chain of fma would wait for its own result.
template <class T, int kTokens, int kGroups>
void run_group(const TileArgs& args, int64_t group) {
  const int64_t group_values = args.num_blocks * kBlockCols * kRowsPerGroup;
  const T* w = reinterpret_cast<const T*>(args.weights) + group * group_values;
  __m512 acc[kGroups][kTokens];
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) acc[g][t] = _mm512_setzero_ps();
  }
  const std::byte* panel = args.panel;
  for (int64_t b = 0; b < args.num_blocks; ++b) {
#pragma GCC unroll 2
    for (int k = 0; k < kBlockCols; ++k) {
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        const T* row = w + g * group_values;
        _mm_prefetch(reinterpret_cast<const char*>(row) + kPrefetchBytes / kGroups, _MM_HINT_T0);
        const __m512 value = load_rows(row);
#pragma GCC unroll 16
        for (int t = 0; t < kTokens; ++t)
          acc[g][t] = _mm512_fmadd_ps(value, broadcast(panel + 128 * t + 4 * k), acc[g][t]);
      }
      w += kRowsPerGroup;
    }
    panel += 128 * kTokens;
  }
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) store_rows(args, group + g, t, acc[g][t]);
  }
}

template <class T, int kTokens>
void run_groups(const TileArgs& args) {
  constexpr int kGroups = kTokens <= 4 ? 4 : kTokens <= 8 ? 2 : 1;
  int64_t g = 0;
  for (; g + kGroups <= args.num_groups; g += kGroups) run_group<T, kTokens, kGroups>(args, g);
  if constexpr (kGroups > 1) {
    for (; g < args.num_groups; ++g) run_group<T, kTokens, 1>(args, g);
  }
}

using RunGroups = void (*)(const TileArgs&);
template <class T>
constexpr RunGroups kRunGroups[kMaxTileTokens] = {
    run_groups<T, 1>,  run_groups<T, 2>,  run_groups<T, 3>,  run_groups<T, 4>,
    run_groups<T, 5>,  run_groups<T, 6>,  run_groups<T, 7>,  run_groups<T, 8>,
    run_groups<T, 9>,  run_groups<T, 10>, run_groups<T, 11>, run_groups<T, 12>,
    run_groups<T, 13>, run_groups<T, 14>, run_groups<T, 15>, run_groups<T, 16>,
};

}  // namespace

void tile_f16(const TileArgs& args) { kRunGroups<uint16_t>[args.num_tokens - 1](args); }
void tile_f32(const TileArgs& args) { kRunGroups<float>[args.num_tokens - 1](args); }

}  // namespace caudal::avx512vnni
