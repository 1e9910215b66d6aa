// C[M, N] = A[M, K] * B[N, K]^T by one stored algorithm of cuBLASLt, what a generated launcher of a library call includes.
//
// cuBLASLt thinks in columns and the tensors lie in rows, so what it reads is each tensor's transpose, and it is asked for
// C^T = B A^T: its first operand is B (transposed, as memory has it [K, N]), its second A ([K, M]), its result C ([N, M]).
// torch.matmul(A, B.T) asks the same.
#ifndef FIBC_CUDA_CUBLASLT_GEMM_H
#define FIBC_CUDA_CUBLASLT_GEMM_H

#include <stdint.h>

#include <atomic>

#include "fibc/cuda/cublaslt.h"
#include "fibc/cuda/driver.h"
#include "fibc/cuda/kernel.h"
#include "fibc/kernel_abi.h"

namespace fibc {
namespace cuda {
namespace {

struct LtGemmSpec {
  size_t version;  // of the library that the algorithm is of
  LtCompute compute;
  LtType type;
  int64_t n;
  int64_t k;
  int64_t max_workspace_bytes;  // an algorithm that needs more for some M is not used there
  LtAlgo algo;
};

// One call's tensors; rows of stride 1.
struct LtGemmOperands {
  const fibc_tensor& a;
  const fibc_tensor& b;
  const fibc_tensor& c;
  int64_t m;
};

// Elements from one row to the next; a single row's stride may be anything.
[[nodiscard]] inline int64_t row_stride(const fibc_tensor& tensor, int64_t width) noexcept {
  return tensor.shape[0] == 1 ? width : tensor.strides[0];
}

namespace detail {

struct LtPlanKey {
  int64_t device;
  int64_t m;
  int64_t a_stride, b_stride, c_stride;

  [[nodiscard]] bool operator==(const LtPlanKey& other) const noexcept {
    return device == other.device && m == other.m && a_stride == other.a_stride && b_stride == other.b_stride &&
           c_stride == other.c_stride;
  }
};

inline constexpr int64_t kIllegal = -1;

inline constexpr int64_t kRowAlignmentBytes = 16;

// What a call of one size needs that does not depend on addresses.
struct LtPlan {
  LtPlanKey key;            // m is 0 where there is no plan
  LtLayout a, b, c;
  int64_t workspace_bytes;  // kIllegal where the algorithm cannot do this size
  uint64_t used;
  bool has_run;
};

// Set-associative, the least recently used of a set goes. 64 plans are the batch sizes that a server decodes with.
class LtPlanCache {
 public:
  static constexpr uint64_t kWays = 4;
  static constexpr uint64_t kSets = 16;

  // The plan of `key`; `make(plan)` fills in a new one, its key is there.
  template <class Make>
  [[nodiscard]] LtPlan& get(const LtPlanKey& key, const Make& make) noexcept {
    LtPlan* set = plans_[set_of(key)];
    LtPlan* oldest = set;
    for (LtPlan* plan = set; plan < set + kWays; ++plan) {
      if (plan->key == key) {
        plan->used = ++now_;
        return *plan;
      }
      if (plan->used < oldest->used) oldest = plan;
    }
    *oldest = LtPlan{};
    oldest->key = key;
    oldest->used = ++now_;
    make(*oldest);
    return *oldest;
  }

 private:
  [[nodiscard]] static uint64_t set_of(const LtPlanKey& key) noexcept {
    const auto mixed = static_cast<uint64_t>(key.m + 31 * (key.a_stride + 31 * (key.c_stride + 31 * key.device)));
    return (mixed * 0x9e3779b97f4a7c15) >> 60;  // 4 bits: kSets
  }

