// The parts of this instruction set's linear kernel; the rest is avx512vnni's.
#pragma once

#include "../avx512vnni/linear_kernels.h"

namespace caudal::amx {

// Fills the bf16 panels of `count` tokens from `token` on.
void quantize_bf16(const LinearArgs&, const PanelSet& panels, int64_t token, int64_t count);

constexpr int kBf16TilesPerTask = 4;

// Tiles that share the weights: w4 with int8 or 12-bit panels, w4 or w8 with bf16 ones.
void run_w4(const TileArgs* tiles, int num_tiles, std::byte* workspace);
void run_bf16(WeightFormat, const TileArgs* tiles, int num_tiles, std::byte* workspace);

}  // namespace caudal::amx
