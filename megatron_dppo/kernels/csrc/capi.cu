// The CUDA build of the C interface.
#include "common.cuh"

namespace dppo {

template <typename Arguments>
int launch(void (*kernel)(const Arguments), int64_t num_blocks, int num_threads, void* stream,
           const Arguments& arguments) {
  kernel<<<static_cast<unsigned>(num_blocks), num_threads, 0, static_cast<cudaStream_t>(stream)>>>(arguments);
  return cudaGetLastError();
}

}  // namespace dppo

#include "entry_points.cuh"

DPPO_API const char* dppo_device_type(void) { return "cuda"; }
