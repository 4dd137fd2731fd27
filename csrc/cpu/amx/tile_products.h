// The tile unit's part of attention over int8: products of up to 16 rows with keys or values.
#pragma once

#include "attention_rows.h"
#include "tile_unit.h"

namespace caudal::amx {
namespace {

constexpr int kDots = kTileRows * kLanes;  // of one tile

// Products of a tile: with the high and the low bytes of the rows.
struct Dots {
  alignas(64) int32_t high[kDots];
  alignas(64) int32_t low[kDots];
};

// Tile registers: 0 and 1, or 6 and 7, take high and low products, 2 and 3 hold the rows' high and
// low bytes, 4 the cache's.
// `depth` bytes are multiplied per tile.
void configure(int num_rows, int depth) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = static_cast<uint16_t>(i == 2 || i == 3 ? depth : 64);
    config.rows[i] = static_cast<uint8_t>(i == 4 ? depth / 4 : num_rows);
  }
  load_config(config);
}

template <int kPair>
inline void zero_products() {
  zero_tile<6 * kPair>();
  zero_tile<6 * kPair + 1>();
}

template <int kPair>
inline void store_products(Dots& dots) {
  store_tile<6 * kPair>(dots.high);
  store_tile<6 * kPair + 1>(dots.low);
}

inline void load_rows(const void* high, const void* low, int64_t stride) {
  load_tile<2>(high, stride);
  load_tile<3>(low, stride);
}

// Adds the products of the loaded rows with the columns at `p` to a pair. Queries are signed, weights
// are not.
template <int kPair, bool kSigned>
inline void multiply(const std::byte* p) {
  load_tile<4>(p);
  if constexpr (kPair == 0 && kSigned) {
    asm volatile("tdpbssd %%tmm4, %%tmm2, %%tmm0\ntdpbssd %%tmm4, %%tmm3, %%tmm1" : : :);
  } else if constexpr (kPair == 0) {
    asm volatile("tdpbusd %%tmm4, %%tmm2, %%tmm0\ntdpbusd %%tmm4, %%tmm3, %%tmm1" : : :);
  } else if constexpr (kSigned) {
    asm volatile("tdpbssd %%tmm4, %%tmm2, %%tmm6\ntdpbssd %%tmm4, %%tmm3, %%tmm7" : : :);
  } else {
    asm volatile("tdpbusd %%tmm4, %%tmm2, %%tmm6\ntdpbusd %%tmm4, %%tmm3, %%tmm7" : : :);
  }
}

inline F32 dot_row(const Dots& dots, int row) {
  const __m512i high = _mm512_load_si512(dots.high + kLanes * row);
  const __m512i low = _mm512_load_si512(dots.low + kLanes * row);
  return {_mm512_cvtepi32_ps(combine_dots(high, low))};
}

}  // namespace
}  // namespace caudal::amx
