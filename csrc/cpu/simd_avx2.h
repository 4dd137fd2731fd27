// Sixteen 32-bit lanes in two AVX2 registers; simd_avx512.h offers the same interface.
//
// Anonymous namespace: object files with different ISA flags must share no code (see numerics.h).
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace caudal {
namespace {

constexpr int kLanes = 16;

// Attention keeps a tile of sums in registers: at most so many rows (for keys and values straight
// from the cache, and for widened ones), and so many vectors per row of a tile of `rows` rows.
constexpr int max_tile_rows(bool, bool) { return 6; }
constexpr int tile_width(int rows) { return rows <= 3 ? 2 : 1; }

// Per mask of 8 lanes the numbers of those that are set, a byte each.
struct CompressLanes {
  uint64_t lanes[256];
  constexpr CompressLanes() : lanes{} {
    for (int mask = 0; mask < 256; ++mask) {
      int count = 0;
      for (int i = 0; i < 8; ++i) {
        if (mask >> i & 1) lanes[mask] |= uint64_t(i) << (8 * count++);
      }
    }
  }
};
constexpr CompressLanes kCompressLanes;

struct F32 {
  __m256 lo, hi;

  static F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static F32 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  // The first `count` floats at p, `fill` in the other lanes.
  static F32 load_first(const float* p, int count, float fill) {
    alignas(32) float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? p[i] : fill;
    return load(lanes);
  }
  static F32 load_half(const std::byte* p) {
    const auto* halves = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
  }
  void store(float* p) const {
    _mm256_storeu_ps(p, lo);
    _mm256_storeu_ps(p + 8, hi);
  }
  void store_half(uint16_t* p) const {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(lo, kMode));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(hi, kMode));
  }

  static F32 fma(F32 a, F32 b, F32 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
  }
  // As minps and maxps: the second operand if either is NaN.
  static F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
  static F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
  // Larger bit pattern: on non-negative numbers the maximum, with NaN above all.
  static F32 max_bits(F32 a, F32 b) { return {max_bits(a.lo, b.lo), max_bits(a.hi, b.hi)}; }
  static F32 abs(F32 a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
  }
  // x where not (a < b), else 0.
  static F32 zero_if_less(F32 a, F32 b, F32 x) {
    return {_mm256_and_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_NLT_UQ), x.lo),
            _mm256_and_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_NLT_UQ), x.hi)};
  }
  // x where a < b, else 0.
  static F32 zero_unless_less(F32 a, F32 b, F32 x) {
    return {_mm256_and_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), x.lo),
            _mm256_and_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ), x.hi)};
  }
  // p * 2^n, where the low bits of `shifted` hold the integer n.
  static F32 add_exponent(F32 p, F32 shifted) {
    return {add_exponent(p.lo, shifted.lo), add_exponent(p.hi, shifted.hi)};
  }
  // Lanes below `count` of x, `other` above; count 0 .. 16.
  static F32 keep_first(F32 x, int count, F32 other) {
    const __m256i n = _mm256_set1_epi32(count);
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i keep_lo = _mm256_cmpgt_epi32(n, lane);
    const __m256i keep_hi = _mm256_cmpgt_epi32(n, _mm256_add_epi32(lane, _mm256_set1_epi32(8)));
    return {_mm256_blendv_ps(other.lo, x.lo, _mm256_castsi256_ps(keep_lo)),
            _mm256_blendv_ps(other.hi, x.hi, _mm256_castsi256_ps(keep_hi))};
  }
  // Lanes whose bit is set in `mask` of x, the others of `other`.
  static F32 select(uint32_t mask, F32 x, F32 other) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i lo = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(mask)), bits);
    const __m256i hi = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(mask >> 8)), bits);
    const __m256 keep_lo = _mm256_castsi256_ps(_mm256_cmpeq_epi32(lo, bits));
    const __m256 keep_hi = _mm256_castsi256_ps(_mm256_cmpeq_epi32(hi, bits));
    return {_mm256_blendv_ps(other.lo, x.lo, keep_lo), _mm256_blendv_ps(other.hi, x.hi, keep_hi)};
  }
  // Bit i is set where a < b, or a == b, in lane i.
  static uint32_t less_mask(F32 a, F32 b) {
    return join(_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ));
  }
  static uint32_t equal_mask(F32 a, F32 b) {
    return join(_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ));
  }
  // Writes the lanes in `mask` to out in order and returns their number; may write 16 floats.
  int compress(float* out, uint32_t mask) const {
    if (mask == 0) return 0;
    const int num_lo = __builtin_popcount(mask & 0xff);
    _mm256_storeu_ps(out, compress(lo, mask & 0xff));
    _mm256_storeu_ps(out + num_lo, compress(hi, mask >> 8));
    return num_lo + __builtin_popcount(mask >> 8);
  }
  float max_lane() const {
    const __m256 half = _mm256_max_ps(lo, hi);
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }
  float max_lane_bits() const {
    const __m256i half = _mm256_max_epu32(_mm256_castps_si256(lo), _mm256_castps_si256(hi));
    __m128i x = _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0x4e));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(x));
  }
  // Lane i += lane i + 8, i + 4, i + 2, i + 1.
  float sum_lanes() const {
    const __m256 half = _mm256_add_ps(lo, hi);
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }

  friend F32 operator+(F32 a, F32 b) {
    return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
  }
  friend F32 operator-(F32 a, F32 b) {
    return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
  }
  friend F32 operator*(F32 a, F32 b) {
    return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
  }
  friend F32 operator/(F32 a, F32 b) {
    return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
  }

 private:
  static __m256 max_bits(__m256 a, __m256 b) {
    return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
  }
  static __m256 add_exponent(__m256 p, __m256 shifted) {
    const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), n));
  }
  static __m256 compress(__m256 x, uint32_t mask) {
    const __m128i lanes = _mm_cvtsi64_si128(static_cast<int64_t>(kCompressLanes.lanes[mask]));
    return _mm256_permutevar8x32_ps(x, _mm256_cvtepu8_epi32(lanes));
  }
  static uint32_t join(__m256 lo, __m256 hi) {
    return static_cast<uint32_t>(_mm256_movemask_ps(lo)) |
           static_cast<uint32_t>(_mm256_movemask_ps(hi)) << 8;
  }
};

