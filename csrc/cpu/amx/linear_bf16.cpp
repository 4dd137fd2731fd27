// w4 and w8 x bf16 on the tile unit: 16 tokens x 16 rows x 32 columns an instruction, summed over all
// columns in the tile registers, so that a product needs no scaling of its own.
//
// Weights become bf16 in 16-bit arithmetic, 32 at a time: the quantised value as half, times scale
// plus minimum, rounded to eight bits. Scaled to below 2 a half's exponent needs only a constant to
// become that of a bf16 (see numerics.h). The conversion of a block runs beside the products of the one
// before; with one tile of tokens it is most of the work. More than four tiles do not share it: their
// sums would not fit the registers, and converting anew costs less than keeping converted weights.
#include "../simd_avx512.h"
// After the vector type:
#include "../numerics.h"
#include "linear_kernels.h"
#include "tile_unit.h"

namespace caudal::amx {
namespace {

using avx512vnni::prefetch_far;
using avx512vnni::store_rows;

// A tile is a block of weights, or of 16 tokens, as bf16; or 16 x 16 sums.
constexpr int kProducts = 4;  // of one block under way: registers for sums
constexpr int kRing = 4;      // converted blocks
static_assert((kRing + 4) * kProducts * kTileBytes <= kMinWorkspaceBytes);
static_assert(kBf16TilesPerTask == kProducts);

// Registers 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights.
void configure(int num_tokens) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = static_cast<uint8_t>(i < 6 ? num_tokens : kRowsPerGroup);
  }
  load_config(config);
}

// ------------------------------------------------------------------ weights to bf16

inline __m512i spread(int16_t x) { return _mm512_set1_epi16(x); }

// 32 halves below 2 to bf16, each of which is the half times 2^-112 * 2^112.
inline __m512i to_bf16(__m512h halves) {
  const __m512i rounded = _mm512_mulhrs_epi16(_mm512_castph_si512(halves), spread(1 << 12));
  constexpr int kAndOr = 0xea;  // (a & b) | c
  return _mm512_ternarylogic_epi32(rounded, spread(static_cast<int16_t>(kBf16Mask)),
                                   spread(kBf16Exponent), kAndOr);
}

struct Lanes {
  alignas(64) uint16_t of[32];
};

constexpr Lanes make_pairs(int first) {
  Lanes lanes = {};
  for (int i = 0; i < 32; ++i) lanes.of[i] = static_cast<uint16_t>(first + i / 2);
  return lanes;
}

// Halves of 0 to 15, twice: an index of five bits may carry a bit of the next nibble.
constexpr Lanes make_nibbles() {
  constexpr uint16_t kHalves[16] = {0x0000, 0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x4700,
                                    0x4800, 0x4880, 0x4900, 0x4980, 0x4a00, 0x4a80, 0x4b00, 0x4b80};
  Lanes lanes = {};
  for (int i = 0; i < 32; ++i) lanes.of[i] = kHalves[i % 16];
  return lanes;
}

constexpr Lanes kFirstPairs = make_pairs(0);
constexpr Lanes kSecondPairs = make_pairs(16);
constexpr Lanes kNibbles = make_nibbles();

inline __m512h half_of_exponent(int32_t exponent) {
  return _mm512_set1_ph(static_cast<_Float16>(exponent == kNotFinite ? 0 : exponent));
}

// A converter's convert(block, put) calls put(pair, values) for the 16 pairs of columns of a block;
// `values` holds, for each of 16 rows, the pair's two.
struct W4 {
  static constexpr int kBytes = static_cast<int>(kWeightBytes[static_cast<int>(WeightFormat::kW4)]);

  explicit W4(int32_t exponent) : exponent_(half_of_exponent(exponent)) {}

  template <class Put>
  void convert(const std::byte* block, Put put) const {
    const __m512i scales = _mm512_loadu_si512(block + 256);
    const __m512h d = scaled(_mm512_permutexvar_epi16(first_, scales));
    const __m512h m = scaled(_mm512_permutexvar_epi16(second_, scales));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i raw = _mm512_loadu_si512(block + 64 * i);
      put(4 * i, weight(raw, d, m));
      put(4 * i + 1, weight(_mm512_srli_epi16(raw, 4), d, m));
      put(4 * i + 2, weight(_mm512_srli_epi16(raw, 8), d, m));
      put(4 * i + 3, weight(_mm512_srli_epi16(raw, 12), d, m));
    }
  }

 private:
  __m512h scaled(__m512i halves) const {
    return _mm512_scalef_ph(_mm512_castsi512_ph(halves), exponent_);
  }

  __m512i weight(__m512i index, __m512h d, __m512h m) const {
    const __m512h q = _mm512_castsi512_ph(_mm512_permutexvar_epi16(index, nibbles_));
    return to_bf16(_mm512_fmadd_ph(q, d, m));
  }

  const __m512h exponent_;
  const __m512i first_ = _mm512_load_si512(kFirstPairs.of);
  const __m512i second_ = _mm512_load_si512(kSecondPairs.of);
  const __m512i nibbles_ = _mm512_load_si512(kNibbles.of);
};

