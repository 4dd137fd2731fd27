#include "../simd_avx512.h"
#include "../isa_kernels.h"
#include "../sample_impl.h"

namespace caudal::avx512vnni {

void sample(const SampleArgs& args, Worker& worker) { run_sample(args, worker); }

}  // namespace caudal::avx512vnni
