// Tensor maps as CUTLASS asks for them, from the calling thread's cache.
#ifndef FIBC_CUTLASS_LAUNCH_TENSOR_MAPS_H
#define FIBC_CUTLASS_LAUNCH_TENSOR_MAPS_H

#include <cuda.h>
#include <stdint.h>
#include <string.h>

#include "fibc/cuda/tensor_map.h"

namespace fibc {
namespace cutlass_maps {
namespace {

// Set where the driver refused a map since the flag was cleared: CUTLASS goes on as if nothing had been.
inline thread_local bool refused = false;

// cuTensorMapEncodeTiled's interface: sizes and strides with the contiguous axis first.
inline CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* shape,
                       const cuuint64_t* strides_bytes, const cuuint32_t* box, const cuuint32_t* element_strides,
                       CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2_promotion,
                       CUtensorMapFloatOOBfill fill) noexcept {
  const auto refuse = [] {
    refused = true;
    return CUDA_ERROR_INVALID_VALUE;
  };
  if (rank < 1 || rank > cuda::kMaxTensorMapRank || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) return refuse();
  int64_t own_shape[cuda::kMaxTensorMapRank] = {};
  int64_t own_strides_bytes[cuda::kMaxTensorMapRank] = {};
  uint32_t own_box[cuda::kMaxTensorMapRank] = {};
  for (uint32_t d = 0; d < rank; ++d) {
    const uint32_t from = rank - 1 - d;
    if (element_strides[from] != 1) return refuse();
    own_shape[d] = static_cast<int64_t>(shape[from]);
    own_strides_bytes[d] = from > 0 ? static_cast<int64_t>(strides_bytes[from - 1]) : 0;
    own_box[d] = box[from];
  }
  const cuda::TensorMap* found = cuda::tensor_map({data, static_cast<cuda::TensorMapType>(type), static_cast<int32_t>(rank),
                                                   own_shape, own_strides_bytes, own_box,
                                                   static_cast<cuda::Swizzle>(swizzle),
                                                   static_cast<cuda::L2Promotion>(l2_promotion),
                                                   static_cast<cuda::Fill>(fill)});
  if (found == nullptr) return refuse();
  static_assert(sizeof *map == sizeof *found);
  memcpy(map, found, sizeof *map);
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace cutlass_maps
}  // namespace fibc

#endif
