#include "../isa.h"
#include "../isa_kernels.h"

namespace caudal::avx2 {

const KernelTable kTable = {
    .name = "avx2",
    .score = score_avx2,
    .has_tiles = false,
    .has_bf16 = false,
    .has_gates = false,
    .activations = Activations::kInt8,
    .sensitive_activations = Activations::kInt12,
    .embed = embed,
    .rms_norm = rms_norm,
    .silu_mul = silu_mul,
    .linear = linear,
    .rope_table = rope_table,
    .rope_and_cache = rope_and_cache,
    .attention = attention,
    .sample = sample,
    .best_allowed = best_allowed,
};

}  // namespace caudal::avx2
