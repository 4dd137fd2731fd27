// f16 and f32 weights x float activations: one chain of fma per row and token, in order of k.
#include "linear_kernels.h"

namespace caudal::avx2 {
namespace {

constexpr int kPrefetchBytes = 4096;
constexpr int kMaxPass = 6;  // tokens whose sums fit into the registers

inline __m256 load_rows(const uint16_t* p) {
  return load_halves(reinterpret_cast<const std::byte*>(p));
}
inline __m256 load_rows(const float* p) { return _mm256_loadu_ps(p); }

// kGroups groups against tokens first .. first + kCount - 1 of the tile. Several groups where there
// are few tokens: a single chain of fma would wait for its own result.
template <class T, int kCount, int kGroups>
void run_group(const TileArgs& args, int64_t group, int first) {
  const int64_t group_values = args.num_blocks * kBlockCols * kRowsPerGroup;
  const T* w = reinterpret_cast<const T*>(args.weights) + group * group_values;
  __m256 acc[kGroups][kCount][2];
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 6
    for (int t = 0; t < kCount; ++t) acc[g][t][0] = acc[g][t][1] = _mm256_setzero_ps();
  }
  const std::byte* panel = args.panel + 128 * first;
  for (int64_t b = 0; b < args.num_blocks; ++b) {
#pragma GCC unroll 2
    for (int k = 0; k < kBlockCols; ++k) {
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        const T* row = w + g * group_values;
        prefetch(reinterpret_cast<const std::byte*>(row) + kPrefetchBytes / kGroups, 1);
        const __m256 low = load_rows(row);
        const __m256 high = load_rows(row + 8);
#pragma GCC unroll 6
        for (int t = 0; t < kCount; ++t) {
          const __m256 x = broadcast(panel + 128 * t + 4 * k);
          acc[g][t][0] = _mm256_fmadd_ps(low, x, acc[g][t][0]);
          acc[g][t][1] = _mm256_fmadd_ps(high, x, acc[g][t][1]);
        }
      }
      w += kRowsPerGroup;
    }
    panel += 128 * args.num_tokens;
  }
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 6
    for (int t = 0; t < kCount; ++t)
      store_rows(args, group + g, first + t, acc[g][t][0], acc[g][t][1]);
  }
}

// All tokens of a tile in one pass, several groups at once.
template <class T, int kCount, int kGroups>
void run_few(const TileArgs& args) {
  int64_t group = 0;
  for (; group + kGroups <= args.num_groups; group += kGroups) {
    run_group<T, kCount, kGroups>(args, group, 0);
  }
  for (; group < args.num_groups; ++group) run_group<T, kCount, 1>(args, group, 0);
}

template <class T>
void run_pass(const TileArgs& args, int64_t group, int first, int count) {
  switch (count) {
    case 3:
      return run_group<T, 3, 1>(args, group, first);
    case 4:
      return run_group<T, 4, 1>(args, group, first);
    case 5:
      return run_group<T, 5, 1>(args, group, first);
    default:
      return run_group<T, kMaxPass, 1>(args, group, first);
  }
}

// The passes over a group take it from L1.
template <class T>
void run_many(const TileArgs& args) {
  const int num_passes = static_cast<int>(ceil_div(args.num_tokens, kMaxPass));
  for (int64_t group = 0; group < args.num_groups; ++group) {
    for (int p = 0; p < num_passes; ++p) {
      const int first = p * args.num_tokens / num_passes;
      const int last = (p + 1) * args.num_tokens / num_passes;
      run_pass<T>(args, group, first, last - first);
    }
  }
}

template <class T>
void run_tile(const TileArgs& args) {
  switch (args.num_tokens) {
    case 1:
      return run_few<T, 1, 4>(args);
    case 2:
      return run_few<T, 2, 2>(args);
    case 3:
      return run_few<T, 3, 2>(args);
    default:
      return run_many<T>(args);
  }
}

}  // namespace

void tile_f16(const TileArgs& args) { run_tile<uint16_t>(args); }
void tile_f32(const TileArgs& args) { run_tile<float>(args); }

}  // namespace caudal::avx2
