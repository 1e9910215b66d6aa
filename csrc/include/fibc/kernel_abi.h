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

#define FIBC_COUNTER_BYTES 65536

/* What a kernel on a GPU needs beside its arguments.
 *
 * Counters are for kernels whose last block finishes the work: FIBC_COUNTER_BYTES zero bytes when a kernel starts, and
 * every kernel leaves them zero. They are apart from the scratch, because a graph keeps its counters from one replay to
 * the next and then needs no memset of them. Counters and scratch belong to one stream, or to one stream of one graph:
 * what was launched there before has ended when a kernel touches them (a dependent launch waits first). */
typedef struct fibc_cuda {
  void* stream;      /* CUstream, the framework's current one on that device */
  int32_t device;    /* CUDA ordinal in this process; its primary context is current in the calling thread */
  int32_t capturing; /* nonzero while the stream is captured into a graph; asked of the driver only where the call needs
                        a workspace or the device is not prepared, else 0 */
  void* counters;    /* FIBC_COUNTER_BYTES, 256-byte aligned; NULL where <symbol>_workspace returned 0 */
  void* scratch;     /* at least what <symbol>_workspace returned, of any content, 256-byte aligned; NULL where that was 0 */
} fibc_cuda;

/* One call. Inputs and outputs follow the definition's order; a Python scalar has data = NULL and its value in scalars. */
typedef struct fibc_call {
  const fibc_tensor* inputs;
  const fibc_tensor* outputs;
  const double* scalars; /* one per input; unused entries are 0 */
  const int64_t* axes;   /* every axis of the definition, in its order */
  fibc_parallel parallel;
  int32_t num_threads;   /* at least 1 */
  const fibc_cuda* cuda; /* NULL in a call on the CPU */
} fibc_call;

#define FIBC_OK 0
#define FIBC_DECLINED 1     /* did nothing (no memory for a workspace, a launch refused): the caller must use native */
#define FIBC_DEVICE_ERROR 2 /* the device reported an error of work that was under way: the caller raises it, and never
                               tries again */

/* Returns FIBC_OK, FIBC_DEVICE_ERROR, or another value for FIBC_DECLINED. On a GPU it launches on call->cuda->stream and
 * does not wait. */
typedef int32_t (*fibc_kernel)(const fibc_call* call);

/* A kernel for GPUs comes with two more entries beside <symbol>.
 *
 * <symbol>_workspace: bytes of scratch that this call needs (call->cuda may be NULL), at least 1 where it needs counters,
 * 0 where it needs neither.
 * <symbol>_prepare: loads code on a device whose primary context is current; called outside of capture. FIBC_OK also where
 * it was loaded before. */
typedef int64_t (*fibc_workspace)(const fibc_call* call);
typedef int32_t (*fibc_prepare)(int32_t device);

#ifdef __cplusplus
}
#endif

#endif
