#include "../isa_kernels.h"
#include "../rope_impl.h"

namespace caudal::ref {
namespace {

struct ScalarConvert {
  static void to_half(const float* x, int n, uint16_t* out) {
    for (int i = 0; i < n; ++i) out[i] = float_to_half(x[i]);
  }

  // NaN and infinity make the scale NaN, whatever is stored.
  static float to_int8(const float* x, int n, int8_t* out) {
    uint32_t bits = 0;
    for (int i = 0; i < n; ++i) {
      const uint32_t magnitude = __builtin_bit_cast(uint32_t, x[i]) & 0x7fffffffu;
      bits = magnitude > bits ? magnitude : bits;
    }
    const QuantScale scale = quant_scale(bits, kQuantMax8);
    for (int i = 0; i < n; ++i) {
      const float q = scale.d == scale.d ? x[i] * scale.inverse : 0.0f;
      out[i] = static_cast<int8_t>((q + kRoundShift) - kRoundShift);
    }
    return scale.d;
  }
};

}  // namespace

void rope_table(const RopeTableArgs& args, Worker& worker) { run_rope_table(args, worker); }

void rope_and_cache(const RopeCacheArgs& args, Worker& worker) {
  run_rope_and_cache<ScalarConvert>(args, worker);
}

}  // namespace caudal::ref
