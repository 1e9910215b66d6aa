// Vectors of float32, and the 16-bit formats that memory holds them in, for the ISA level of the translation unit.
//
// Everything has internal linkage: units of several levels are linked into one module, and the linker must never take
// one unit's function for another's.
#ifndef FIBC_SIMD_VEC_H
#define FIBC_SIMD_VEC_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace fibc {
namespace {

using float32 = float;

struct float16 {
  uint16_t bits;
};

struct bfloat16 {
  uint16_t bits;
};

#if defined(__AVX512F__)

using Vec = __m512;
constexpr int kLanes = 16;
constexpr int kVectorRegisters = 32;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec broadcast(float value) { return _mm512_set1_ps(value); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
// The second operand where one is NaN.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(Vec a) { return _mm512_reduce_add_ps(a); }

inline Vec widen(__m256i half, float16) { return _mm512_cvtph_ps(half); }
inline Vec widen(__m256i half, bfloat16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline __m256i narrow(Vec a, float16) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// Round to nearest even by integers, not with vcvtneps2bf16, which flushes subnormals. A NaN keeps its sign and is quiet.
inline __m256i narrow(Vec a, bfloat16) {
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x00400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
}

inline Vec load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Vec a) { _mm512_storeu_ps(to, a); }
inline void stream(float* to, Vec a) { _mm512_stream_ps(to, a); }
inline __m256i load_bits(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void store_bits(void* to, __m256i a) { _mm256_storeu_si256(static_cast<__m256i*>(to), a); }
inline void stream_bits(void* to, __m256i a) { _mm256_stream_si256(static_cast<__m256i*>(to), a); }

inline __mmask16 first_lanes(int count) { return static_cast<__mmask16>((1U << count) - 1U); }
inline Vec load_first(const float* from, int count) { return _mm512_maskz_loadu_ps(first_lanes(count), from); }
inline void store_first(float* to, Vec a, int count) { _mm512_mask_storeu_ps(to, first_lanes(count), a); }
inline __m256i load_bits_first(const void* from, int count) {
  return _mm256_maskz_loadu_epi16(first_lanes(count), from);
}
inline void store_bits_first(void* to, __m256i a, int count) { _mm256_mask_storeu_epi16(to, first_lanes(count), a); }

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

using Vec = __m256;
constexpr int kLanes = 8;
constexpr int kVectorRegisters = 16;

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec broadcast(float value) { return _mm256_set1_ps(value); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline float sum(Vec a) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

inline Vec widen(__m128i half, float16) { return _mm256_cvtph_ps(half); }
inline Vec widen(__m128i half, bfloat16) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

inline __m128i narrow(Vec a, float16) { return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline __m128i narrow(Vec a, bfloat16) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  const __m256i kept = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1));
}

inline Vec load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Vec a) { _mm256_storeu_ps(to, a); }
inline void stream(float* to, Vec a) { _mm256_stream_ps(to, a); }
inline __m128i load_bits(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
inline void store_bits(void* to, __m128i a) { _mm_storeu_si128(static_cast<__m128i*>(to), a); }
inline void stream_bits(void* to, __m128i a) { _mm_stream_si128(static_cast<__m128i*>(to), a); }

inline __m256i first_lanes(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec load_first(const float* from, int count) { return _mm256_maskload_ps(from, first_lanes(count)); }
inline void store_first(float* to, Vec a, int count) { _mm256_maskstore_ps(to, first_lanes(count), a); }
inline __m128i load_bits_first(const void* from, int count) {
  uint16_t lanes[kLanes] = {};
  memcpy(lanes, from, static_cast<size_t>(count) * sizeof(uint16_t));
  return load_bits(lanes);
}
inline void store_bits_first(void* to, __m128i a, int count) {
  uint16_t lanes[kLanes];
  store_bits(lanes, a);
  memcpy(to, lanes, static_cast<size_t>(count) * sizeof(uint16_t));
}

#else
#error "fibc kernels need at least AVX2, FMA and F16C"
#endif

// 16-bit elements. `count` is from 0 to kLanes; lanes beyond it read as zero, and are not written.
template <class T>
inline Vec load(const T* from) {
  return widen(load_bits(from), T{});
}
template <class T>
inline Vec load_first(const T* from, int count) {
  return widen(load_bits_first(from, count), T{});
}
template <class T>
inline void store(T* to, Vec a) {
  store_bits(to, narrow(a, T{}));
}
template <class T>
inline void store_first(T* to, Vec a, int count) {
  store_bits_first(to, narrow(a, T{}), count);
}
// Past the caches; `to` is a multiple of kLanes elements, in bytes. Fence before another thread may read.
template <class T>
inline void stream(T* to, Vec a) {
  stream_bits(to, narrow(a, T{}));
}

template <class T>
inline void store_one(T* to, float value) {
  store_first(to, broadcast(value), 1);
}

}  // namespace
}  // namespace fibc

#endif
