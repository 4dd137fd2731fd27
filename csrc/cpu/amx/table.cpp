#include "../isa.h"
#include "../isa_kernels.h"

namespace caudal::amx {

const KernelTable kTable = {
    .name = "amx",
    .score = score_amx,
    .has_tiles = true,
    .has_bf16 = true,
    .has_gates = true,
    .activations = Activations::kBf16,
    .sensitive_activations = Activations::kBf16,
    .embed = avx512vnni::embed,
    .rms_norm = avx512vnni::rms_norm,
    .silu_mul = avx512vnni::silu_mul,
    .linear = linear,
    .rope_table = avx512vnni::rope_table,
    .rope_and_cache = avx512vnni::rope_and_cache,
    .attention = attention,
    .sample = avx512vnni::sample,
    .best_allowed = avx512vnni::best_allowed,
};

}  // namespace caudal::amx
