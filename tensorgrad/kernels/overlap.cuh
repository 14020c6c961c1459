// Programmatic dependent launch: a kernel starts while the one before it in the stream still runs.
// kernels/overlap.py launches such kernels and has the rules. Before sm_90, and where a kernel was
// launched in the ordinary way, both functions do nothing.
#pragma once

// Wait until the kernel before has ended and what it wrote can be read. Every thread calls it
// before it reads or writes memory that other kernels write.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Bring the 128 bytes around an address into the L2 cache, without waiting for them.
__device__ inline void prefetch_to_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" :: "l"(__cvta_generic_to_global(address)) : "memory");
}

// Let the next kernel start once all blocks have called this or have ended. Called before
// `wait_for_previous_kernel`, it lets three kernels overlap; the launch says so then.
__device__ inline void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
