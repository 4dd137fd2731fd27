// Conversions for rope_impl.h with the vector type of the simd_*.h included before.
#pragma once

#include "rope_impl.h"

namespace caudal {
namespace {

struct SimdConvert {
  static void to_half(const float* x, int n, uint16_t* out) {
    for (int i = 0; i < n; i += kLanes) F32::load(x + i).store_half(out + i);
  }

  static float to_int8(const float* x, int n, int8_t* out) {
    F32 largest = F32::zero();
    for (int i = 0; i < n; i += kLanes) {
      largest = F32::max_bits(largest, F32::abs(F32::load(x + i)));
    }
    const uint32_t bits = __builtin_bit_cast(uint32_t, largest.max_lane_bits());
    const QuantScale scale = quant_scale(bits, kQuantMax8);
    const F32 factor = F32::set1(scale.inverse);
    alignas(64) int16_t wide[kMaxRopeHeadDim];
    for (int i = 0; i < n; i += kLanes) store_int16(F32::load(x + i) * factor, wide + i);
    for (int i = 0; i < n; ++i) out[i] = static_cast<int8_t>(wide[i]);
    return scale.d;
  }
};

}  // namespace
}  // namespace caudal
