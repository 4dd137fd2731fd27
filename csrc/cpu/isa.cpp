#include "isa.h"

#include <algorithm>
#include <stdexcept>

#include "isa_kernels.h"

#if defined(CAUDAL_X86)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace caudal {

int score_ref() { return 1; }

#if defined(CAUDAL_X86)
// __builtin_cpu_supports also checks that the operating system saves the wide registers.
int score_avx2() {
  const bool ok = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("f16c");
  return ok ? 10 : 0;
}

namespace {

// Whether a bit of EAX is set in CPUID's leaf 7, subleaf 1.
bool has_extension(int bit) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> bit & 1) != 0;
}

constexpr int kAvxVnniBit = 4;
constexpr int kAvx512Bf16Bit = 5;

}  // namespace

int score_avxvnni() { return score_avx2() > 0 && has_extension(kAvxVnniBit) ? 15 : 0; }

int score_avx512vnni() {
  const bool ok = score_avx2() > 0 && __builtin_cpu_supports("avx512f") &&
                  __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
  return ok ? 20 : 0;
}

int score_amx() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  // AMX-BF16, AVX512-FP16, AMX-TILE, AMX-INT8
  constexpr unsigned kTileBits = (1u << 22) | (1u << 23) | (1u << 24) | (1u << 25);
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool has_tiles = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kTileBits) == kTileBits;
  if (score_avx512vnni() == 0 || !has_tiles || !has_extension(kAvx512Bf16Bit)) return 0;
#if defined(SYS_arch_prctl)
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 30 : 0;
#else
  return 0;
#endif
}
#endif

std::vector<const KernelTable*> all_tables() {
  return {
#if defined(CAUDAL_X86)
      &amx::kTable,
      &avx512vnni::kTable,
      &avxvnni::kTable,
      &avx2::kTable,
#endif
      &ref::kTable,
  };
}

std::vector<const KernelTable*> available_tables() {
  std::vector<const KernelTable*> tables = all_tables();
  std::erase_if(tables, [](const KernelTable* table) { return table->score() == 0; });
  std::stable_sort(tables.begin(), tables.end(), [](const KernelTable* a, const KernelTable* b) {
    return a->score() > b->score();
  });
  return tables;
}

const KernelTable& select_table(const std::string& name) {
  const std::vector<const KernelTable*> available = available_tables();
  if (name.empty()) return *available.front();
  std::string names;
  for (const KernelTable* table : available) {
    if (table->name == name) return *table;
    names += (names.empty() ? "" : ", ") + std::string(table->name);
  }
  for (const KernelTable* table : all_tables()) {
    if (table->name == name) {
      throw std::invalid_argument("instruction set '" + name +
                                  "' is not supported by this CPU (available: " + names + ")");
    }
  }
  throw std::invalid_argument("unknown instruction set '" + name + "' (available: " + names + ")");
}

}  // namespace caudal