struct W8 {
  static constexpr int kBytes = static_cast<int>(kWeightBytes[static_cast<int>(WeightFormat::kW8)]);

  explicit W8(int32_t exponent) : exponent_(half_of_exponent(exponent)) {}

  template <class Put>
  void convert(const std::byte* block, Put put) const {
    const __m256i scales = load_half_register(block + 512);
    const __m512i spread = _mm512_permutexvar_epi16(first_, _mm512_castsi256_si512(scales));
    const __m512h d = _mm512_scalef_ph(_mm512_castsi512_ph(spread), exponent_);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const __m512i q = _mm512_cvtepi8_epi16(load_half_register(block + 32 * i));
      put(i, to_bf16(_mm512_mul_ph(_mm512_cvtepi16_ph(q), d)));
    }
  }

 private:
  static __m256i load_half_register(const std::byte* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }

  const __m512h exponent_;
  const __m512i first_ = _mm512_load_si512(kFirstPairs.of);
};

// As an operand of the tile unit.
template <class W>
inline void convert_tile(const W& weights, const std::byte* block, std::byte* out) {
  weights.convert(block, [out](int pair, __m512i values) {
    _mm512_store_si512(out + 64 * pair, values);
  });
}

// ------------------------------------------------------------------ products

inline F32 load_sum(const std::byte* sums, int token) {
  return F32::load(reinterpret_cast<const float*>(sums + 64 * token));
}

// Sums of a tile, [tokens][16 rows], to the outputs of kGroups groups, which lie next to each other.
template <int kGroups>
void finish(const TileArgs& tile, int64_t group, const std::byte* sums) {
  const F32 factor = F32::set1(bf16_factor(tile.exponent));
  for (int t = 0; t < tile.num_tokens; ++t) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      store_rows(tile, group + g, t, (load_sum(sums + g * kTileBytes, t) * factor).v);
    }
  }
}

// Two groups of gates, from an even one on, open two others: a block of the next linear's panel. `sums`:
// those of the two, then of what they open.
void finish_gates(const TileArgs& tile, int64_t group, const std::byte* const* sums) {
  const F32 factor = F32::set1(bf16_factor(tile.exponent));
  const bool is_w4 = tile.gate_reader == WeightFormat::kW4;
  const __m512i order = load_w4_order();
  const auto value = [&](int g, int t) {
    return silu_mul_approx(load_sum(sums[g], t) * factor, load_sum(sums[g + 2], t) * factor).v;
  };
  std::byte* out = tile.gate_panel + group / 2 * 64 * tile.num_tokens;
  for (int t = 0; t < tile.num_tokens; ++t) {
    const __m512i rounded = round_block(value(0, t), value(1, t));
    _mm512_storeu_si512(out + 64 * t,
                        is_w4 ? _mm512_permutexvar_epi16(order, rounded) : rounded);
  }
}

// Calls op.operator()<i>() for i < kCount.
template <int kCount, class Op>
inline void for_each(Op op) {
  op.template operator()<0>();
  if constexpr (kCount > 1) op.template operator()<1>();
  if constexpr (kCount > 2) op.template operator()<2>();
  if constexpr (kCount > 3) op.template operator()<3>();
}

// kTiles tiles of tokens against kGroups groups, the first ones of kRuns runs of neighbours, at most four
// products a block: the next block is converted while the tile unit works on the one before. The sums
// of tile t and group g go to sums + (t * kGroups + g) tiles.
template <class W, int kTiles, int kGroups, int kRuns>
void multiply_groups(const W& weights, const TileArgs* tiles, const int64_t (&runs)[kRuns],
                     std::byte* ring, std::byte* sums) {
  constexpr int kRunGroups = kGroups / kRuns;
  const int64_t num_blocks = tiles[0].num_blocks;
  const std::byte* groups[kGroups];
  for (int g = 0; g < kGroups; ++g) {
    const int64_t index = runs[g / kRunGroups] + g % kRunGroups;
    groups[g] = tiles[0].weights + index * num_blocks * W::kBytes;
  }
  const auto load_tokens = [&]<int kTile>(int64_t b) {
    load_tile<4 + kTile % 2>(tiles[kTile].panel + b * 64 * tiles[kTile].num_tokens);
  };
  const auto multiply_group = [&]<int kGroup>(int64_t b) {
    load_tile<6 + kGroup % 2>(ring + (b % kRing * kGroups + kGroup) * kTileBytes);
    if constexpr (kTiles > 2) {
      for_each<kTiles>([&]<int kTile>() {
        load_tokens.template operator()<kTile>(b);
        multiply_bf16<kTile, 4 + kTile % 2, 6>();
      });
    } else {
      for_each<kTiles>([&]<int kTile>() {
        if constexpr (kGroup == 0) load_tokens.template operator()<kTile>(b);
        multiply_bf16<kTile * kGroups + kGroup, 4 + kTile, 6 + kGroup % 2>();
      });
    }
  };
  for_each<kTiles * kGroups>([]<int kSum>() { zero_tile<kSum>(); });
  for (int64_t b = 0; b < num_blocks; ++b) {
    std::byte* out = ring + b % kRing * kGroups * kTileBytes;
    for_each<kGroups>([&]<int kGroup>() {
      const std::byte* block = groups[kGroup] + b * W::kBytes;
      // The groups after these are the next to be read.
      prefetch_far(block + kRunGroups * num_blocks * W::kBytes, W::kBytes);
      convert_tile(weights, block, out + kGroup * kTileBytes);
      if (b > 0) multiply_group.template operator()<kGroup>(b - 1);
    });
  }
  for_each<kGroups>([&]<int kGroup>() { multiply_group.template operator()<kGroup>(num_blocks - 1); });
  for_each<kTiles * kGroups>([&]<int kSum>() { store_tile<kSum>(sums + kSum * kTileBytes); });
}

