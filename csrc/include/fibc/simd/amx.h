// Tiles of Intel AMX: configuration, and the layouts that tdpbf16ps multiplies. Whoever calls a kernel has asked Linux
// for permission to use tiles.
//
// tdpbf16ps adds X[16 x 32] * Y[32 x 16] to a float32 tile [16 x 16]. X is row-major; Y holds the pair of elements
// (2i, 2i + 1) of each column next to each other: 16 rows of 16 pairs. Subnormal inputs and results count as zero.
#ifndef FIBC_SIMD_AMX_H
#define FIBC_SIMD_AMX_H

#include <immintrin.h>
#include <stdint.h>

#include "fibc/simd/vec.h"

namespace fibc {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;
constexpr int kTileElems = kTileRows * kTileDepth;
constexpr int kTileStride = 64;  // bytes between rows of a tile that lies in one piece, 1 KiB

// Compilers take tile intrinsics for code without memory operands; this keeps loads and stores on their side of it.
inline void tile_fence() { __asm__ volatile("" ::: "memory"); }

// All eight tiles of this thread: 16 rows of 64 bytes.
inline void configure_tiles() {
  struct alignas(64) Config {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  Config config{};
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = kTileStride;
    config.rows[tile] = kTileRows;
  }
  tile_fence();
  _tile_loadconfig(&config);
}

// Transposes 16 x 16 elements of 32 bits.
inline void transpose(__m512i (&rows)[16]) {
  __m512i pairs[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    pairs[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    pairs[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    pairs[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    pairs[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) {
    rows[i] = _mm512_shuffle_i32x4(pairs[i], pairs[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(pairs[i], pairs[i + 8], 0xdd);
  }
}

// 32 elements of a row as one or two vectors of bfloat16 whose sum they are, exactly. Their order within the vector is
// the same for every row, which is all that a product asks for.
template <class T>
struct Planes;

template <>
struct Planes<bfloat16> {
  static constexpr int kCount = 1;
  __m512i plane[kCount];
};

// A float16 has 11 significant bits, a bfloat16 has 8: the first plane is the element rounded, the second is what is
// left, at most 2^-8 of it and exact. No part is subnormal in bfloat16. Infinities and NaN have no such form: there the
// second plane is NaN.
template <>
struct Planes<float16> {
  static constexpr int kCount = 2;
  __m512i plane[kCount];
};

// The upper halves of all lanes: those of `even` in even words, those of `odd` in odd ones. Cheaper than in order.
inline __m512i upper_halves(__m512 even, __m512 odd) {
  const __m512i shifted = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
  return _mm512_mask_blend_epi16(0xaaaaaaaaU, shifted, _mm512_castps_si512(odd));
}

inline Planes<float16> split(__m512 even, __m512 odd) {
  const auto rounded = [](__m512 value) {
    const __m512i up = _mm512_add_epi32(_mm512_castps_si512(value), _mm512_set1_epi32(0x8000));
    return _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  };
  const __m512 even_rounded = rounded(even);
  const __m512 odd_rounded = rounded(odd);
  return {{upper_halves(even_rounded, odd_rounded),
           upper_halves(_mm512_sub_ps(even, even_rounded), _mm512_sub_ps(odd, odd_rounded))}};
}

inline Planes<bfloat16> no_planes(bfloat16) { return {{_mm512_setzero_si512()}}; }
inline Planes<float16> no_planes(float16) { return {{_mm512_setzero_si512(), _mm512_setzero_si512()}}; }

inline Planes<bfloat16> load_planes(const bfloat16* from) { return {{_mm512_loadu_si512(from)}}; }
inline Planes<float16> load_planes(const float16* from) { return split(load(from), load(from + kLanes)); }

// Elements from `count` (1 to 31) on are zero, and not read.
inline Planes<bfloat16> load_planes_first(const bfloat16* from, int count) {
  return {{_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << count) - 1), from)}};
}
inline Planes<float16> load_planes_first(const float16* from, int count) {
  if (count <= kLanes) return split(load_first(from, count), zero());
  return split(load(from), load_first(from + kLanes, count - kLanes));
}

}  // namespace
}  // namespace fibc

#endif
