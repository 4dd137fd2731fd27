// w4 x int8 or 12 bits on the tile unit: 16 tokens x 16 rows x 32 columns an instruction. With 12
// bits the high parts meet the weights times 16 and the low parts the weights, in the same tile.
//
// A few blocks of a group are unpacked at a time and meet all tiles of tokens. The int32 products of
// these blocks are made first and then scaled in vector registers, in the order of numerics.h: one
// after the other is faster than both at once, as half of the vector unit stands still for a while
// after a tile instruction. The float sums of each tile wait in memory between such chunks. All that
// is used again stays within half of L1, as the other hardware thread of the core may need the rest.
#include "linear_kernels.h"
#include "tile_unit.h"

namespace caudal::amx {
namespace {

using avx512vnni::broadcast;
using avx512vnni::load_halves;
using avx512vnni::prefetch;
using avx512vnni::store_rows;

constexpr int kBytes = static_cast<int>(kWeightBytes[static_cast<int>(WeightFormat::kW4)]);
constexpr int kSlotValues = kMaxTileTokens * kRowsPerGroup;
constexpr int kChunk = 6;  // blocks unpacked at a time
constexpr int kDotBytes = kChunk * kSlotValues * static_cast<int>(sizeof(int32_t));
constexpr int kSumBytes = kMaxTilesPerTask * kSlotValues * static_cast<int>(sizeof(float));
constexpr int kHalfBytes = kRowsPerGroup * kBlockCols;  // a block's weights, once

// Bytes of a token's values of a block, and of the unpacked weights of a block.
template <bool kWide>
constexpr int kValueBytes = kWide ? 2 * kBlockCols : kBlockCols;
template <bool kWide>
constexpr int kUnpackedBytes = kWide ? 2 * kHalfBytes : kHalfBytes;

// Tile registers 0, 1 and 2 take the products, the activations and the weights of one block; 3, 4
// and 5 those of the next.
void configure(int num_tokens, int value_bytes) {
  TileConfig config;
  for (int i = 0; i < 6; i += 3) {
    config.row_bytes[i] = 64;
    config.rows[i] = static_cast<uint8_t>(num_tokens);
    config.row_bytes[i + 1] = static_cast<uint16_t>(value_bytes);
    config.rows[i + 1] = static_cast<uint8_t>(num_tokens);
    config.row_bytes[i + 2] = 64;
    config.rows[i + 2] = static_cast<uint8_t>(value_bytes / 4);
  }
  load_config(config);
}

// Products of one block into `out`, [tokens][16 rows]. The compiler's intrinsics do not tell it that
// a tile load reads memory.
template <bool kWide, bool kIsOdd>
inline void multiply(const std::byte* activations, const std::byte* weights, int32_t* out) {
  const int64_t stride = kValueBytes<kWide>;
  if constexpr (kIsOdd) {
    asm volatile(
        "tileloadd (%1,%3,1), %%tmm5\n"
        "tileloadd (%0,%2,1), %%tmm4\n"
        "tilezero %%tmm3\n"
        "tdpbsud %%tmm5, %%tmm4, %%tmm3\n"
        "tilestored %%tmm3, (%4,%3,1)\n"
        :
        : "r"(activations), "r"(weights), "r"(stride), "r"(int64_t{64}), "r"(out)
        : "memory");
  } else {
    asm volatile(
        "tileloadd (%1,%3,1), %%tmm2\n"
        "tileloadd (%0,%2,1), %%tmm1\n"
        "tilezero %%tmm0\n"
        "tdpbsud %%tmm2, %%tmm1, %%tmm0\n"
        "tilestored %%tmm0, (%4,%3,1)\n"
        :
        : "r"(activations), "r"(weights), "r"(stride), "r"(int64_t{64}), "r"(out)
        : "memory");
  }
}

// Blocks as bytes: [k / 4][16 rows][4]; wide ones 16 times the weights, then the weights.
template <bool kWide>
void unpack(const std::byte* block, int64_t num_blocks, std::byte* out) {
  constexpr int kOnce = kWide ? kHalfBytes : 0;
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int64_t b = 0; b < num_blocks; ++b) {
    prefetch(block + 2 * kChunk * kBytes, kBytes);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i raw = _mm512_loadu_si512(block + 64 * i);
      const __m512i low = _mm512_and_si512(raw, nibble);
      const __m512i high = _mm512_andnot_si512(nibble, raw);
      _mm512_store_si512(out + kOnce + 64 * i, low);
      _mm512_store_si512(out + kOnce + 256 + 64 * i, _mm512_srli_epi16(high, 4));
      if constexpr (kWide) {
        _mm512_store_si512(out + 64 * i, _mm512_slli_epi16(low, 4));
        _mm512_store_si512(out + 256 + 64 * i, high);
      }
    }
    block += kBytes;
    out += kUnpackedBytes<kWide>;
  }
}

