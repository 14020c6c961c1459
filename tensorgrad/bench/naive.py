"""The naive kernel of a matrix product, which `tensorgrad bench kernels matmul` times beside ours.

Tests: tests/bench/test_kernels.py.
"""

from __future__ import annotations

import numpy as np

from tensorgrad.autograd.cuda_kernel import cuda_kernel

_SOURCE = """
__global__ void naive_matmul(float* y, const float* a, const float* b, int columns, int terms) {
    const long long i = blockIdx.y, j = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (j >= columns) return;
    float sum = 0;
    for (int k = 0; k < terms; ++k) sum += a[i * terms + k] * b[k * (long long)columns + j];
    y[i * columns + j] = sum;
}
"""
naive_matmul = cuda_kernel(
    _SOURCE,
    "naive_matmul",
    np.matmul,
    threads=256,
    blocks=lambda a, b: (-(-b.shape[1] // 256), a.shape[0]),
    shapes={"y": lambda a, b: (a.shape[0], b.shape[1])},
    sizes={"columns": lambda a, b: b.shape[1], "terms": lambda a, b: a.shape[1]},
)
