// Runs CUDA C++ kernels on the host, for tests: one block after the other, each thread of a block on a separate
// stack. A thread runs until it must wait for others, then the next one runs. Supports what these kernels use:
// __shared__, __syncthreads, __shfl_xor_sync of the whole warp, bfloat16 and pairs of it, 16-byte loads.
//
// Waits that would hang or be undefined on a GPU end the launch with cudaErrorLaunchFailure: threads of a warp at
// different barriers, a block's barrier that some never reach, a shuffle with lanes that have returned.
#pragma once

// The checked longjmp refuses to switch stacks.
#undef _FORTIFY_SOURCE

#include <csetjmp>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

// Hidden symbols: libraries that are built from this file and loaded by one process share nothing.
#pragma GCC visibility push(hidden)

#define __global__ static
#define __host__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // blocks do not run at the same time

using std::min;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };

inline const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorLaunchFailure:
      return "threads of a block wait at different barriers";
  }
  return "unrecognized error code";
}

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

template <typename To, typename From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits are neither added nor lost");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline float __uint_as_float(uint32_t bits) { return same_bits<float>(bits); }
inline uint32_t __float_as_uint(float value) { return same_bits<uint32_t>(value); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, unsigned bits) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (bits & 31));
}

struct __nv_bfloat16 {
  uint16_t bits;
};
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline float __bfloat162float(__nv_bfloat16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  if (value != value) return {0x7fff};
  const uint32_t bits = __float_as_uint(value);
  const uint32_t is_odd = (bits >> 16) & 1;  // ties go to the even neighbour
  return {static_cast<uint16_t>((bits + 0x7fff + is_odd) >> 16)};
}

namespace dppo {
// Fails like the device's load if an address is not a multiple of 16.
inline uint4 load_streaming(const uint4* address) {
  return *static_cast<const uint4*>(__builtin_assume_aligned(address, 16));
}
inline void store_streaming(uint4* address, uint4 value) { *address = value; }
inline void prefetch(const void*) {}
inline float fast_exp2(float x) {
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.f : y;  // no subnormals, as on the device
}
inline uint32_t max_of_pairs(uint32_t a, uint32_t b) {
  const float high = fmaxf(__uint_as_float(a & 0xffff0000u), __uint_as_float(b & 0xffff0000u));
  const float low = fmaxf(__uint_as_float(a << 16), __uint_as_float(b << 16));
  return (__float_as_uint(high) & 0xffff0000u) | (__float_as_uint(low) >> 16);
}
inline uint32_t pair_of(float low, float high) {
  const uint32_t upper = __bfloat16_as_ushort(__float2bfloat16_rn(high));
  return upper << 16 | __bfloat16_as_ushort(__float2bfloat16_rn(low));
}
}  // namespace dppo

struct Dim3 {
  unsigned x;
};
inline Dim3 threadIdx, blockIdx, blockDim;

namespace shim {

constexpr int kWarpSize = 32;
constexpr size_t kStackBytes = 64 << 10;

enum class State { kReady, kAtWarp, kAtBlock, kReturned };

struct Thread {
  State state = State::kReady;
  bool is_started = false;
  bool parity = false;
  uint32_t shuffled[2] = {0, 0};  // what the lane offers, by parity: one wait per shuffle is enough
  ucontext_t entry;
  jmp_buf resume_at;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
};

inline std::vector<Thread> threads;
inline jmp_buf scheduler;
inline std::function<void()> kernel;

// Leaves the running thread until the scheduler resumes it.
[[gnu::noinline]] inline void wait(State state) {
  Thread& self = threads[threadIdx.x];
  self.state = state;
  if (_setjmp(self.resume_at) == 0) _longjmp(scheduler, 1);
}

// The main function of a thread: runs the kernel once per block.
inline void live() {
  for (;;) {
    kernel();
    wait(State::kReturned);
  }
}

[[gnu::noinline]] inline void resume(Thread& thread) {
  if (_setjmp(scheduler) != 0) return;
  if (thread.is_started) _longjmp(thread.resume_at, 1);
  thread.is_started = true;
  setcontext(&thread.entry);
}

inline void create_threads(int num_threads) {
  threads = std::vector<Thread>(num_threads);
  for (Thread& thread : threads) {
    getcontext(&thread.entry);
    thread.entry.uc_stack.ss_sp = thread.stack.get();
    thread.entry.uc_stack.ss_size = kStackBytes;
    thread.entry.uc_link = nullptr;
    makecontext(&thread.entry, live, 0);
  }
}

inline int count(State state, size_t first, size_t size) {
  const auto begin = threads.begin() + first;
  return std::count_if(begin, begin + size, [=](const Thread& thread) { return thread.state == state; });
}

inline void release(size_t first, size_t size) {
  for (size_t t = first; t < first + size; ++t) threads[t].state = State::kReady;
}

// After every thread has stopped: resumes the threads that need not wait any more. False if there are none.
inline bool release_waiting() {
  bool is_any_released = false;
  for (size_t first = 0; first < threads.size(); first += kWarpSize) {
    if (count(State::kAtWarp, first, kWarpSize) == kWarpSize) {
      release(first, kWarpSize);
      is_any_released = true;
    }
  }
  if (is_any_released) return true;
  if (count(State::kAtBlock, 0, threads.size()) != static_cast<int>(threads.size())) return false;
  release(0, threads.size());
  return true;
}

inline bool run_block() {
  release(0, threads.size());
  for (;;) {
    for (size_t t = 0; t < threads.size(); ++t) {
      if (threads[t].state != State::kReady) continue;
      threadIdx.x = t;
      resume(threads[t]);
    }
    if (count(State::kReturned, 0, threads.size()) == static_cast<int>(threads.size())) return true;
    if (!release_waiting()) return false;
  }
}

inline cudaError_t launch(int64_t num_blocks, int num_threads, std::function<void()> body) {
  static std::mutex one_launch;
  const std::lock_guard<std::mutex> lock(one_launch);
  if (threads.size() != static_cast<size_t>(num_threads)) create_threads(num_threads);
  kernel = std::move(body);
  blockDim.x = num_threads;
  for (int64_t block = 0; block < num_blocks; ++block) {
    blockIdx.x = block;
    if (!run_block()) {
      threads.clear();  // their stacks are still inside this kernel
      return cudaErrorLaunchFailure;
    }
  }
  return cudaSuccess;
}

}  // namespace shim

inline void __syncthreads() { shim::wait(shim::State::kAtBlock); }

template <typename T>
inline T __shfl_xor_sync(unsigned /*whole warp*/, T value, int offset) {
  const unsigned self = threadIdx.x;
  const bool parity = shim::threads[self].parity;
  shim::threads[self].parity = !parity;
  shim::threads[self].shuffled[parity] = same_bits<uint32_t>(value);
  shim::wait(shim::State::kAtWarp);
  return same_bits<T>(shim::threads[self ^ offset].shuffled[parity]);
}