template <int kTokens, bool kWide>
inline void scale_block(const int32_t* dots, const std::byte* block, const std::byte* panel,
                        __m512* acc) {
  const __m512 d = load_halves(block + 256);
  const __m512 m = load_halves(block + 288);
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) {
    const std::byte* scale = panel + kValueBytes<kWide> * kTokens + 4 * t;
    const __m512 dot = _mm512_cvtepi32_ps(_mm512_load_si512(dots + 16 * t));
    acc[t] = _mm512_fmadd_ps(dot, _mm512_mul_ps(d, broadcast(scale)), acc[t]);
    acc[t] = _mm512_fmadd_ps(m, broadcast(scale + 4 * kTokens), acc[t]);
  }
}

// Some blocks of one group; `sums` of a tile are [tokens][16 rows], kept between its chunks.
struct Chunk {
  int64_t group;
  int64_t first;  // block
  int64_t count;
  const std::byte* unpacked;
  int32_t* dots;
};

template <int kTokens, bool kWide>
void run_chunk(const TileArgs& args, const Chunk& chunk, float* sums) {
  constexpr int64_t kPanelBlock = kPanelBytes[kWide ? kInt12Panel : kInt8Panel] * kTokens;
  const std::byte* block = args.weights + (chunk.group * args.num_blocks + chunk.first) * kBytes;
  const std::byte* panel = args.panel + chunk.first * kPanelBlock;
  __m512 acc[kTokens];
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) {
    acc[t] = chunk.first == 0 ? _mm512_setzero_ps() : _mm512_load_ps(sums + 16 * t);
  }
  for (int64_t b = 0; b < chunk.count; b += 2) {
    const std::byte* x = panel + b * kPanelBlock;
    const std::byte* w = chunk.unpacked + b * kUnpackedBytes<kWide>;
    multiply<kWide, false>(x, w, chunk.dots + b * kSlotValues);
    if (b + 1 == chunk.count) break;
    multiply<kWide, true>(x + kPanelBlock, w + kUnpackedBytes<kWide>,
                          chunk.dots + (b + 1) * kSlotValues);
  }
  for (int64_t b = 0; b < chunk.count; ++b) {
    scale_block<kTokens, kWide>(chunk.dots + b * kSlotValues, block, panel, acc);
    block += kBytes;
    panel += kPanelBlock;
  }
  const bool is_last = chunk.first + chunk.count == args.num_blocks;
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) {
    if (is_last) {
      store_rows(args, chunk.group, t, acc[t]);
    } else {
      _mm512_store_ps(sums + 16 * t, acc[t]);
    }
  }
}

using RunChunk = void (*)(const TileArgs&, const Chunk&, float* sums);
template <bool kWide>
constexpr RunChunk kRunChunk[kMaxTileTokens] = {
    run_chunk<1, kWide>,  run_chunk<2, kWide>,  run_chunk<3, kWide>,  run_chunk<4, kWide>,
    run_chunk<5, kWide>,  run_chunk<6, kWide>,  run_chunk<7, kWide>,  run_chunk<8, kWide>,
    run_chunk<9, kWide>,  run_chunk<10, kWide>, run_chunk<11, kWide>, run_chunk<12, kWide>,
    run_chunk<13, kWide>, run_chunk<14, kWide>, run_chunk<15, kWide>, run_chunk<16, kWide>,
};

static_assert(kDotBytes + kSumBytes + kChunk * kUnpackedBytes<true> <= kMinWorkspaceBytes);

template <bool kWide>
void run_tiles(const TileArgs* tiles, int num_tiles, int max_tokens, std::byte* workspace) {
  auto* dots = reinterpret_cast<int32_t*>(workspace);
  auto* sums = reinterpret_cast<float*>(workspace + kDotBytes);
  std::byte* unpacked = workspace + kDotBytes + kSumBytes;
  const TileArgs& all = tiles[0];
  configure(max_tokens, kValueBytes<kWide>);
  for (int64_t group = 0; group < all.num_groups; ++group) {
    for (int64_t first = 0; first < all.num_blocks; first += kChunk) {
      const Chunk chunk = {group, first, min_of(kChunk, all.num_blocks - first), unpacked, dots};
      unpack<kWide>(all.weights + (group * all.num_blocks + first) * kBytes, chunk.count, unpacked);
      for (int i = 0; i < num_tiles; ++i) {
        kRunChunk<kWide>[tiles[i].num_tokens - 1](tiles[i], chunk, sums + i * kSlotValues);
      }
    }
  }
  release_tiles();
}

}  // namespace

void run_w4(const TileArgs* tiles, int num_tiles, std::byte* workspace) {
  // Tiles of a linear differ by one token at most. A tile with one less than configured reads one
  // row too many, which lies inside its panel, and ignores the result.
  int max_tokens = 0;
  for (int i = 0; i < num_tiles; ++i) {
    max_tokens = tiles[i].num_tokens > max_tokens ? tiles[i].num_tokens : max_tokens;
  }
  (tiles[0].activations == Activations::kInt12 ? run_tiles<true> : run_tiles<false>)(tiles, num_tiles, max_tokens, workspace);
}

}  // namespace caudal::amx
