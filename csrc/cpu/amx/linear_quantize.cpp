// Activations to bf16 panels.
#include "../simd_avx512.h"
// After the vector type that it uses:
#include "../linear_quantize.h"
#include "linear_kernels.h"

namespace caudal::amx {
namespace {

constexpr int kBatch = 16;  // blocks

void quantize_token(const LinearArgs& args, const PanelSet& panels, int64_t token) {
  const float* x = args.x + token * args.x_stride;
  const float inverse = args.prologue == Prologue::kRmsNorm
                            ? vector_inverse_rms(x, args.segments[0].cols, args.eps)
                            : 0.0f;
  const PanelSlot plain = panel_slot(panels, kBf16Panel, token, 2 * kBlockCols);
  const PanelSlot w4 = panel_slot(panels, kBf16W4Panel, token, 2 * kBlockCols);
  const __m512i order = load_w4_order();
  alignas(64) float buffer[kBatch * kBlockCols];
  for (int64_t block = 0; block < panels.num_blocks; block += kBatch) {
    const int count = static_cast<int>(min_of(kBatch, panels.num_blocks - block));
    const float* values =
        prepare_values(args, x, inverse, block * kBlockCols, count * kBlockCols, buffer);
    for (int i = 0; i < count; ++i) {
      const __m512 low = _mm512_loadu_ps(values + kBlockCols * i);
      const __m512 high = _mm512_loadu_ps(values + kBlockCols * i + 16);
      const __m512i rounded = round_block(low, high);
      const int64_t offset = (block + i) * plain.stride;
      if (panels.base[kBf16Panel]) _mm512_storeu_si512(plain.values + offset, rounded);
      if (panels.base[kBf16W4Panel]) {
        _mm512_storeu_si512(w4.values + offset, _mm512_permutexvar_epi16(order, rounded));
      }
    }
  }
}

}  // namespace

void quantize_bf16(const LinearArgs& args, const PanelSet& panels, int64_t token, int64_t count) {
  for (int64_t t = token; t < token + count; ++t) quantize_token(args, panels, t);
}

}  // namespace caudal::amx
