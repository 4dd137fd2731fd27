// The tile unit: its configuration, and the instructions that several kernels use. In assembly, as the
// compiler's intrinsics do not tell it that a tile load reads memory.
#pragma once

#include <cstdint>

namespace caudal::amx {
namespace {

constexpr int kTileBytes = 1024;

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

inline void release_tiles() { asm volatile("tilerelease"); }

// Rows of a tile are `stride` bytes apart.
template <int kTile>
inline void load_tile(const void* p, int64_t stride = 64) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline void store_tile(void* p, int64_t stride = 64) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

// Adds products of pairs of bf16.
template <int kSum, int kRows, int kColumns>
inline void multiply_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kRows), "i"(kColumns));
}

}  // namespace
}  // namespace caudal::amx
