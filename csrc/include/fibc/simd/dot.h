// Dot products along a contiguous axis, accumulated in float32: the widest chunk that one load brings of each dtype.
#ifndef FIBC_SIMD_DOT_H
#define FIBC_SIMD_DOT_H

#include "fibc/simd/vec.h"

namespace fibc {
namespace {

// kDepth elements of an operand, ready to be multiplied by a chunk of the other operand at the same place.
template <class T>
struct Chunk {
  static constexpr int kDepth = kLanes;
  Vec values;
};

template <class T>
inline Chunk<T> load_chunk(const T* from) {
  return {load(from)};
}
template <class T>
inline Chunk<T> load_chunk_first(const T* from, int count) {
  return {load_first(from, count)};
}
template <class T>
inline Vec dot(Vec total, const Chunk<T>& a, const Chunk<T>& b) {
  return fma(a.values, b.values, total);
}

#if defined(__AVX512BF16__)

// vdpbf16ps: products exact, sums in float32; subnormal inputs and results count as zero.
template <>
struct Chunk<bfloat16> {
  static constexpr int kDepth = 32;
  __m512bh values;
};

template <>
inline Chunk<bfloat16> load_chunk(const bfloat16* from) {
  return {(__m512bh)_mm512_loadu_si512(from)};
}
template <>
inline Chunk<bfloat16> load_chunk_first(const bfloat16* from, int count) {
  const __mmask32 lanes = static_cast<__mmask32>((uint64_t{1} << count) - 1);
  return {(__m512bh)_mm512_maskz_loadu_epi16(lanes, from)};
}
template <>
inline Vec dot(Vec total, const Chunk<bfloat16>& a, const Chunk<bfloat16>& b) {
  return _mm512_dpbf16_ps(total, a.values, b.values);
}

#else

// Even and odd elements are widened apart: a shift and a mask for 2 * kLanes elements, and no lane is moved.
template <>
struct Chunk<bfloat16> {
  static constexpr int kDepth = 2 * kLanes;
  Vec even;
  Vec odd;
};

#if defined(__AVX512F__)
inline Chunk<bfloat16> split(__m512i pairs) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
}
template <>
inline Chunk<bfloat16> load_chunk(const bfloat16* from) {
  return split(_mm512_loadu_si512(from));
}
template <>
inline Chunk<bfloat16> load_chunk_first(const bfloat16* from, int count) {
  return split(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << count) - 1), from));
}
#else
inline Chunk<bfloat16> split(__m256i pairs) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))))};
}
template <>
inline Chunk<bfloat16> load_chunk(const bfloat16* from) {
  return split(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
template <>
inline Chunk<bfloat16> load_chunk_first(const bfloat16* from, int count) {
  uint16_t lanes[2 * kLanes] = {};
  memcpy(lanes, from, static_cast<size_t>(count) * sizeof(uint16_t));
  return split(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(lanes)));
}
#endif

template <>
inline Vec dot(Vec total, const Chunk<bfloat16>& a, const Chunk<bfloat16>& b) {
  return fma(a.odd, b.odd, fma(a.even, b.even, total));
}

#endif

}  // namespace
}  // namespace fibc

#endif
