#include "../simd_avx512.h"
#include "../attention_impl.h"
#include "../isa_kernels.h"

namespace caudal::avx512vnni {

void attention(const AttentionArgs& args, Worker& worker) {
  if (args.kv.format == KVFormat::kInt8) {
    run_attention<Int8Cache>(args, worker);
  } else {
    run_attention<HalfCache>(args, worker);
  }
}

}  // namespace caudal::avx512vnni
