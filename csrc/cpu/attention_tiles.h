// Arithmetic of attention over the tiled formats of the KV cache, for a row and one split of
// kSplitTokens keys.
//
// int8: q, k and v are integers with a scale a row, or a token and head:
//   q    = round(q * (32512 / absmax)), kept as 256 * high + low, both int8
//   s[t] = (float(dot(q, k[t])) * q_scale) * k_scale[t]
//   m    = max(s[t] of the tokens that the row sees);  p[t] = 2^(s[t] - m)
//   l    = sum p by lane t % 16 in order of t, then lane i += lane i + 8, 4, 2, 1
//   w[t] = p[t] * v_scale[t], rounded to 0 .. 32512 with one scale, kept as 256 * high + low (uint8)
//   a    = float(dot(w, v)) * w_scale
// Integers are exact in any order: 256 * 127 * 127 * 256 < 2^31 for a head of 256 dimensions and for
// a split.
//
// bf16:
//   q    = bf16(q * scale * log2 e)
//   s[t] = chains(q, k[t]) over bf16_depth dimensions at a time
//   m    = max(s[t] of the tokens that the row sees);  p[t] = 2^(s[t] - m), see exp2_coarse
//   l    = sum p by lane t % 32 in order of t, then lane i += lane i + 16, 8, 4, 2, 1
//   a    = chains(bf16(p), v) over 32 tokens at a time
//   chains: from sum = 0, for each part: even = fma(x, y, even) over the first of each pair of the part
//   in order from 0, odd likewise over the second; sum = sum + (even + odd).
// A weight of zero adds nothing to a chain, so that rows which see less of a tile get the same sums.
#pragma once

#include "kernels.h"

namespace caudal {
namespace {

// bf16: dimensions that one tile multiplies, the largest even share of at most 32.
constexpr int bf16_depth(int head_dim) {
  int parts = (head_dim + 31) / 32;
  while (head_dim % (2 * parts) != 0) ++parts;
  return head_dim / parts;
}

// 2^x for weights that become bf16, x <= 0: relative error below 9e-5. V::fraction(x) is x - floor(x),
// and V::scale(p, x) is p * 2^floor(x). 1 + r * (degree 2), fitted for least relative error on [0, 1].
template <class V>
inline V exp2_coarse(V x) {
  const V r = V::fraction(x);
  V p = V::fma(V::set1(0x1.3baaa8p-4f), r, V::set1(0x1.d23788p-3f));
  p = V::fma(p, r, V::set1(0x1.63e65ap-1f));
  p = V::fma(p, r, V::set1(1.0f));
  return V::scale(p, x);
}

}  // namespace
}  // namespace caudal
