// Loops that other instruction sets share with this one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace caudal::avx2 {

int64_t peak_fp32_fma(int64_t iterations);
void peak_read(const std::byte* data, int64_t bytes, int64_t prefetch_bytes);

}  // namespace caudal::avx2
