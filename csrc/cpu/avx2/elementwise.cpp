#include "../isa_kernels.h"
#include "../simd_avx2.h"
// After the vector type that it uses:
#include "../elementwise_impl.h"

namespace caudal::avx2 {

void embed(const EmbedArgs& args, Worker& worker) { embed_tokens(args, worker); }
void rms_norm(const RmsNormArgs& args, Worker& worker) { rms_norm_tokens(args, worker); }
void silu_mul(const SiluMulArgs& args, Worker& worker) { silu_mul_tokens(args, worker); }

}  // namespace caudal::avx2
