// The paged KV cache of all layers.
#pragma once

#include <string>

#include "kernels.h"
#include "memory.h"

namespace caudal {

// "f16", "int8", "int8_tiles" or "bf16_tiles"; throws std::invalid_argument for anything else.
KVFormat parse_kv_format(const std::string& name);

struct KVCacheShape {
  int num_layers;
  int64_t num_blocks;
  int num_kv_heads;
  int head_dim;
  KVFormat format;
};

// Owns one zeroed mapping [num_blocks][num_layers][num_kv_heads][head bytes] (KVLayer in kernels.h
// has the inside of a head). A block is contiguous over all layers: it is exported with one copy,
// and blocks that were never used cost no memory.
class KVCache {
 public:
  // Throws std::invalid_argument for a shape that the kernels cannot address.
  explicit KVCache(const KVCacheShape& shape);

  const KVCacheShape& shape() const { return shape_; }
  int64_t block_bytes() const { return block_bytes_; }
  std::byte* block(int64_t id) const { return memory_.data() + id * block_bytes_; }
  KVLayer layer(int index) const;

 private:
  KVCacheShape shape_;
  int64_t head_bytes_;
  int64_t block_bytes_;
  PageMemory memory_;
};

}  // namespace caudal
