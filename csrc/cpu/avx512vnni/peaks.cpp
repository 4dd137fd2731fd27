// Peak loops: independent chains, so that only the execution ports limit them.
#include "../peaks.h"

#include <immintrin.h>

#include "peak_loops.h"

namespace caudal::avx512vnni {
namespace {

#define CAUDAL_CLOBBERS                                                                       \
  "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm14", \
      "xmm15"

#define CAUDAL_OP(op, sum) op " %%zmm15, %%zmm14, %%zmm" sum "\n"
#define CAUDAL_LOOP(op)                                                                         \
  "vzeroall\n"                                                                                  \
  "1:\n" CAUDAL_OP(op, "0") CAUDAL_OP(op, "1") CAUDAL_OP(op, "2") CAUDAL_OP(op, "3")            \
      CAUDAL_OP(op, "4") CAUDAL_OP(op, "5") CAUDAL_OP(op, "6") CAUDAL_OP(op, "7")               \
          CAUDAL_OP(op, "8") CAUDAL_OP(op, "9") "dec %0\n"                                      \
                                                "jnz 1b\n"

int64_t int8_dot(int64_t iterations) {
  int64_t left = iterations;
  asm volatile(CAUDAL_LOOP("vpdpbusd") : "+r"(left) : : CAUDAL_CLOBBERS);
  return iterations * 10 * 128;
}

}  // namespace

int64_t peak_fp32_fma(int64_t iterations) {
  int64_t left = iterations;
  asm volatile(CAUDAL_LOOP("vfmadd231ps") : "+r"(left) : : CAUDAL_CLOBBERS);
  return iterations * 10 * 32;
}

void peak_read(const std::byte* data, int64_t bytes, int64_t prefetch_bytes) {
  __m512i sum[4] = {};
  for (int64_t i = 0; i < bytes; i += 256) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const std::byte* p = data + i + 64 * j;
      _mm_prefetch(reinterpret_cast<const char*>(p + prefetch_bytes), _MM_HINT_T0);
      sum[j] = _mm512_xor_si512(sum[j], _mm512_loadu_si512(p));
    }
  }
  asm volatile("" : : "v"(sum[0]), "v"(sum[1]), "v"(sum[2]), "v"(sum[3]));
}

const PeakTable kPeaks = {"avx512vnni", int8_dot, peak_fp32_fma, peak_read};

}  // namespace caudal::avx512vnni
