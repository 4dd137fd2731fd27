// Entry point of the linear kernel.
#include "../isa_kernels.h"
#include "linear_kernels.h"

namespace caudal::avx512vnni {

void run_tile(WeightFormat format, const TileArgs& args) {
  switch (format) {
    case WeightFormat::kW4:
      return tile_w4(args);
    case WeightFormat::kW8:
      return tile_w8(args);
    case WeightFormat::kF16:
      return tile_f16(args);
    case WeightFormat::kF32:
      return tile_f32(args);
  }
}

namespace {

struct Isa {
  static constexpr int64_t kTasksPerThread = 4;
  static constexpr int64_t kGroupsAtOnce = 1;
  static constexpr int64_t tiles_per_task(Activations) { return kMaxTilesPerTask; }
  static constexpr int kTileTokens = 16;

  static void quantize(const LinearArgs& args, const PanelSet& panels, int64_t token,
                       int64_t count) {
    quantize_tokens(args, panels, token, count);
  }

  static void run_task(WeightFormat format, const TileArgs* tiles, int num_tiles,
                       std::byte*) {
    for (int i = 0; i < num_tiles; ++i) run_tile(format, tiles[i]);
  }
};

}  // namespace

void linear(const LinearArgs& args, Worker& worker) { run_linear<Isa>(args, worker); }

}  // namespace caudal::avx512vnni
