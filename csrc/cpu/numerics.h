// Arithmetic that every instruction set performs in the same order, so that all of them, at every
// batch size and thread count, give bit-equal results.
//
// Rules for a kernel: fma only where it is written (the build forbids contraction); reductions in
// the order written here; denormals flushed to zero (the pool sets this on every thread). Everything
// is in an anonymous namespace: object files built with different ISA flags must not share code, as
// the linker would keep one copy for all. For the same reason they use no inline function or
// template of the standard library.
//
// int8 activations (w4, narrow), per 32 values k of one token:
//   bits   = max over k of (bit pattern of x[k] without the sign)   -- as integers: NaN is largest
//   absmax = bits as float
//   if absmax is infinite or NaN: d = NaN, q = 0;  if absmax < kQuantMin: d = 0, q = 0
//   else d = absmax / 127;  q = round_to_even(x * (127 / absmax))
//   s = d * float(sum of q)
// 12-bit activations (w4, wide): the same with 2047 for 127; kept as high = q >> 4 (int8) and
// low = q & 15, so that sum of qw * q = 16 * (sum of qw * high) + sum of qw * low; 32 * 15 * 2047 < 2^24.
// 13-bit activations (w8): the same with 4095 for 127 and no s; 32 * 128 * 4095 < 2^24.
// bf16 (w4 and w8): x to nearest even, denormals to 0. A weight is scaled by 2^e of its matrix
// (PackedMatrix::exponent): h = half(q * half(d * 2^e) + half(m * 2^e)), without m for w8, each half
// to nearest even from the exact value; bits = (h + 4) >> 3 with h as int16, then
// (bits & kBf16Mask) | kBf16Exponent, which is the nearest bf16, except that numbers below 2^-14
// become about 2^-15.
// One output, over blocks of 32 values in order of k, starting from acc = 0:
//   w4: acc = fma(float(sum of qw * qx), dw * dx, acc);  acc = fma(mw, s, acc)
//   w8: acc = fma(float(sum of qw * qx), dw * dx, acc)
//   bf16: two chains over the block's pairs of columns, each from 0: even = fma(w, x, even) with the
//         first of a pair, odd with the second; acc = acc + (even + odd). Pairs of w8 are
//         (0, 1), (2, 3) …; pair p of w4 is (c, c + 2) with c = 4 (p / 4) + (p % 4) / 2 + 16 (p % 2).
//         In the end acc * 2^-e.
//   f16, f32: acc = fma(w[k], x[k], acc) for every k in order (one chain a row)
// then acc + bias, then + residual.
//
// RMS norm: 16 partial sums, lane k % 16: p = fma(x, x, p) in order of k; then lane i += lane i + 8,
// i + 4, i + 2, i + 1; inv = 1 / sqrt(sum / cols + eps); out = (x * inv) * weight.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace caudal {
namespace {

constexpr float kQuantMin = 1e-30f;  // below this, 127 / absmax could overflow
constexpr float kQuantMax8 = 127.0f;
constexpr float kQuantMax12 = 2047.0f;
constexpr float kQuantMax13 = 4095.0f;
constexpr float kQuantMax16 = 32512.0f;  // 127 * 256: both bytes of 256 * high + low fit int8
constexpr int kBf16Mask = 0x87ff;
constexpr int kBf16Exponent = 0x3800;
constexpr float kRoundShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer

// One lane with the interface that exp_approx and silu_mul_approx expect of a vector type.
struct F32x1 {
  float v;
  static F32x1 set1(float x) { return {x}; }
  static F32x1 fma(F32x1 a, F32x1 b, F32x1 c) { return {__builtin_fmaf(a.v, b.v, c.v)}; }
  // As minps and maxps: the second operand if either is NaN.
  static F32x1 min(F32x1 a, F32x1 b) { return {a.v < b.v ? a.v : b.v}; }
  static F32x1 max(F32x1 a, F32x1 b) { return {a.v > b.v ? a.v : b.v}; }
  // Nearest even, for |x| < 2^22.
  static F32x1 round(F32x1 a) { return {(a.v + kRoundShift) - kRoundShift}; }
  // p * 2^n, where the low bits of `shifted` (n + kRoundShift) hold the integer n.
  static F32x1 add_exponent(F32x1 p, F32x1 shifted) {
    const uint32_t n = __builtin_bit_cast(uint32_t, shifted.v);
    return {__builtin_bit_cast(float, __builtin_bit_cast(uint32_t, p.v) + (n << 23))};
  }
  // x where not (a < b), else 0.
  static F32x1 zero_if_less(F32x1 a, F32x1 b, F32x1 x) { return {a.v < b.v ? 0.0f : x.v}; }
  friend F32x1 operator+(F32x1 a, F32x1 b) { return {a.v + b.v}; }
  friend F32x1 operator-(F32x1 a, F32x1 b) { return {a.v - b.v}; }
  friend F32x1 operator*(F32x1 a, F32x1 b) { return {a.v * b.v}; }
  friend F32x1 operator/(F32x1 a, F32x1 b) { return {a.v / b.v}; }
};

// exp(x), relative error below 2e-7; exactly 0 for x < -87 (also -inf), e^88 for x > 88; the
// default NaN stays.
// 1 + r + r^2 * (degree 3), fitted for least relative error on |r| <= ln(2) / 2.
template <class V>
inline V exp_approx(V x) {
  const V low = V::set1(-87.0f);
  const V clamped = V::max(low, V::min(V::set1(88.0f), x));
  const V shifted = V::fma(clamped, V::set1(1.44269504f), V::set1(kRoundShift));
  const V n = shifted - V::set1(kRoundShift);
  V r = V::fma(n, V::set1(-0.693145752f), clamped);
  r = V::fma(n, V::set1(-1.42860677e-6f), r);
  V p = V::fma(V::set1(0x1.10620cp-7f), r, V::set1(0x1.572adap-5f));
  p = V::fma(p, r, V::set1(0x1.5557bp-3f));
  p = V::fma(p, r, V::set1(0x1.fffdfap-2f));
  p = V::fma(p, r * r, r);
  p = p + V::set1(1.0f);
  return V::zero_if_less(x, low, V::add_exponent(p, shifted));
}

// 2^x for x <= 0, relative error below 2e-7; exactly 0 for x < -126 (also -inf); the default NaN
// stays. 1 + r * (degree 4), fitted for least relative error on |r| <= 1 / 2.
template <class V>
inline V exp2_approx(V x) {
  const V shifted = x + V::set1(kRoundShift);
  const V r = x - (shifted - V::set1(kRoundShift));
  V p = V::fma(V::set1(0x1.5bba14p-10f), r, V::set1(0x1.3cea88p-7f));
  p = V::fma(p, r, V::set1(0x1.c6b752p-5f));
  p = V::fma(p, r, V::set1(0x1.ebf9bcp-3f));
  p = V::fma(p, r, V::set1(0x1.62e42ap-1f));
  p = V::fma(p, r, V::set1(1.0f));
  return V::zero_if_less(x, V::set1(-126.0f), V::add_exponent(p, shifted));
}

// silu(gate) * up
template <class V>
inline V silu_mul_approx(V gate, V up) {
  const V one = V::set1(1.0f);
  const V e = exp_approx(V::set1(0.0f) - gate);
  return (gate / (one + e)) * up;
}

// IEEE half <-> float without hardware support; denormal halves are kept, NaN payloads are not.
inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  uint32_t exponent = (h >> 10) & 31u;
  uint32_t mantissa = h & 0x3ffu;
  uint32_t bits;
  if (exponent == 31) {
    bits = 0x7f800000u | (mantissa ? 0x400000u | (mantissa << 13) : 0u);
  } else if (exponent != 0) {
    bits = ((exponent + 112) << 23) | (mantissa << 13);
  } else if (mantissa == 0) {
    bits = 0;
  } else {
    exponent = 113;
    while (!(mantissa & 0x400u)) {
      mantissa <<= 1;
      --exponent;
    }
    bits = (exponent << 23) | ((mantissa & 0x3ffu) << 13);
  }
  return __builtin_bit_cast(float, sign | bits);
}

