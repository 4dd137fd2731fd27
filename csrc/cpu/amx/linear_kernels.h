// The parts of this instruction set's linear kernel; the rest is avx512vnni's.
#pragma once

#include "../avx512vnni/linear_kernels.h"

namespace caudal::amx {

// Fills the bf16 panels of `count` tokens from `token` on.
void quantize_bf16(const LinearArgs&, const PanelSet& panels, int64_t token, int64_t count);

constexpr int kBf16TilesPerTask = 4;

namespace {

// Value i of a w4 block in the order of its nibbles: 16-bit lane 2 r + j of load i holds row r's
// columns 4 i + 2 j, 16 + 4 i + 2 j, and one more of each, from the low nibble up.
constexpr int w4_column(int i) {
  const int pair = i / 2;
  return 4 * (pair / 4) + 2 * (i % 2) + (pair % 4) / 2 + 16 * (pair % 2);
}

struct Order {
  alignas(64) uint16_t column[kBlockCols];
};

constexpr Order make_w4_order() {
  Order order = {};
  for (int i = 0; i < kBlockCols; ++i) order.column[i] = static_cast<uint16_t>(w4_column(i));
  return order;
}

constexpr Order kW4Order = make_w4_order();

// Of a block of 32 bf16, for a panel that w4 reads.
inline __m512i load_w4_order() { return _mm512_load_si512(kW4Order.column); }

inline __m512i round_block(__m512 low, __m512 high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

}  // namespace

// Tiles that share the weights: w4 with int8 or 12-bit panels, w4 or w8 with bf16 ones.
void run_w4(const TileArgs* tiles, int num_tiles, std::byte* workspace);
void run_bf16(WeightFormat, const TileArgs* tiles, int num_tiles, std::byte* workspace);

}  // namespace caudal::amx
