// Entry point of the linear kernel.
#include "../isa_kernels.h"
#include "linear_isa.h"

namespace caudal::avx2 {
namespace {

struct Products {
  // Sums of pairs in 16 bits: those of a block of w4 fit (16 x 15 x 127), so it needs one widening.
  static __m256i add_bytes(__m256i sums, __m256i w, __m256i x) {
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(w, x));
  }

  template <int16_t kFactor>
  static __m256i widen(__m256i sums) {
    return _mm256_madd_epi16(sums, _mm256_set1_epi16(kFactor));
  }

  static __m256i add_words(__m256i sums, __m256i w, __m256i x) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(w, x));
  }
};

}  // namespace

void linear(const LinearArgs& args, Worker& worker) { run_linear<LinearIsa<Products>>(args, worker); }

}  // namespace caudal::avx2
