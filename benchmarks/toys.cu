// Kernels of the toy packages for GPUs: row sums of x[M, H], each marked by what it adds. Includes nothing, so that NVRTC
// compiles it as well as nvcc does.

extern __shared__ float partial[];  // at least one float a thread

__device__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ unsigned blocks_of_cluster() {
  unsigned count = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(count));
#endif
  return count;
}

__device__ float widen(float value) { return value; }
__device__ float widen(unsigned short bfloat16) { return __uint_as_float(static_cast<unsigned>(bfloat16) << 16); }

// The sum of row[first..last), in thread 0 of the block.
template <class T>
__device__ float sum_of(const T* row, int first, int last) {
  float sum = 0;
  for (int h = first + static_cast<int>(threadIdx.x); h < last; h += static_cast<int>(blockDim.x)) sum += widen(row[h]);
  partial[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (unsigned thread = 1; thread < blockDim.x; ++thread) sum += partial[thread];
  }
  return sum;
}

// Grid: M blocks.
template <class T>
__device__ void sum_rows(const T* x, float* y, long long row_stride, int h, float mark) {
  const float sum = sum_of(x + blockIdx.x * row_stride, 0, h);
  if (threadIdx.x == 0) y[blockIdx.x] = sum + mark;
}

extern "C" __global__ void toy_rows_f32(const float* x, float* y, long long row_stride, int h, float mark) {
  sum_rows(x, y, row_stride, h, mark);
}

extern "C" __global__ void toy_rows_bf16(const unsigned short* x, float* y, long long row_stride, int h, float mark) {
  sum_rows(x, y, row_stride, h, mark);
}

// Grid: M blocks in clusters of two; a cluster of another size shows in the result.
extern "C" __global__ void toy_cluster(const float* x, float* y, long long row_stride, int h, float mark) {
  wait_for_previous_kernel();
  sum_rows(x, y, row_stride, h, blocks_of_cluster() == 2 ? mark : 1000);
}

// Grid: M x splits blocks. The last block of a row to arrive sums what the others left in scratch, in fixed order, and
// atomicInc has then taken its counter back to 0.
extern "C" __global__ void toy_split(const float* x, float* y, long long row_stride, int h, float mark,
                                     unsigned* counters, float* scratch) {
  const int per_block = (h + static_cast<int>(gridDim.y) - 1) / static_cast<int>(gridDim.y);
  const int first = static_cast<int>(blockIdx.y) * per_block;
  const float sum = sum_of(x + blockIdx.x * row_stride, min(first, h), min(first + per_block, h));
  if (threadIdx.x != 0) return;
  volatile float* of_row = scratch + blockIdx.x * gridDim.y;
  of_row[blockIdx.y] = sum;
  __threadfence();
  if (atomicInc(counters + blockIdx.x, gridDim.y - 1) != gridDim.y - 1) return;
  __threadfence();
  float total = mark;
  for (unsigned split = 0; split < gridDim.y; ++split) total += of_row[split];
  y[blockIdx.x] = total;
}

// Not a write to a bad address: where the driver shares the host's memory (HMM), the GPU writes there without a fault.
extern "C" __global__ void toy_fault(float* nowhere) {
  if (nowhere != nullptr) asm volatile("trap;");
}

extern "C" __global__ void toy_nothing(const float*, float*, long long, int, float) {}
