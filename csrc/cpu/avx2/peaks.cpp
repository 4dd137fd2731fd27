// Peak loops: independent chains, so that only the execution ports limit them.
#include "peak_loops.h"

#include <immintrin.h>

#include "../peaks.h"

namespace caudal::avx2 {
namespace {

#define CAUDAL_CLOBBERS                                                                       \
  "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", \
      "xmm11", "xmm14", "xmm15"

#define CAUDAL_FMA(sum) "vfmadd231ps %%ymm15, %%ymm14, %%ymm" sum "\n"
// A product is of use only once it is added to a sum.
#define CAUDAL_DOT(product, sum)                           \
  "vpmaddubsw %%ymm15, %%ymm14, %%ymm" product "\n"        \
  "vpaddw %%ymm" product ", %%ymm" sum ", %%ymm" sum "\n"

int64_t int8_dot(int64_t iterations) {
  int64_t left = iterations;
  asm volatile(
      "vzeroall\n"
      "1:\n"  // clang-format off
      CAUDAL_DOT("8", "0") CAUDAL_DOT("9", "1") CAUDAL_DOT("10", "2") CAUDAL_DOT("11", "3")
      CAUDAL_DOT("8", "4") CAUDAL_DOT("9", "5") CAUDAL_DOT("10", "6") CAUDAL_DOT("11", "7")
      "dec %0\n"  // clang-format on
      "jnz 1b\n"
      : "+r"(left)
      :
      : CAUDAL_CLOBBERS);
  return iterations * 8 * 64;
}

}  // namespace

int64_t peak_fp32_fma(int64_t iterations) {
  int64_t left = iterations;
  asm volatile(
      "vzeroall\n"
      "1:\n"  // clang-format off
      CAUDAL_FMA("0") CAUDAL_FMA("1") CAUDAL_FMA("2") CAUDAL_FMA("3") CAUDAL_FMA("4")
      CAUDAL_FMA("5") CAUDAL_FMA("6") CAUDAL_FMA("7") CAUDAL_FMA("8") CAUDAL_FMA("9")
      "dec %0\n"  // clang-format on
      "jnz 1b\n"
      : "+r"(left)
      :
      : CAUDAL_CLOBBERS);
  return iterations * 10 * 16;
}

void peak_read(const std::byte* data, int64_t bytes, int64_t prefetch_bytes) {
  __m256i sum[4] = {};
  for (int64_t i = 0; i < bytes; i += 128) {
    const auto* p = reinterpret_cast<const __m256i*>(data + i);
    const auto* ahead = reinterpret_cast<const char*>(data + i + prefetch_bytes);
    _mm_prefetch(ahead, _MM_HINT_T0);
    _mm_prefetch(ahead + 64, _MM_HINT_T0);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sum[j] = _mm256_xor_si256(sum[j], _mm256_loadu_si256(p + j));
  }
  asm volatile("" : : "x"(sum[0]), "x"(sum[1]), "x"(sum[2]), "x"(sum[3]));
}

const PeakTable kPeaks = {"avx2", int8_dot, peak_fp32_fma, peak_read};

}  // namespace caudal::avx2
