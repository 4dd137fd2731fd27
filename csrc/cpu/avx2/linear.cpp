// Entry point of the linear kernel.
#include "../isa_kernels.h"
#include "linear_kernels.h"

namespace caudal::avx2 {

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

struct Isa : LinearIsa {
  static void run_task(WeightFormat format, const TileArgs* tiles, int num_tiles,
                       std::byte*) {
    for (int i = 0; i < num_tiles; ++i) run_tile(format, tiles[i]);
  }
};

}  // namespace

void linear(const LinearArgs& args, Worker& worker) { run_linear<Isa>(args, worker); }

}  // namespace caudal::avx2
