// The two loops of an RMS norm over a row of compile-time length, and the rows that they read.
#ifndef FIBC_SIMD_NORM_H
#define FIBC_SIMD_NORM_H

#include "fibc/simd/vec.h"

namespace fibc {
namespace {

constexpr int64_t kLineBytes = 64;

// A row as it lies in memory. `ahead` elements further on, a later row is fetched meanwhile; 0 fetches nothing.
template <class T>
struct PlainRow {
  const T* x;
  int64_t ahead;

  Vec at(int64_t i) const { return load(x + i); }
  Vec first(int64_t i, int count) const { return load_first(x + i, count); }
  void fetch(int64_t i) const { _mm_prefetch(reinterpret_cast<const char*>(x + i + ahead), _MM_HINT_T0); }
};

// The sum of two rows, in float32.
template <class T>
struct SumRow {
  const T* x;
  const T* residual;
  int64_t x_ahead;
  int64_t residual_ahead;

  Vec at(int64_t i) const { return add(load(x + i), load(residual + i)); }
  Vec first(int64_t i, int count) const { return add(load_first(x + i, count), load_first(residual + i, count)); }
  void fetch(int64_t i) const {
    _mm_prefetch(reinterpret_cast<const char*>(x + i + x_ahead), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(residual + i + residual_ahead), _MM_HINT_T0);
  }
};

// A float32 row in a buffer of this thread.
struct KeptRow {
  const float* x;

  Vec at(int64_t i) const { return load(x + i); }
  Vec first(int64_t i, int count) const { return load_first(x + i, count); }
};

// Returns the sum of the squares of `length` elements and hands every vector to keep(index, vector).
template <int64_t length, int unroll, int element_bytes, bool fetch_ahead, class Row, class Keep>
inline float sum_of_squares(const Row& row, const Keep& keep) {
  constexpr int64_t kStep = unroll * kLanes;
  constexpr int64_t kLine = kLineBytes / element_bytes;
  constexpr int kTail = static_cast<int>(length % kLanes);
  Vec total[unroll];
  for (Vec& part : total) part = zero();
  int64_t i = 0;
  for (; i + kStep <= length; i += kStep) {
    if constexpr (fetch_ahead) {
      for (int64_t line = 0; line < kStep; line += kLine) row.fetch(i + line);
    }
#pragma GCC unroll 8
    for (int u = 0; u < unroll; ++u) {
      const Vec x = row.at(i + u * kLanes);
      total[u] = fma(x, x, total[u]);
      keep(i + u * kLanes, x);
    }
  }
  for (; i + kLanes <= length; i += kLanes) {
    const Vec x = row.at(i);
    total[0] = fma(x, x, total[0]);
    keep(i, x);
  }
  if constexpr (kTail > 0) {
    const Vec x = row.first(i, kTail);
    total[0] = fma(x, x, total[0]);
    keep(i, x);
  }
#pragma GCC unroll 8
  for (int u = 1; u < unroll; ++u) total[0] = add(total[0], total[u]);
  return sum(total[0]);
}

// to[i] = row[i] * factor * weight[i]. With `streaming`, `to` is a multiple of 64 bytes and so is its length.
template <int64_t length, int unroll, bool streaming, class T, class Row>
inline void scale(const Row& row, float factor, const T* weight, T* to) {
  constexpr int64_t kStep = unroll * kLanes;
  constexpr int kTail = static_cast<int>(length % kLanes);
  const Vec factors = broadcast(factor);
  const auto one = [&](int64_t i) {
    const Vec y = mul(mul(row.at(i), factors), load(weight + i));
    if constexpr (streaming) {
      stream(to + i, y);
    } else {
      store(to + i, y);
    }
  };
  int64_t i = 0;
  for (; i + kStep <= length; i += kStep) {
#pragma GCC unroll 8
    for (int u = 0; u < unroll; ++u) one(i + u * kLanes);
  }
  for (; i + kLanes <= length; i += kLanes) one(i);
  if constexpr (kTail > 0) {
    store_first(to + i, mul(mul(row.first(i, kTail), factors), load_first(weight + i, kTail)), kTail);
  }
}

// 1 / rms of `length` elements with the given sum of squares.
template <int64_t length>
inline float inverse_rms(float squares, float epsilon) {
  return 1.0f / __builtin_sqrtf(squares / static_cast<float>(length) + epsilon);
}

inline bool is_line_aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % kLineBytes == 0; }

}  // namespace
}  // namespace fibc

#endif
