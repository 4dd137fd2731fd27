#include "../simd_avx2.h"
#include "../isa_kernels.h"
#include "../rope_simd.h"

namespace caudal::avx2 {

void rope_table(const RopeTableArgs& args, Worker& worker) { run_rope_table(args, worker); }

void rope_and_cache(const RopeCacheArgs& args, Worker& worker) {
  run_rope_and_cache<SimdConvert>(args, worker);
}

}  // namespace caudal::avx2
