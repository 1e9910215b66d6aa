// Kernels of the toy packages: slow, exact, and easy to tell apart by what they write.
#include <cstdint>

#include "fibc/kernel_abi.h"

#define FIBC_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

float* row(const fibc_tensor& tensor, std::int64_t index) {
  return static_cast<float*>(tensor.data) + index * tensor.strides[0];
}

// C[M, N] = A[M, K] B[N, K]^T + offset, rows first..last of C; A and C may have any row stride.
void multiply(const fibc_call& call, std::int64_t first, std::int64_t last, float offset) {
  const std::int64_t num_n = call.axes[1];
  const std::int64_t num_k = call.axes[2];
  for (std::int64_t m = first; m < last; ++m) {
    for (std::int64_t n = 0; n < num_n; ++n) {
      float sum = offset;
      for (std::int64_t k = 0; k < num_k; ++k) sum += row(call.inputs[0], m)[k] * row(call.inputs[1], n)[k];
      row(call.outputs[0], m)[n] = sum;
    }
  }
}

}  // namespace

// A variant marks its work: what it returns is the product plus 1, plus 2 for the second.
FIBC_EXPORT std::int32_t fibc_toy_plain(const fibc_call* call) {
  multiply(*call, 0, call->axes[0], 1.0F);
  return 0;
}

FIBC_EXPORT std::int32_t fibc_toy_parallel(const fibc_call* call) {
  const auto share = [](void* context, std::int32_t thread, std::int32_t num_threads) {
    const auto& shared = *static_cast<const fibc_call*>(context);
    const std::int64_t rows = shared.axes[0];
    multiply(shared, rows * thread / num_threads, rows * (thread + 1) / num_threads, 2.0F);
  };
  call->parallel(share, const_cast<fibc_call*>(call), call->num_threads);
  return 0;
}

FIBC_EXPORT std::int32_t fibc_toy_declines(const fibc_call*) { return 1; }

// out = x * scale + bias + 1; state += out, in place. Inputs: x[M, H], state[M, H], scale, bias, mask (unused).
FIBC_EXPORT std::int32_t fibc_toy_update(const fibc_call* call) {
  const auto scale = static_cast<float>(call->scalars[2]);
  const float bias = *static_cast<const float*>(call->inputs[3].data);
  for (std::int64_t m = 0; m < call->axes[0]; ++m) {
    for (std::int64_t h = 0; h < call->axes[1]; ++h) {
      const float value = row(call->inputs[0], m)[h] * scale + bias + 1.0F;
      row(call->outputs[0], m)[h] = value;
      row(call->outputs[1], m)[h] += value;
    }
  }
  return 0;
}

// Writes nothing: what is left of a call is dispatch.
FIBC_EXPORT std::int32_t fibc_toy_nothing(const fibc_call*) { return 0; }