// Round to nearest even; overflow gives infinity.
inline uint16_t float_to_half(float f) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, f);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    half = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // normal half: 2^-14 and above
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  } else if (magnitude > 0x33000000u) {  // denormal half: above 2^-25
    const uint32_t shift = 126u - (magnitude >> 23);  // 14 .. 24
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t half_ulp = 1u << (shift - 1);
    half = (mantissa + half_ulp - 1u + ((mantissa >> shift) & 1u)) >> shift;
  } else {
    half = 0;
  }
  return static_cast<uint16_t>(sign | half);
}

// To nearest even; denormals to 0, NaN stays.
inline uint16_t float_to_bf16(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Without branches, so that loops become vectors.
  const uint32_t normal = bits + 0x7fffu + ((bits >> 16) & 1u);
  const uint32_t number = magnitude < 0x00800000u ? bits & 0x80000000u : normal;
  return static_cast<uint16_t>((magnitude > 0x7f800000u ? bits | 0x400000u : number) >> 16);
}

inline float bf16_to_float(uint16_t x) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(x) << 16);
}

// Scale of 32 activations from the largest bit pattern without sign; multiplies x before rounding.
struct QuantScale {
  float d;
  float inverse;
};

inline QuantScale quant_scale(uint32_t max_bits, float quant_max) {
  const float absmax = __builtin_bit_cast(float, max_bits);
  if (max_bits >= 0x7f800000u) return {__builtin_nanf(""), 0.0f};
  if (absmax < kQuantMin) return {0.0f, 0.0f};
  return {absmax / quant_max, quant_max / absmax};
}

// 2^-exponent, or NaN.
inline float bf16_factor(int32_t exponent) {
  if (exponent == kNotFinite) return __builtin_nanf("");
  return __builtin_bit_cast(float, static_cast<uint32_t>(127 - exponent) << 23);
}

inline float inverse_rms(const float* x, int64_t cols, float eps) {
  float partial[16] = {};
  for (int64_t k = 0; k < cols; ++k) {
    partial[k % 16] = __builtin_fmaf(x[k], x[k], partial[k % 16]);
  }
  for (int step = 8; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) partial[i] += partial[i + step];
  }
  return 1.0f / __builtin_sqrtf(partial[0] / static_cast<float>(cols) + eps);
}

}  // namespace
}  // namespace caudal
