// What the linear kernels of AVX2 machines have in common, see linear_driver.h. P is how they sum
// products of integers:
//   __m256i add_bytes(sums, w, x): adds products of unsigned w and signed x, as P keeps sums of w4
//   __m256i widen<factor>(sums): these in 32 bits, times 1 or 16
//   __m256i add_words(sums, w, x): adds products of 16-bit integers to sums of pairs, in 32 bits
#pragma once

#include "linear_w4_impl.h"
#include "linear_w8_impl.h"

namespace caudal::avx2 {
namespace {

template <class P>
struct LinearIsa {
  static constexpr int64_t kTasksPerThread = 4;
  static constexpr int64_t kGroupsAtOnce = 1;
  static constexpr int64_t tiles_per_task(Activations) { return kMaxTilesPerTask; }
  static constexpr int kTileTokens = 12;

  static void quantize(const LinearArgs& args, const PanelSet& panels, int64_t token,
                       int64_t count) {
    quantize_tokens(args, panels, token, count);
  }

  static void run_task(WeightFormat format, const TileArgs* tiles, int num_tiles, std::byte*) {
    for (int i = 0; i < num_tiles; ++i) run_tile(format, tiles[i]);
  }

 private:
  static void run_tile(WeightFormat format, const TileArgs& tile) {
    switch (format) {
      case WeightFormat::kW4:
        return run_w4<P>(tile);
      case WeightFormat::kW8:
        return run_w8<P>(tile);
      case WeightFormat::kF16:
        return tile_f16(tile);
      case WeightFormat::kF32:
        return tile_f32(tile);
    }
  }
};

}  // namespace
}  // namespace caudal::avx2
