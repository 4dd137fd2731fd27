// The tile unit's configuration, for all kernels that use it.
#pragma once

#include <cstdint>

namespace caudal::amx {
namespace {

struct TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

inline void load_config(const TileConfig& config) {
  asm volatile("ldtilecfg %0" : : "m"(config));
}

}  // namespace
}  // namespace caudal::amx
