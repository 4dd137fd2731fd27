// Peak loops: the tile unit for int8, the vector unit for the rest.
#include "../avx512vnni/peak_loops.h"
#include "../peaks.h"

namespace caudal::amx {
namespace {

// All eight tiles with 16 rows of 64 bytes; unused rows of the configuration are zero.
struct FullTiles {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

int64_t int8_dot(int64_t iterations) {
  const FullTiles config;
  int64_t left = iterations;
  asm volatile(
      "ldtilecfg %1\n"
      "1:\n"
      "tdpbsud %%tmm6, %%tmm4, %%tmm0\n"
      "tdpbsud %%tmm6, %%tmm4, %%tmm1\n"
      "tdpbsud %%tmm6, %%tmm4, %%tmm2\n"
      "tdpbsud %%tmm6, %%tmm4, %%tmm3\n"
      "dec %0\n"
      "jnz 1b\n"
      "tilerelease\n"
      : "+r"(left)
      : "m"(config)
      : "cc");
  return iterations * 4 * 16 * 16 * 64 * 2;
}

}  // namespace

const PeakTable kPeaks = {"amx", int8_dot, avx512vnni::peak_fp32_fma, avx512vnni::peak_read};

}  // namespace caudal::amx
