/* The C interface between a kernel and whoever calls it: a generated module or a tuning worker. */
#ifndef FIBC_KERNEL_ABI_H
#define FIBC_KERNEL_ABI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One thread's share of a parallel region; thread is in [0, num_threads). */
typedef void (*fibc_task)(void* context, int32_t thread, int32_t num_threads);

/* Runs task on num_threads threads of the process's one OpenMP runtime and waits. */
typedef void (*fibc_parallel)(fibc_task task, void* context, int32_t num_threads);

/* A tensor argument. Shape and strides are in elements, in the definition's axis order. */
typedef struct fibc_tensor {
  void* data;
  const int64_t* shape;
  const int64_t* strides;
} fibc_tensor;

/* One call. Inputs and outputs follow the definition's order; a Python scalar has data = NULL and its value in scalars. */
typedef struct fibc_call {
  const fibc_tensor* inputs;
  const fibc_tensor* outputs;
  const double* scalars; /* one per input; unused entries are 0 */
  const int64_t* axes;   /* every axis of the definition, in its order */
  fibc_parallel parallel;
  int32_t num_threads; /* at least 1 */
} fibc_call;

/* Returns 0, or another value where it did nothing (no memory for a workspace) and the caller must use native. */
typedef int32_t (*fibc_kernel)(const fibc_call* call);

#ifdef __cplusplus
}
#endif

#endif
