// The linear kernel of AVX2 machines with VNNI: an instruction adds four products of bytes to a 32-bit sum.
// The sums are the same integers, so the results are avx2's to the bit.
#include "../avx2/linear_isa.h"
#include "../isa_kernels.h"

namespace caudal::avxvnni {
namespace {

struct Products {
  static __m256i add_bytes(__m256i sums, __m256i w, __m256i x) {
    return _mm256_dpbusd_avx_epi32(sums, w, x);
  }

  template <int16_t kFactor>
  static __m256i widen(__m256i sums) {
    static_assert(kFactor == 1 || kFactor == 16);
    return kFactor == 1 ? sums : _mm256_slli_epi32(sums, 4);
  }

  static __m256i add_words(__m256i sums, __m256i w, __m256i x) {
    return _mm256_dpwssd_avx_epi32(sums, w, x);
  }
};

}  // namespace

void linear(const LinearArgs& args, Worker& worker) {
  run_linear<avx2::LinearIsa<Products>>(args, worker);
}

}  // namespace caudal::avxvnni
