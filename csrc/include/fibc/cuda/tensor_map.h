// Tensor maps, the descriptors through which the tensor memory accelerator reads and writes: encoded once, then cached.
#ifndef FIBC_CUDA_TENSOR_MAP_H
#define FIBC_CUDA_TENSOR_MAP_H

#include <stdint.h>
#include <string.h>

#include "fibc/cuda/driver.h"

namespace fibc {
namespace cuda {
namespace {

inline constexpr int32_t kMaxTensorMapRank = 5;

struct alignas(128) TensorMap {  // CUtensorMap
  unsigned char bytes[128];
};

enum class TensorMapType : int32_t {  // CUtensorMapDataType
  kUint8 = 0,
  kUint16 = 1,
  kUint32 = 2,
  kInt32 = 3,
  kUint64 = 4,
  kInt64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
  kFloat32Ftz = 10,
  kTfloat32 = 11,
  kTfloat32Ftz = 12,
};

enum class Swizzle : int32_t { kNone = 0, k32Bytes = 1, k64Bytes = 2, k128Bytes = 3 };            // CUtensorMapSwizzle
enum class L2Promotion : int32_t { kNone = 0, k64Bytes = 1, k128Bytes = 2, k256Bytes = 3 };       // CUtensorMapL2promotion
enum class Fill : int32_t { kZeros = 0, kNanRequestZeroFma = 1 };                                 // CUtensorMapFloatOOBfill

// A view of global memory in row-major order: the last axis is contiguous, as the driver's first is.
struct TensorMapSpec {
  void* data;                     // 16-byte aligned
  TensorMapType type;
  int32_t rank;                   // 1 to 5
  const int64_t* shape;           // elements, each at least 1
  const int64_t* strides_bytes;   // one per axis, multiples of 16; the last is not read
  const uint32_t* box;            // elements that one transfer moves, each at most 256
  Swizzle swizzle = Swizzle::kNone;
  L2Promotion l2_promotion = L2Promotion::k128Bytes;
  Fill fill = Fill::kZeros;       // what lies outside of the tensor
};

namespace detail {

// Everything that a map follows from, without holes, so that equal bytes are equal maps.
struct TensorMapKey {
  uint64_t data;
  uint64_t shape[kMaxTensorMapRank];                // the driver's order
  uint64_t strides_bytes[kMaxTensorMapRank - 1];
  uint32_t box[kMaxTensorMapRank];
  int32_t type, rank, swizzle, l2_promotion, fill;
};
static_assert(sizeof(TensorMapKey) == 10 * 8 + 10 * 4);

[[nodiscard]] inline TensorMapKey key_of(const TensorMapSpec& spec) noexcept {
  TensorMapKey key = {};
  key.data = reinterpret_cast<uint64_t>(spec.data);
  for (int32_t d = 0; d < spec.rank; ++d) {
    const int32_t from = spec.rank - 1 - d;
    key.shape[d] = static_cast<uint64_t>(spec.shape[from]);
    if (d > 0) key.strides_bytes[d - 1] = static_cast<uint64_t>(spec.strides_bytes[from]);
    key.box[d] = spec.box[from];
  }
  key.type = static_cast<int32_t>(spec.type);
  key.rank = spec.rank;
  key.swizzle = static_cast<int32_t>(spec.swizzle);
  key.l2_promotion = static_cast<int32_t>(spec.l2_promotion);
  key.fill = static_cast<int32_t>(spec.fill);
  return key;
}

// A product mixes upwards only: the high half is folded in, because low bits pick the set.
[[nodiscard]] inline uint64_t hash_of(const TensorMapKey& key) noexcept {
  uint64_t words[sizeof(TensorMapKey) / 8];
  memcpy(words, &key, sizeof words);
  uint64_t hash = 0xcbf29ce484222325;
  for (const uint64_t word : words) hash = (hash ^ word) * 0x9e3779b97f4a7c15;
  return (hash ^ (hash >> 32)) | 1;  // never 0, which marks an entry without a map
}

[[nodiscard]] inline Result encode(const Driver& api, const TensorMapKey& key, TensorMap& map) noexcept {
  static constexpr uint32_t kDense[kMaxTensorMapRank] = {1, 1, 1, 1, 1};
  return api.tensor_map_encode_tiled(&map, key.type, static_cast<uint32_t>(key.rank), reinterpret_cast<void*>(key.data),
                                     key.shape, key.strides_bytes, key.box, kDense, /*interleave=*/0, key.swizzle,
                                     key.l2_promotion, key.fill);
}

// Set-associative, the least recently used of a set goes. Eight ways: the maps of one launch, at most eight, never push
// each other out, so that pointers to them hold until the launch has copied them. 128 maps are a weight matrix in each
// layer of a large model, with its activations.
class TensorMapCache {
 public:
  static constexpr uint32_t kWays = 8;
  static constexpr uint32_t kSets = 16;

  // Null where the driver refuses the map.
  [[nodiscard]] const TensorMap* get(const Driver& api, const TensorMapKey& key) noexcept {
    const uint64_t hash = hash_of(key);
    Entry* set = entries_[(hash >> 1) % kSets];
    Entry* oldest = set;
    for (Entry* entry = set; entry < set + kWays; ++entry) {
      if (entry->hash == hash && memcmp(&entry->key, &key, sizeof key) == 0) {
        entry->used = ++now_;
        return &entry->map;
      }
      if (entry->used < oldest->used) oldest = entry;
    }
    oldest->hash = 0;
    if (encode(api, key, oldest->map) != kSuccess) return nullptr;
    oldest->key = key;
    oldest->hash = hash;
    oldest->used = ++now_;
    return &oldest->map;
  }

 private:
  struct Entry {
    TensorMap map;
    TensorMapKey key;
    uint64_t hash;
    uint64_t used;
  };

  Entry entries_[kSets][kWays];  // zero where the thread begins
  uint64_t now_;
};

inline thread_local TensorMapCache tensor_map_cache;

}  // namespace detail

// The map of `spec`, from the calling thread's cache; null where the driver refuses it or has no maps. It holds until the
// thread has asked for eight others.
[[nodiscard]] inline const TensorMap* tensor_map(const TensorMapSpec& spec) noexcept {
  const Driver* api = driver();
  if (api == nullptr || api->tensor_map_encode_tiled == nullptr || spec.rank < 1 || spec.rank > kMaxTensorMapRank) {
    return nullptr;
  }
  return detail::tensor_map_cache.get(*api, detail::key_of(spec));
}

}  // namespace
}  // namespace cuda
}  // namespace fibc

#endif
