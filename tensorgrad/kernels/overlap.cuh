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

// Let the next kernel start once all blocks have called this or have ended. It is called after
// `wait_for_previous_kernel`, so that no more than two kernels overlap.
__device__ inline void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
