// Declares one namespace of kernels per instruction set; see kernels.h for the arguments.
#pragma once

#include "kernels.h"

#define CAUDAL_DECLARE_KERNELS(isa)                           \
  namespace caudal::isa {                                     \
  void embed(const EmbedArgs&, Worker&);                      \
  void rms_norm(const RmsNormArgs&, Worker&);                 \
  void silu_mul(const SiluMulArgs&, Worker&);                 \
  void linear(const LinearArgs&, Worker&);                    \
  void rope_table(const RopeTableArgs&, Worker&);             \
  void rope_and_cache(const RopeCacheArgs&, Worker&);         \
  void attention(const AttentionArgs&, Worker&);              \
  void sample(const SampleArgs&, Worker&);                    \
  void best_allowed(const BestAllowedArgs&, Worker&);         \
  extern const KernelTable kTable;                            \
  }

CAUDAL_DECLARE_KERNELS(ref)
CAUDAL_DECLARE_KERNELS(avx2)
CAUDAL_DECLARE_KERNELS(avx512vnni)

// The other kernels of this set are avx2's.
namespace caudal::avxvnni {
void linear(const LinearArgs&, Worker&);
extern const KernelTable kTable;
}  // namespace caudal::avxvnni

// The other kernels of this set are avx512vnni's.
namespace caudal::amx {
void linear(const LinearArgs&, Worker&);
void attention(const AttentionArgs&, Worker&);
extern const KernelTable kTable;
}  // namespace caudal::amx

#undef CAUDAL_DECLARE_KERNELS