  LtPlan plans_[kSets][kWays];  // zero where the thread begins
  uint64_t now_;
};

inline thread_local LtPlanCache lt_plan_cache;  // of this translation unit's one LtGemm

// Runs `call` with the thread allowed to load code while a stream is captured: the first launch of a kernel may have to.
template <class Call>
[[nodiscard]] inline LtStatus relaxed(const Call& call) noexcept {
  const Driver* api = driver();
  int mode = kCaptureModeRelaxed;
  const bool exchanged = api != nullptr && api->thread_exchange_capture_mode(&mode) == kSuccess;
  const LtStatus status = call();
  if (exchanged) (void)api->thread_exchange_capture_mode(&mode);
  return status;
}

}  // namespace detail

// What a status means where the library was asked to launch. What it says before it launches anything is a refusal; any
// other error is taken for one of the device.
[[nodiscard]] inline int32_t status_of_lt(LtStatus status) noexcept {
  switch (status) {
    case kLtSuccess:
      return FIBC_OK;
    case kLtNotInitialized:
    case kLtAllocFailed:
    case kLtInvalidValue:
    case kLtArchMismatch:
    case kLtNotSupported:
      return FIBC_DECLINED;
    default:
      return FIBC_DEVICE_ERROR;
  }
}

// One per translation unit, a constant-initialised static. The library's handles stay for good.
class LtGemm {
 public:
  explicit constexpr LtGemm(const LtGemmSpec& spec) noexcept : spec_(spec) {}

  // Makes the library ready on `device`, whose primary context is current. FIBC_DECLINED where torch has loaded another
  // version than the algorithm is of, or none.
  [[nodiscard]] int32_t prepare(int32_t device) noexcept {
    if (device < 0 || device >= kMaxDevices) return FIBC_DECLINED;
    if (handles_[device].load(std::memory_order_acquire) != nullptr) return FIBC_OK;
    const CublasLt* lt = cublaslt();
    if (lt == nullptr || lt->get_version() != spec_.version) return FIBC_DECLINED;
    LtStatus status = make_desc(*lt);
    LtHandle handle = nullptr;
    if (status == kLtSuccess) status = lt->create(&handle);
    if (status != kLtSuccess) return status_of_lt(status);
    LtHandle none = nullptr;
    if (!handles_[device].compare_exchange_strong(none, handle)) (void)lt->destroy(handle);  // another thread was first
    return FIBC_OK;
  }

  // Bytes of scratch that a call needs.
  [[nodiscard]] int64_t workspace_bytes(const fibc_call& call, const LtGemmOperands& x) noexcept {
    if (call.cuda == nullptr) return spec_.max_workspace_bytes;
    const detail::LtPlan* plan = find_plan(call.cuda->device, x);
    return plan == nullptr || plan->workspace_bytes < 0 ? 0 : plan->workspace_bytes;
  }

  // Launches and does not wait. The heuristic is never asked.
  [[nodiscard]] int32_t launch(const fibc_call& call, const LtGemmOperands& x) noexcept {
    if (x.m == 0) return FIBC_OK;
    if (call.cuda == nullptr) return FIBC_DECLINED;
    detail::LtPlan* plan = find_plan(call.cuda->device, x);
    if (plan == nullptr || plan->workspace_bytes < 0) return FIBC_DECLINED;
    const auto run = [&]() noexcept { return matmul(*call.cuda, x, *plan); };
    const LtStatus status = plan->has_run ? run() : detail::relaxed(run);
    plan->has_run = status == kLtSuccess;
    return status_of_lt(status);
  }

 private:
  [[nodiscard]] LtStatus make_desc(const CublasLt& lt) noexcept {
    if (desc_.load(std::memory_order_acquire) != nullptr) return kLtSuccess;
    LtMatmulDesc desc = nullptr;
    LtStatus status = lt.desc_create(&desc, spec_.compute, LtType::kFloat32);
    if (status != kLtSuccess) return status;
    constexpr int32_t kOperation = kTransposed;
    status = lt.desc_set(desc, kLtTransA, &kOperation, sizeof kOperation);
    LtMatmulDesc none = nullptr;
    if (status != kLtSuccess || !desc_.compare_exchange_strong(none, desc)) (void)lt.desc_destroy(desc);
    return status;
  }

