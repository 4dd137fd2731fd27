// Entry point of the linear kernel.
#include "../isa_kernels.h"
#include "linear_kernels.h"

namespace caudal::amx {
namespace {

struct Isa {
  static constexpr int kTileTokens = 16;

  static void quantize(const LinearArgs& args, const PanelSet& panels, int64_t token,
                       int64_t count) {
    avx512vnni::quantize_tokens(args, panels, token, count);
  }

  static void run_task(WeightFormat format, const TileArgs* tiles, int num_tiles,
                       const Workspace& workspace) {
    // With fewer tokens the vector unit alone is as fast.
    const int min_tokens = tiles[0].is_wide ? 6 : 8;
    if (format == WeightFormat::kW4 && tiles[0].num_tokens >= min_tokens &&
        w4_workspace_bytes() <= workspace.bytes) {
      return run_w4(tiles, num_tiles, workspace.data);
    }
    for (int i = 0; i < num_tiles; ++i) avx512vnni::run_tile(format, tiles[i]);
  }
};

}  // namespace

void linear(const LinearArgs& args, Worker& worker) { run_linear<Isa>(args, worker); }

}  // namespace caudal::amx
