// Peak loops in plain C++: what the compiler makes of them.
#include "../peaks.h"

namespace caudal::ref {
namespace {

constexpr int kValues = 1024;

int64_t int8_dot(int64_t iterations) {
  int8_t a[kValues];
  int8_t b[kValues];
  for (int i = 0; i < kValues; ++i) {
    a[i] = static_cast<int8_t>(i);
    b[i] = static_cast<int8_t>(3 * i);
  }
  for (int64_t n = 0; n < iterations; ++n) {
    int32_t sum = 0;
    for (int i = 0; i < kValues; ++i) sum += a[i] * b[i];
    asm volatile("" : : "r"(sum), "r"(a), "r"(b) : "memory");
  }
  return iterations * kValues * 2;
}

int64_t fp32_fma(int64_t iterations) {
  float acc[kValues] = {};
  for (int64_t n = 0; n < iterations; ++n) {
    for (int i = 0; i < kValues; ++i) acc[i] = acc[i] * 0.5f + 1.0f;
    asm volatile("" : : "r"(acc) : "memory");
  }
  return iterations * kValues * 2;
}

void read(const std::byte* data, int64_t bytes, int64_t prefetch_bytes) {
  uint64_t sum[8] = {};
  for (int64_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(data + i + prefetch_bytes);
    const auto* words = reinterpret_cast<const uint64_t*>(data + i);
    for (int j = 0; j < 8; ++j) sum[j] ^= words[j];
  }
  for (uint64_t s : sum) asm volatile("" : : "r"(s));
}

}  // namespace

const PeakTable kPeaks = {"ref", int8_dot, fp32_fma, read};

}  // namespace caudal::ref
