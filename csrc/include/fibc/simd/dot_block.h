// A block of C[M, N] = A[M, K] * B[N, K]^T whose sums all stay in registers.
#ifndef FIBC_SIMD_DOT_BLOCK_H
#define FIBC_SIMD_DOT_BLOCK_H

#include "fibc/simd/dot.h"

namespace fibc {
namespace {

// What the loops over a block need at compile time.
template <class T, int64_t n, int64_t k, int chunks, int64_t prefetch_bytes>
struct BlockTraits {
  using Element = T;
  static constexpr int64_t kN = n;
  static constexpr int64_t kK = k;
  static constexpr int kUnroll = chunks;  // chunks of K per iteration
  static constexpr int64_t kPrefetchElems = prefetch_bytes / int64_t{sizeof(T)};  // ahead in each row of B
};

template <class Traits>
struct Operands {
  using Element = typename Traits::Element;
  const Element* a;
  int64_t a_stride;
  const Element* b;
  Element* c;
  int64_t num_rows;
};

template <class T>
inline Chunk<T> load_chunk(const T* from, int tail) {
  return tail ? load_chunk_first(from, tail) : load_chunk(from);
}

// Adds one chunk of K, or its first `tail` elements. The operand with fewer chunks stays in registers.
template <class Traits, int rows, int cols, class T = typename Traits::Element>
inline void add_chunk(Vec (&total)[rows][cols], const T* a, int64_t a_stride, const T* b, int tail) {
  if constexpr (rows < cols) {
    Chunk<T> kept[rows];
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) kept[i] = load_chunk(a + i * a_stride, tail);
#pragma GCC unroll 16
    for (int j = 0; j < cols; ++j) {
      const Chunk<T> column = load_chunk(b + j * Traits::kK, tail);
#pragma GCC unroll 16
      for (int i = 0; i < rows; ++i) total[i][j] = dot(total[i][j], kept[i], column);
    }
  } else {
    Chunk<T> kept[cols];
#pragma GCC unroll 16
    for (int j = 0; j < cols; ++j) kept[j] = load_chunk(b + j * Traits::kK, tail);
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
      const Chunk<T> row = load_chunk(a + i * a_stride, tail);
#pragma GCC unroll 16
      for (int j = 0; j < cols; ++j) total[i][j] = dot(total[i][j], row, kept[j]);
    }
  }
}

// Computes rows x cols elements of C, the first of them at `c`.
template <class Traits, int rows, int cols, class T = typename Traits::Element>
inline void dot_block(const T* a, int64_t a_stride, const T* b, T* c) {
  constexpr int kDepth = Chunk<T>::kDepth;
  constexpr int64_t kStep = Traits::kUnroll * kDepth;
  constexpr int kTail = static_cast<int>(Traits::kK % kDepth);
  constexpr int64_t kLineElems = 64 / int64_t{sizeof(T)};
  Vec total[rows][cols];
  for (auto& row : total) {
    for (Vec& element : row) element = zero();
  }
  int64_t k = 0;
  for (; k + kStep <= Traits::kK; k += kStep) {
    if constexpr (Traits::kPrefetchElems > 0) {
#pragma GCC unroll 16
      for (int j = 0; j < cols; ++j) {
        const T* ahead = b + j * Traits::kK + k + Traits::kPrefetchElems;
        for (int64_t line = 0; line < kStep; line += kLineElems) {
          _mm_prefetch(reinterpret_cast<const char*>(ahead + line), _MM_HINT_T0);
        }
      }
    }
#pragma GCC unroll 16
    for (int u = 0; u < Traits::kUnroll; ++u) {
      add_chunk<Traits>(total, a + k + u * kDepth, a_stride, b + k + u * kDepth, 0);
    }
  }
  for (; k + kDepth <= Traits::kK; k += kDepth) add_chunk<Traits>(total, a + k, a_stride, b + k, 0);
  if constexpr (kTail > 0) add_chunk<Traits>(total, a + k, a_stride, b + k, kTail);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < cols; ++j) store_one(c + i * Traits::kN + j, sum(total[i][j]));
  }
}

// Computes `num_rows` < rows rows of C.
template <class Traits, int rows, int cols, class T = typename Traits::Element>
inline void last_rows(int64_t num_rows, const T* a, int64_t a_stride, const T* b, T* c) {
  if constexpr (rows > 1) {
    if (num_rows == rows - 1) {
      dot_block<Traits, rows - 1, cols>(a, a_stride, b, c);
    } else {
      last_rows<Traits, rows - 1, cols>(num_rows, a, a_stride, b, c);
    }
  }
}

}  // namespace
}  // namespace fibc

#endif
