// Attention by the format of the cache.
#include "../isa_kernels.h"
#include "attention_kernels.h"

namespace caudal::amx {

void attention(const AttentionArgs& args, Worker& worker) {
  switch (args.kv.format) {
    case KVFormat::kInt8Tiles:
      return attention_int8(args, worker);
    case KVFormat::kBf16Tiles:
      return attention_bf16(args, worker);
    default:
      return avx512vnni::attention(args, worker);
  }
}

}  // namespace caudal::amx
