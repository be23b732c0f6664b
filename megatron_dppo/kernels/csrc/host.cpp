// The host build of the C interface: the same kernel source, run by host_shim.h.
#define DPPO_HOST
#include "common.cuh"

namespace dppo {

template <typename Arguments>
int launch(void (*kernel)(const Arguments), int64_t num_blocks, int num_threads, void* /*stream*/,
           const Arguments& arguments) {
  return shim::launch(num_blocks, num_threads, [&] { kernel(arguments); });
}

}  // namespace dppo

#include "entry_points.cuh"

DPPO_API const char* dppo_device_type(void) { return "cpu"; }