  // Null where the device is not prepared or there is nothing to multiply.
  [[nodiscard]] detail::LtPlan* find_plan(int32_t device, const LtGemmOperands& x) noexcept {
    if (x.m <= 0 || device < 0 || device >= kMaxDevices) return nullptr;
    if (handles_[device].load(std::memory_order_acquire) == nullptr) return nullptr;
    const detail::LtPlanKey key{device, x.m, row_stride(x.a, spec_.k), row_stride(x.b, spec_.k), row_stride(x.c, spec_.n)};
    return &detail::lt_plan_cache.get(key, [this](detail::LtPlan& plan) noexcept { make_plan(plan); });
  }

  // The heuristic was asked about tensors at a piece. Rows at other distances are no worse aligned than those, or refused.
  [[nodiscard]] bool is_aligned_row(int64_t stride, int64_t width) const noexcept {
    const int64_t elem_bytes = spec_.type == LtType::kFloat32 ? 4 : 2;
    return stride == width || (stride > width && stride * elem_bytes % detail::kRowAlignmentBytes == 0);
  }

  // An algorithm that was found for one M may be illegal for another: the library says so, once for each plan.
  void make_plan(detail::LtPlan& plan) noexcept {
    plan.workspace_bytes = detail::kIllegal;
    if (!is_aligned_row(plan.key.a_stride, spec_.k) || !is_aligned_row(plan.key.b_stride, spec_.k) ||
        !is_aligned_row(plan.key.c_stride, spec_.n)) {
      return;
    }
    const CublasLt& lt = *cublaslt();
    const auto n = static_cast<uint64_t>(spec_.n);
    const auto k = static_cast<uint64_t>(spec_.k);
    const auto m = static_cast<uint64_t>(plan.key.m);
    LtResult result = {};
    const LtStatus status = detail::relaxed([&]() noexcept {
      LtStatus now = lt.layout_init(&plan.b, sizeof plan.b, spec_.type, k, n, plan.key.b_stride);
      if (now == kLtSuccess) now = lt.layout_init(&plan.a, sizeof plan.a, spec_.type, k, m, plan.key.a_stride);
      if (now == kLtSuccess) now = lt.layout_init(&plan.c, sizeof plan.c, spec_.type, n, m, plan.key.c_stride);
      if (now != kLtSuccess) return now;
      return lt.algo_check(handles_[plan.key.device].load(std::memory_order_acquire),
                           desc_.load(std::memory_order_acquire), &plan.b, &plan.a, &plan.c, &plan.c, &spec_.algo, &result);
    });
    const bool legal = status == kLtSuccess && result.state == kLtSuccess &&
                       result.workspace_bytes <= static_cast<size_t>(spec_.max_workspace_bytes);
    if (legal) plan.workspace_bytes = static_cast<int64_t>(result.workspace_bytes);
  }

  [[nodiscard]] LtStatus matmul(const fibc_cuda& gpu, const LtGemmOperands& x, detail::LtPlan& plan) noexcept {
    static constexpr float kOne = 1.0f;
    static constexpr float kZero = 0.0f;
    void* workspace = plan.workspace_bytes == 0 ? nullptr : gpu.scratch;
    return cublaslt()->matmul(handles_[gpu.device].load(std::memory_order_acquire), desc_.load(std::memory_order_acquire),
                              &kOne, x.b.data, &plan.b, x.a.data, &plan.a, &kZero, x.c.data, &plan.c, x.c.data, &plan.c,
                              &spec_.algo, workspace, static_cast<size_t>(plan.workspace_bytes), gpu.stream);
  }

  LtGemmSpec spec_;
  std::atomic<LtMatmulDesc> desc_ = nullptr;
  std::atomic<LtHandle> handles_[kMaxDevices] = {};
};

}  // namespace
}  // namespace cuda
}  // namespace fibc

#endif
