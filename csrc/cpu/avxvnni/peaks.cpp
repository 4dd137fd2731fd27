// Peak loops: VNNI for int8, the rest is avx2's.
#include "../avx2/peak_loops.h"
#include "../peaks.h"

namespace caudal::avxvnni {
namespace {

#define CAUDAL_DOT(sum) "%{vex%} vpdpbusd %%ymm15, %%ymm14, %%ymm" sum "\n"

int64_t int8_dot(int64_t iterations) {
  int64_t left = iterations;
  asm volatile(
      "vzeroall\n"
      "1:\n"  // clang-format off
      CAUDAL_DOT("0") CAUDAL_DOT("1") CAUDAL_DOT("2") CAUDAL_DOT("3") CAUDAL_DOT("4")
      CAUDAL_DOT("5") CAUDAL_DOT("6") CAUDAL_DOT("7") CAUDAL_DOT("8") CAUDAL_DOT("9")
      "dec %0\n"  // clang-format on
      "jnz 1b\n"
      : "+r"(left)
      :
      : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",
        "xmm14", "xmm15");
  return iterations * 10 * 64;
}

}  // namespace

const PeakTable kPeaks = {"avxvnni", int8_dot, avx2::peak_fp32_fma, avx2::peak_read};

}  // namespace caudal::avxvnni
