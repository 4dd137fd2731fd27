#include "../isa.h"
#include "../isa_kernels.h"

namespace caudal::avxvnni {

const KernelTable kTable = {
    .name = "avxvnni",
    .score = score_avxvnni,
    .has_tiles = false,
    .has_bf16 = false,
    .has_gates = false,
    .activations = Activations::kInt8,
    .sensitive_activations = Activations::kInt12,
    .embed = avx2::embed,
    .rms_norm = avx2::rms_norm,
    .silu_mul = avx2::silu_mul,
    .linear = linear,
    .rope_table = avx2::rope_table,
    .rope_and_cache = avx2::rope_and_cache,
    .attention = avx2::attention,
    .sample = avx2::sample,
    .best_allowed = avx2::best_allowed,
};

}  // namespace caudal::avxvnni
