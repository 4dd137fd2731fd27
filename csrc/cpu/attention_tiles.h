// Arithmetic of attention over the tiled integer formats of the KV cache.
//
// For a row and one split of kSplitTokens keys; q, k and v are integers with a scale a row, or a
// token and head:
//   q = round(q * (32512 / absmax)), kept as 256 * high + low, both int8
//   int16: dot(a, b) = 256 * sum(a_high * b_high) + sum(a_high * b_low + a_low * b_high)
//   int8:  dot(a, b) = 256 * sum(a_high * b) + sum(a_low * b)
//   s[t] = (float(dot(q, k[t])) * q_scale) * k_scale[t]
//   m    = max(s[t] of the tokens that the row sees);  p[t] = 2^(s[t] - m)
//   l    = sum p by lane t % 16 in order of t, then lane i += lane i + 8, 4, 2, 1
//   w[t] = p[t] * v_scale[t], rounded to 0 .. 32512 with one scale, kept as 256 * high + low (uint8)
//   a    = float(dot(w, v)) * w_scale
// Integers are exact in any order: 256 * 127 * 127 * 256 < 2^31 for a head of 256 dimensions and for
// a split. For int16 dot is 1/256 of the product (low times low is left out); the scales make up.
#pragma once

#include "kernels.h"

namespace caudal {
namespace {

// What dot() is to be multiplied with, besides the scales.
constexpr float dot_unit(KVFormat format) {
  return format == KVFormat::kInt16Tiles ? 256.0f : 1.0f;
}

}  // namespace
}  // namespace caudal
