// Micro-loops that show what a core can do at best, one set per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace caudal {

struct PeakTable {
  const char* name;
  // Products of small integers with as little else as the instruction set allows; returns the
  // operations done (a multiplication and an addition are two).
  int64_t (*int8_dot)(int64_t iterations);
  // The same with fused multiply-add on float32.
  int64_t (*fp32_fma)(int64_t iterations);
  // Loads every byte once, with software prefetch that far ahead; `bytes` a multiple of 512.
  void (*read)(const std::byte* data, int64_t bytes, int64_t prefetch_bytes);
};

namespace ref {
extern const PeakTable kPeaks;
}
namespace avx2 {
extern const PeakTable kPeaks;
}
namespace avxvnni {
extern const PeakTable kPeaks;
}
namespace avx512vnni {
extern const PeakTable kPeaks;
}
namespace amx {
extern const PeakTable kPeaks;
}

}  // namespace caudal
