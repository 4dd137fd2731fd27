// Entry point of the linear kernel.
#include "../isa_kernels.h"
#include "linear_kernels.h"

namespace caudal::amx {
namespace {

struct Isa {
  static constexpr int kTileTokens = 16;
  static constexpr int64_t kTasksPerThread = 8;
  static constexpr int64_t kGroupsAtOnce = 2;

  static constexpr int64_t tiles_per_task(Activations activations) {
    return activations == Activations::kBf16 ? kBf16TilesPerTask : kMaxTilesPerTask;
  }

  static void quantize(const LinearArgs& args, const PanelSet& panels, int64_t token,
                       int64_t count) {
    bool has_others = false;
    for (int k = 0; k < kNumPanelKinds; ++k) has_others |= !is_bf16(k) && panels.base[k] != nullptr;
    if (has_others) avx512vnni::quantize_tokens(args, panels, token, count);
    if (panels.base[kBf16Panel] != nullptr || panels.base[kBf16W4Panel] != nullptr) {
      quantize_bf16(args, panels, token, count);
    }
  }

  static void run_task(WeightFormat format, const TileArgs* tiles, int num_tiles,
                       std::byte* workspace) {
    if (is_bf16(panel_kind(format, tiles[0].activations))) {
      return run_bf16(format, tiles, num_tiles, workspace);
    }
    // With fewer tokens the vector unit alone is as fast.
    const int min_tokens = tiles[0].activations == Activations::kInt12 ? 6 : 8;
    if (format == WeightFormat::kW4 && tiles[0].num_tokens >= min_tokens) {
      return run_w4(tiles, num_tiles, workspace);
    }
    for (int i = 0; i < num_tiles; ++i) avx512vnni::run_tile(format, tiles[i]);
  }

 private:
  static bool is_bf16(int kind) { return kind == kBf16Panel || kind == kBf16W4Panel; }
};

}  // namespace

void linear(const LinearArgs& args, Worker& worker) { run_linear<Isa>(args, worker); }

}  // namespace caudal::amx
