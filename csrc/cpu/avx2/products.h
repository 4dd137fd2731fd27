// How AVX2 sums products of integers.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace caudal::avx2 {
namespace {

struct Products {
  // Adds products of unsigned and signed bytes to sums of pairs, in 16 bits: of a block of w4 they fit
  // (16 x 15 x 127), so it needs one widening.
  static __m256i add_bytes(__m256i sums, __m256i w, __m256i x) {
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(w, x));
  }

  // What `add_bytes` has summed up, in 32 bits, times kFactor.
  template <int16_t kFactor>
  static __m256i widen(__m256i sums) {
    return _mm256_madd_epi16(sums, _mm256_set1_epi16(kFactor));
  }

  // Adds products of 16-bit integers to sums of pairs, in 32 bits.
  static __m256i add_words(__m256i sums, __m256i w, __m256i x) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(w, x));
  }
};

}  // namespace
}  // namespace caudal::avx2
