#include "kv_cache.h"

#include <stdexcept>

namespace caudal {
namespace {

constexpr int kMaxHeadDim = 256;

int64_t head_bytes(const KVCacheShape& shape) {
  const int64_t values = int64_t{2} * shape.head_dim * kBlockSize * kv_value_bytes(shape.format);
  return is_int8(shape.format) ? values + 2 * kBlockSize * 4 : values;
}

void check(const KVCacheShape& shape) {
  if (shape.num_layers < 1 || shape.num_kv_heads < 1 || shape.num_blocks < 1) {
    throw std::invalid_argument("KV cache: layers, heads and blocks must be at least 1");
  }
  if (shape.head_dim < 16 || shape.head_dim > kMaxHeadDim || shape.head_dim % 16 != 0) {
    throw std::invalid_argument("KV cache: head_dim must be a multiple of 16, at most 256");
  }
  // Slots are int32.
  if (shape.num_blocks > (int64_t{1} << 31) / kBlockSize - 1) {
    throw std::invalid_argument("KV cache: too many blocks");
  }
}

}  // namespace

KVFormat parse_kv_format(const std::string& name) {
  if (name == "f16") return KVFormat::kF16;
  if (name == "int8") return KVFormat::kInt8;
  if (name == "int8_tiles") return KVFormat::kInt8Tiles;
  if (name == "bf16_tiles") return KVFormat::kBf16Tiles;
  throw std::invalid_argument("KV cache: unknown format '" + name + "'");
}

KVCache::KVCache(const KVCacheShape& shape) : shape_(shape) {
  check(shape);
  head_bytes_ = head_bytes(shape);
  block_bytes_ = head_bytes_ * shape.num_kv_heads * shape.num_layers;
  memory_ = PageMemory(static_cast<size_t>(block_bytes_ * shape.num_blocks), true);
}

KVLayer KVCache::layer(int index) const {
  return {.base = memory_.data() + index * head_bytes_ * shape_.num_kv_heads,
          .block_stride = block_bytes_,
          .head_stride = head_bytes_,
          .num_kv_heads = shape_.num_kv_heads,
          .head_dim = shape_.head_dim,
          .format = shape_.format};
}

}  // namespace caudal
