// Sixteen 32-bit lanes in one AVX-512 register; simd_avx2.h offers the same interface.
//
// Anonymous namespace: object files with different ISA flags must share no code (see numerics.h).
#pragma once

// GCC takes the undefined operand of its own unmasked AVX-512 intrinsics for an error of ours.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace caudal {
namespace {

constexpr int kLanes = 16;

// Attention keeps a tile of sums in registers: at most so many rows (for keys and values straight
// from the cache, and for widened ones), and so many vectors per row of a tile of `rows` rows.
constexpr int max_tile_rows(bool is_wide, bool is_int8) { return is_wide && !is_int8 ? 6 : 8; }
constexpr int tile_width(int rows) { return rows <= 6 ? 4 : 3; }

struct F32 {
  __m512 v;

  static F32 zero() { return {_mm512_setzero_ps()}; }
  static F32 set1(float x) { return {_mm512_set1_ps(x)}; }
  static F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  // The first `count` floats at p, `fill` in the other lanes.
  static F32 load_first(const float* p, int count, float fill) {
    return {_mm512_mask_loadu_ps(_mm512_set1_ps(fill), first_lanes(count), p)};
  }
  static F32 load_half(const std::byte* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store_half(uint16_t* p) const {
    const __m256i h = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), h);
  }

  static F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  // As minps and maxps: the second operand if either is NaN.
  static F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
  static F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
  // Larger bit pattern: on non-negative numbers the maximum, with NaN above all.
  static F32 max_bits(F32 a, F32 b) {
    return {
        _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
  }
  static F32 abs(F32 a) { return {_mm512_abs_ps(a.v)}; }
  // x where not (a < b), else 0.
  static F32 zero_if_less(F32 a, F32 b, F32 x) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_NLT_UQ), x.v)};
  }
  // x where a < b, else 0.
  static F32 zero_unless_less(F32 a, F32 b, F32 x) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), x.v)};
  }
  // p * 2^n, where the low bits of `shifted` hold the integer n.
  static F32 add_exponent(F32 p, F32 shifted) {
    const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p.v), n))};
  }
  // x - floor(x); 0 for infinite x.
  static F32 fraction(F32 x) {
    return {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
  }
  // p * 2^floor(x)
  static F32 scale(F32 p, F32 x) { return {_mm512_scalef_ps(p.v, x.v)}; }
  // Lanes below `count` of x, `other` above; count 0 .. 16.
  static F32 keep_first(F32 x, int count, F32 other) {
    return {_mm512_mask_mov_ps(other.v, first_lanes(count), x.v)};
  }
  // Lanes whose bit is set in `mask` of x, the others of `other`.
  static F32 select(uint32_t mask, F32 x, F32 other) {
    return {_mm512_mask_mov_ps(other.v, static_cast<__mmask16>(mask), x.v)};
  }
  // Bit i is set where a < b, or a == b, in lane i.
  static uint32_t less_mask(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
  static uint32_t equal_mask(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
  // Writes the lanes in `mask` to out in order and returns their number; may write 16 floats.
  int compress(float* out, uint32_t mask) const {
    _mm512_storeu_ps(out, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), v));
    return __builtin_popcount(mask);
  }
  float max_lane() const { return _mm512_reduce_max_ps(v); }
  float max_lane_bits() const {
    return __builtin_bit_cast(float, _mm512_reduce_max_epu32(_mm512_castps_si512(v)));
  }
  // Lane i += lane i + 8, i + 4, i + 2, i + 1.
  float sum_lanes() const {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }

  friend F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
  friend F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }

 private:
  static __mmask16 first_lanes(int count) { return static_cast<__mmask16>((1u << count) - 1); }
};

// Sixteen sums in double precision.
struct F64Sum {
  __m512d lo = _mm512_setzero_pd();
  __m512d hi = _mm512_setzero_pd();

  void add(F32 x) {
    lo = _mm512_add_pd(lo, _mm512_cvtps_pd(_mm512_castps512_ps256(x.v)));
    hi = _mm512_add_pd(hi, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1)));
  }
  // Lane i += lane i + 8, i + 4, i + 2, i + 1.
  double total() const {
    const __m512d eight = _mm512_add_pd(lo, hi);
    const __m256d four =
        _mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1));
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
  }
};

// 16 int32, or 16 pairs of int16.
struct I32 {
  __m512i v;

  static I32 zero() { return {_mm512_setzero_si512()}; }
  static I32 set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
  static I32 load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
  // 32 int8 widened to int16.
  static I32 load_pairs(const std::byte* p) {
    return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  void store(int32_t* p) const { _mm512_storeu_si512(p, v); }
  // acc + the two products of each lane's int16 pairs. With the intrinsic GCC copies accumulators.
  static I32 dot(I32 a, I32 b, I32 acc) {
    asm("vpdpwssd %2, %1, %0" : "+v"(acc.v) : "v"(a.v), "v"(b.v));
    return acc;
  }
  F32 to_float() const { return {_mm512_cvtepi32_ps(v)}; }
};

// Rounds to nearest even and saturates to int16; NaN gives -32768.
inline void store_int16(F32 x, int16_t* p) {
  const __m256i packed = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x.v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}

inline void prefetch(const std::byte* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
}

}  // namespace
}  // namespace caudal
