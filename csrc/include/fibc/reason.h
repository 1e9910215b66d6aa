// Why a call was answered as it was: one word each, in the order in which a call is tested.
#ifndef FIBC_REASON_H
#define FIBC_REASON_H

#include <cstdint>

// FIBC_REASONS(X): X(identifier, word, sentence). The Python oracle reads the same list from the module.
#define FIBC_REASONS(X)                                                                        \
  X(kHit, "hit", "a variant served the call")                                                  \
  X(kDisabled, "disabled", "dispatch is disabled (disable() or FIBC_DISABLE)")                 \
  X(kTorch, "torch", "this torch has no usable DLPack exchange interface (needs 2.10)")        \
  X(kIsa, "isa", "the CPU lacks an instruction set of the table or the variant")               \
  X(kCpuModel, "cpu_model", "another CPU model than the one tuned on")                         \
  X(kCaches, "caches", "other cache sizes than those tuned with")                              \
  X(kNumThreads, "num_threads", "another thread count than the one tuned with")                \
  X(kDriver, "driver", "no CUDA driver in this process (libcuda.so.1)")                        \
  X(kChanged, "changed", "driver, torch or a library is not the one tuned with (policy native)") \
  X(kForked, "forked", "the process was forked after its GPU was prepared")                    \
  X(kMode, "mode", "a dispatch mode of torch is active, or forward-mode differentiation")      \
  X(kMissing, "missing", "an optional argument was left out")                                  \
  X(kType, "type", "an argument is no plain torch.Tensor or Parameter, or no number")          \
  X(kGrad, "grad", "grad mode is on and a tensor requires grad")                               \
  X(kView, "view", "the tensor cannot be viewed (sparse, meta, quantised, vmap)")              \
  X(kNegative, "negative", "a tensor is a view with its sign bit flipped lazily")              \
  X(kDevice, "device", "a tensor is on another kind of device")                                \
  X(kDevices, "devices", "tensors are on several devices")                                     \
  X(kDType, "dtype", "a tensor has another dtype than the definition")                         \
  X(kRank, "rank", "a tensor has another number of axes than the definition")                  \
  X(kShape, "shape", "sizes contradict the definition or each other")                          \
  X(kNoData, "no_data", "a tensor has elements but no memory")                                 \
  X(kEmpty, "empty", "every output is empty: returned without a launch")                       \
  X(kEmptyInput, "empty_input", "an input is empty while an output is not")                    \
  X(kRegion, "region", "no region with evidence holds the sizes")                              \
  X(kVariantIsa, "variant_isa", "the CPU lacks the variant's instruction set")                 \
  X(kLayout, "layout", "strides that the variant does not take")                               \
  X(kOffset, "offset", "an element offset beyond what the variant computes in")                \
  X(kAlignment, "alignment", "a data pointer or a row less aligned than the variant needs")    \
  X(kAlias, "alias", "an output in place is not the tensor that it is to be written to")       \
  X(kInference, "inference", "an inference tensor would be written outside inference mode")    \
  X(kOverlap, "overlap", "an output shares memory with another argument")                      \
  X(kArch, "arch", "the GPU has another compute capability than the one tuned on")             \
  X(kSilicon, "silicon", "the GPU has other SMs, L2 or memory than the one tuned on")          \
  X(kUnprepared, "unprepared", "captured before the GPU was prepared (prepare(), or a call before the capture)") \
  X(kLoad, "load", "the variant's code does not load on the GPU, or calls another version of a library") \
  X(kBroken, "broken", "the GPU reported an error before: no variant is tried again")          \
  X(kContext, "context", "the thread's current CUDA context is not the GPU's primary one")     \
  X(kStream, "stream", "the current CUDA stream cannot be told, or its capture has failed")    \
  X(kAllocation, "allocation", "an output could not be allocated as plain memory")             \
  X(kWorkspace, "workspace", "no memory for the variant's workspace")                          \
  X(kKernel, "kernel", "the variant declined the call")                                        \
  X(kDeviceError, "device_error", "the GPU reported an error, which was raised")

namespace fibc {

enum class Reason : std::uint8_t {
#define FIBC_ENUMERATOR(identifier, word, sentence) identifier,
  FIBC_REASONS(FIBC_ENUMERATOR)
#undef FIBC_ENUMERATOR
};

#define FIBC_COUNT(identifier, word, sentence) +1
inline constexpr int kNumReasons = 0 FIBC_REASONS(FIBC_COUNT);
#undef FIBC_COUNT

struct ReasonText {
  const char* word;
  const char* sentence;
};

inline constexpr ReasonText kReasonTexts[kNumReasons] = {
#define FIBC_TEXT(identifier, word, sentence) {word, sentence},
    FIBC_REASONS(FIBC_TEXT)
#undef FIBC_TEXT
};

[[nodiscard]] constexpr const ReasonText& text_of(Reason reason) noexcept {
  return kReasonTexts[static_cast<int>(reason)];
}

}  // namespace fibc

#endif
