// cp.async: copies from global to shared memory that run while the thread continues (sm_80 and
// later; before that they are plain copies). A thread that waits sees its own copies; others need a
// barrier after that.
#pragma once

// 16 bytes. Zeros are written where `valid` is false; `source` is not read then.
__device__ inline void cp_async(void* shared, const void* source, bool valid) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(unsigned(__cvta_generic_to_shared(shared))), "l"(source),
                    "r"(valid ? 16 : 0) : "memory");
#else
    *static_cast<uint4*>(shared) = valid ? *static_cast<const uint4*>(source) : uint4{};
#endif
}

// The copies since the last call become a group.
__device__ inline void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most PENDING groups are in flight.
template <int PENDING> __device__ inline void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
#endif
}
