// The libcuda.so.1 of fake_cuda.cpp, which prints what a CUTLASS kernel is launched with and which tensor maps it has.
// FAKE_ENCODE: the result of encoding a tensor map. FAKE_LAUNCH: of a launch.
#define cuTensorMapEncodeTiled encode_always
#define cuLaunchKernelEx launch_without_sizes
#include "fake_cuda.cpp"
#undef cuTensorMapEncodeTiled
#undef cuLaunchKernelEx

namespace {

int result_of(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr ? kSuccess : std::atoi(text);
}

}  // namespace

FAKE(cuTensorMapEncodeTiled, void* map, int type, std::uint32_t rank, void* data, const std::uint64_t* shape,
     const std::uint64_t* strides_bytes, const std::uint32_t* box, const std::uint32_t*, int, int swizzle, int, int) {
  std::printf("map type %d data %zx shape", type, reinterpret_cast<std::size_t>(data));
  for (std::uint32_t d = 0; d < rank; ++d) std::printf(" %zu", static_cast<std::size_t>(shape[d]));
  std::printf(" strides");
  for (std::uint32_t d = 0; d + 1 < rank; ++d) std::printf(" %zu", static_cast<std::size_t>(strides_bytes[d]));
  std::printf(" box");
  for (std::uint32_t d = 0; d < rank; ++d) std::printf(" %u", box[d]);
  std::printf(" swizzle %d\n", swizzle);
  std::memset(map, 0x5a, 128);
  return result_of("FAKE_ENCODE");
}

// Prints the first words of the kernel's one parameter: sizes, in CUTLASS.
FAKE(cuLaunchKernelEx, const fibc::cuda::LaunchConfig* config, void*, void** parameters, void**) {
  std::printf("launch grid %u %u %u threads %u shared %u stream %zx", config->grid_x, config->grid_y, config->grid_z,
              config->block_x, config->shared_bytes, reinterpret_cast<std::size_t>(config->stream));
  for (unsigned i = 0; i < config->num_attributes; ++i) {
    const fibc::cuda::LaunchAttribute& attribute = config->attributes[i];
    std::printf(" attribute %d %u", attribute.id, attribute.value.cluster.x);
    if (attribute.id == fibc::cuda::kAttributeClusterDimension) {
      std::printf(" %u %u", attribute.value.cluster.y, attribute.value.cluster.z);
    }
  }
  std::printf(" parameters");
  for (int i = 0; i < 5; ++i) std::printf(" %d", static_cast<const int*>(parameters[0])[i]);
  std::printf("\n");
  return result_of("FAKE_LAUNCH");
}
