// The parts of this instruction set's linear kernel; the rest is avx512vnni's.
#pragma once

#include "../avx512vnni/linear_kernels.h"

namespace caudal::amx {

int64_t w4_workspace_bytes();
// The tiles share the weights.
void run_w4(const TileArgs* tiles, int num_tiles, std::byte* workspace);

}  // namespace caudal::amx
