// w4 and w8 with what every AVX2 machine has.
#include "linear_w4_impl.h"
#include "linear_w8_impl.h"
#include "products.h"

namespace caudal::avx2 {

void tile_w4(const TileArgs& args) { run_w4<Products>(args); }
void tile_w8(const TileArgs& args) { run_w8<Products>(args); }

}  // namespace caudal::avx2
