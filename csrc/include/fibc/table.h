// A dispatch table as constant data: what a generated translation unit defines and the shared entry reads.
#ifndef FIBC_TABLE_H
#define FIBC_TABLE_H

#include <cstdint>

#include "fibc/dtype.h"
#include "fibc/kernel_abi.h"

namespace fibc {

// Bounds of one call; codegen refuses a definition beyond them. They keep a call's state on the stack.
inline constexpr int kMaxTensors = 64;  // inputs
inline constexpr int kMaxOutputs = 16;
inline constexpr int kMaxAxes = 64;
inline constexpr int kMaxRank = 16;
inline constexpr int kMaxFeatures = 4;

// A borrowed array of constants.
template <typename T>
struct Span {
  const T* data = nullptr;
  std::int32_t size = 0;

  constexpr Span() noexcept = default;
  constexpr Span(const T* first, std::int32_t count) noexcept : data(first), size(count) {}
  template <std::int32_t N>
  constexpr Span(const T (&array)[N]) noexcept : data(array), size(N) {}  // NOLINT: implicit by intent

  [[nodiscard]] constexpr const T& operator[](std::int32_t i) const noexcept { return data[i]; }
  [[nodiscard]] constexpr const T* begin() const noexcept { return data; }
  [[nodiscard]] constexpr const T* end() const noexcept { return data + size; }
};

inline constexpr std::int64_t kVaries = -1;

struct Axis {
  const char* name;
  std::int64_t value;  // kVaries where it changes from call to call
};

enum class Kind : std::uint8_t {
  kTensor,
  kScalar,        // a Python number
  kScalarTensor,  // a 0-d tensor
};

inline constexpr std::int32_t kNoAlias = -1;

struct Argument {
  const char* name;
  Kind kind;
  DType dtype;
  Span<std::int32_t> axes;  // indexes into Spec::axes, one per dimension
  bool optional;
  std::int32_t alias;  // for an output written in place, that input's index
};

// The calling convention.
struct Spec {
  const char* definition;
  Span<Axis> axes;
  Span<Argument> inputs;
  Span<Argument> outputs;
};

// A coordinate of the lookup: an axis, or the ratio of two axes rounded up.
struct Feature {
  std::int32_t numerator;
  std::int32_t denominator;  // -1 where there is none
};

struct Bound {
  std::int64_t first;
  std::int64_t last;  // inclusive
};

// A box of feature values served by one variant.
struct Region {
  Span<Bound> bounds;  // one per feature
  std::int32_t variant;
  bool release_gil;
};

enum class Layout : std::uint8_t {
  kContiguous,  // row-major; strides of axes of size 1 never matter
  kRows,        // last axis has stride 1, the other strides are free and non-negative
  kAny,
};

struct TensorGuard {
  Layout layout;
  std::int32_t alignment_bytes;  // of the data pointer, and with kRows of rows that are not row-major
};

struct Variant {
  const char* symbol;
  const char* isa;  // level or arch that it was compiled for
  fibc_kernel entry;
  Span<TensorGuard> inputs;
  Span<TensorGuard> outputs;
  std::int64_t max_offset_elems;
  fibc_workspace workspace = nullptr;  // of kernels for GPUs only
  fibc_prepare prepare = nullptr;
};

// The silicon and the thread count for which the rows of a table for CPUs hold.
struct CpuValidity {
  const char* model;
  Span<const char*> isa;
  std::int64_t l2_bytes;
  std::int64_t l3_bytes;
  std::int32_t num_threads;
};

// The silicon for which the rows of a table for GPUs hold; a MIG slice is what it shows of itself. Neither ordinal nor
// product name: both change while the silicon stays.
struct CudaValidity {
  const char* arch;                 // that the code was compiled for
  std::int32_t compute_capability;  // 10 * major + minor
  std::int32_t num_sms;
  std::int64_t l2_bytes;
  std::int64_t memory_bytes;
};

enum class Target : std::uint8_t { kCpu, kCuda };

struct Table {
  const char* digest;
  Spec spec;
  Span<Feature> features;
  Span<Region> regions;  // disjoint, sorted by bounds
  Span<Variant> variants;
  Target target;
  CpuValidity cpu;    // where target is kCpu
  CudaValidity cuda;  // where target is kCuda
  const char* json;  // the whole table with its evidence, for explain() and table()
};

}  // namespace fibc

// Defined by the generated translation unit of a module.
extern const fibc::Table fibc_module_table;

#endif