// Sixteen sums in double precision.
struct F64Sum {
  __m256d v[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(),
                  _mm256_setzero_pd()};

  void add(F32 x) {
    v[0] = _mm256_add_pd(v[0], _mm256_cvtps_pd(_mm256_castps256_ps128(x.lo)));
    v[1] = _mm256_add_pd(v[1], _mm256_cvtps_pd(_mm256_extractf128_ps(x.lo, 1)));
    v[2] = _mm256_add_pd(v[2], _mm256_cvtps_pd(_mm256_castps256_ps128(x.hi)));
    v[3] = _mm256_add_pd(v[3], _mm256_cvtps_pd(_mm256_extractf128_ps(x.hi, 1)));
  }
  // Lane i += lane i + 8, i + 4, i + 2, i + 1.
  double total() const {
    const __m256d four = _mm256_add_pd(_mm256_add_pd(v[0], v[2]), _mm256_add_pd(v[1], v[3]));
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
  }
};

// 16 int32, or 16 pairs of int16.
struct I32 {
  __m256i lo, hi;

  static I32 zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static I32 set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static I32 load(const int32_t* p) {
    const auto* q = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
  }
  // 32 int8 widened to int16.
  static I32 load_pairs(const std::byte* p) {
    const auto* bytes = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(bytes)),
            _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes + 1))};
  }
  void store(int32_t* p) const {
    auto* q = reinterpret_cast<__m256i*>(p);
    _mm256_storeu_si256(q, lo);
    _mm256_storeu_si256(q + 1, hi);
  }
  // acc + the two products of each lane's int16 pairs.
  static I32 dot(I32 a, I32 b, I32 acc) {
    return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(a.lo, b.lo)),
            _mm256_add_epi32(acc.hi, _mm256_madd_epi16(a.hi, b.hi))};
  }
  F32 to_float() const { return {_mm256_cvtepi32_ps(lo), _mm256_cvtepi32_ps(hi)}; }
};

// Rounds to nearest even and saturates to int16; NaN gives -32768.
inline void store_int16(F32 x, int16_t* p) {
  const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

inline void prefetch(const std::byte* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
}

}  // namespace
}  // namespace caudal