// Calls op.operator()<n>(first) for all groups, n at a time: kMost, then half as many, down to one.
template <int kMost, class Op>
void for_all_groups(int64_t first, int64_t num_groups, Op op) {
  for (; first + kMost <= num_groups; first += kMost) op.template operator()<kMost>(first);
  if constexpr (kMost > 1) for_all_groups<kMost / 2>(first, num_groups, op);
}

template <class W, int kTiles>
void run_groups(const W& weights, const TileArgs* tiles, std::byte* workspace) {
  std::byte* sums = workspace + kRing * kProducts * kTileBytes;
  for_all_groups<kProducts / kTiles>(0, tiles[0].num_groups, [&]<int kGroups>(int64_t first) {
    multiply_groups<W, kTiles, kGroups, 1>(weights, tiles, {first}, workspace, sums);
    for (int t = 0; t < kTiles; ++t) {
      finish<kGroups>(tiles[t], first, sums + t * kGroups * kTileBytes);
    }
  });
}

template <class W, int kTiles>
void run_gates(const W& weights, const TileArgs* tiles, std::byte* workspace) {
  // Groups that are multiplied together: gates and what they open, or some of both.
  constexpr int kGroups = kProducts / kTiles;
  std::byte* sums = workspace + kRing * kProducts * kTileBytes;
  for (int64_t group = 0; group < tiles[0].num_groups; group += 2) {
    const int64_t up = group + tiles[0].up_groups;
    if constexpr (kGroups == 4) {
      multiply_groups<W, kTiles, 4, 2>(weights, tiles, {group, up}, workspace, sums);
    } else {
      for (int i = 0; i < 4; i += kGroups) {
        const int64_t first = (i < 2 ? group : up) + i % 2;
        multiply_groups<W, kTiles, kGroups, 1>(weights, tiles, {first}, workspace,
                                               sums + i * kTiles * kTileBytes);
      }
    }
    // Sum of tile t and group i of the four: in passes of kGroups, each [tiles][kGroups].
    const auto sum = [&](int t, int i) {
      return sums + (i / kGroups * kGroups * kTiles + t * kGroups + i % kGroups) * kTileBytes;
    };
    for (int t = 0; t < kTiles; ++t) {
      const std::byte* four[] = {sum(t, 0), sum(t, 1), sum(t, 2), sum(t, 3)};
      finish_gates(tiles[t], group, four);
    }
  }
}

template <class W, int kTiles>
void run_tiles(const W& weights, const TileArgs* tiles, std::byte* workspace) {
  (tiles[0].up_groups > 0 ? run_gates<W, kTiles> : run_groups<W, kTiles>)(weights, tiles, workspace);
}

template <class W>
void run(const TileArgs* tiles, int num_tiles, std::byte* workspace) {
  const W weights(tiles[0].exponent);
  // Tiles of a linear differ by one token at most. A tile with one less than configured reads one
  // row too many, which lies in the panels' memory, and ignores the result.
  int max_tokens = 0;
  for (int i = 0; i < num_tiles; ++i) {
    max_tokens = tiles[i].num_tokens > max_tokens ? tiles[i].num_tokens : max_tokens;
  }
  configure(max_tokens);
  switch (num_tiles) {
    case 1:
      run_tiles<W, 1>(weights, tiles, workspace);
      break;
    case 2:
      run_tiles<W, 2>(weights, tiles, workspace);
      break;
    case 3:
      run_tiles<W, 3>(weights, tiles, workspace);
      break;
    default:
      run_tiles<W, 4>(weights, tiles, workspace);
  }
  release_tiles();
}

}  // namespace

void run_bf16(WeightFormat format, const TileArgs* tiles, int num_tiles, std::byte* workspace) {
  (format == WeightFormat::kW4 ? run<W4> : run<W8>)(tiles, num_tiles, workspace);
}

}  // namespace caudal::amx
