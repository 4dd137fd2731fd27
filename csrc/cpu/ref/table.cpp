#include "../isa.h"
#include "../isa_kernels.h"

namespace caudal::ref {

const KernelTable kTable = {
    .name = "ref",
    .score = score_ref,
    .has_tiles = true,
    .has_bf16 = true,
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

}  // namespace caudal::ref
