// Sixteen 32-bit lanes in plain C++, with the part of the interface of simd_avx512.h that sampling
// needs. The slow reference, and what an architecture without kernels of its own runs.
#pragma once

#include <cstdint>

#include "numerics.h"

namespace caudal {
namespace {

constexpr int kLanes = 16;

struct F32 {
  float v[kLanes];

  template <class Lane>
  static F32 make(Lane lane) {
    F32 out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = lane(i);
    return out;
  }
  static F32 zero() { return set1(0.0f); }
  static F32 set1(float x) {
    return make([&](int) { return x; });
  }
  static F32 load(const float* p) {
    return make([&](int i) { return p[i]; });
  }
  static F32 load_first(const float* p, int count, float fill) {
    return make([&](int i) { return i < count ? p[i] : fill; });
  }
  void store(float* p) const {
    for (int i = 0; i < kLanes; ++i) p[i] = v[i];
  }

  static F32 fma(F32 a, F32 b, F32 c) {
    return make([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
  }
  static F32 min(F32 a, F32 b) {
    return make([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  static F32 max(F32 a, F32 b) {
    return make([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static F32 max_bits(F32 a, F32 b) {
    return make([&](int i) { return bits(a.v[i]) > bits(b.v[i]) ? a.v[i] : b.v[i]; });
  }
  static F32 abs(F32 a) {
    return make([&](int i) { return __builtin_fabsf(a.v[i]); });
  }
  static F32 zero_if_less(F32 a, F32 b, F32 x) {
    return make([&](int i) { return a.v[i] < b.v[i] ? 0.0f : x.v[i]; });
  }
  static F32 zero_unless_less(F32 a, F32 b, F32 x) {
    return make([&](int i) { return a.v[i] < b.v[i] ? x.v[i] : 0.0f; });
  }
  static F32 add_exponent(F32 p, F32 shifted) {
    return make([&](int i) { return F32x1::add_exponent({p.v[i]}, {shifted.v[i]}).v; });
  }
  static F32 keep_first(F32 x, int count, F32 other) {
    return make([&](int i) { return i < count ? x.v[i] : other.v[i]; });
  }
  static F32 select(uint32_t mask, F32 x, F32 other) {
    return make([&](int i) { return mask >> i & 1 ? x.v[i] : other.v[i]; });
  }
  static uint32_t less_mask(F32 a, F32 b) {
    uint32_t mask = 0;
    for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint32_t>(a.v[i] < b.v[i]) << i;
    return mask;
  }
  static uint32_t equal_mask(F32 a, F32 b) {
    uint32_t mask = 0;
    for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint32_t>(a.v[i] == b.v[i]) << i;
    return mask;
  }
  int compress(float* out, uint32_t mask) const {
    int count = 0;
    for (int i = 0; i < kLanes; ++i) {
      if (mask >> i & 1) out[count++] = v[i];
    }
    return count;
  }
  float max_lane() const {
    float m = v[0];
    for (int i = 1; i < kLanes; ++i) m = m > v[i] ? m : v[i];
    return m;
  }
  float max_lane_bits() const {
    float m = v[0];
    for (int i = 1; i < kLanes; ++i) m = bits(m) > bits(v[i]) ? m : v[i];
    return m;
  }

  friend F32 operator+(F32 a, F32 b) {
    return make([&](int i) { return a.v[i] + b.v[i]; });
  }
  friend F32 operator-(F32 a, F32 b) {
    return make([&](int i) { return a.v[i] - b.v[i]; });
  }
  friend F32 operator*(F32 a, F32 b) {
    return make([&](int i) { return a.v[i] * b.v[i]; });
  }
  friend F32 operator/(F32 a, F32 b) {
    return make([&](int i) { return a.v[i] / b.v[i]; });
  }

 private:
  static uint32_t bits(float x) { return __builtin_bit_cast(uint32_t, x); }
};

struct F64Sum {
  double v[kLanes] = {};

  void add(F32 x) {
    for (int i = 0; i < kLanes; ++i) v[i] += static_cast<double>(x.v[i]);
  }
  double total() const {
    double s[kLanes];
    for (int i = 0; i < kLanes; ++i) s[i] = v[i];
    for (int step = kLanes / 2; step > 0; step /= 2) {
      for (int i = 0; i < step; ++i) s[i] += s[i + step];
    }
    return s[0];
  }
};

}  // namespace
}  // namespace caudal
