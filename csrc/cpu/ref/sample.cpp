#include "../simd_portable.h"
#include "../isa_kernels.h"
#include "../sample_impl.h"

namespace caudal::ref {

void sample(const SampleArgs& args, Worker& worker) { run_sample(args, worker); }
void best_allowed(const BestAllowedArgs& args, Worker& worker) { run_best_allowed(args, worker); }

}  // namespace caudal::ref
