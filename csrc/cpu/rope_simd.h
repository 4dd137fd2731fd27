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
    alignas(64) int16_t wide[kMaxRopeHeadDim];
    const float scale = to_int(x, n, kQuantMax8, wide);
    for (int i = 0; i < n; ++i) out[i] = static_cast<int8_t>(wide[i]);
    return scale;
  }

  static float to_int16(const float* x, int n, int16_t* out) {
    return to_int(x, n, kQuantMax16, out);
  }

 private:
  static float to_int(const float* x, int n, float quant_max, int16_t* out) {
    F32 largest = F32::zero();
    for (int i = 0; i < n; i += kLanes) {
      largest = F32::max_bits(largest, F32::abs(F32::load(x + i)));
    }
    const uint32_t bits = __builtin_bit_cast(uint32_t, largest.max_lane_bits());
    const QuantScale scale = quant_scale(bits, quant_max);
    const F32 factor = F32::set1(scale.inverse);
    for (int i = 0; i < n; i += kLanes) store_int16(F32::load(x + i) * factor, out + i);
    return scale.d;
  }
};

}  // namespace
}  // namespace caudal
