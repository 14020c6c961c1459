"""Curvature of a loss: eigenvalues, trace, diagonal and spectral density of Hessians.

    operator = Operator(lambda v: matrix @ v, size=len(matrix))  # any symmetric operator
    sharpness = eigenpairs(operator).values[0]

    operator = model_hessian(model, lambda model, x, y: model(x, y), batches)

All is computed from products of the operator with vectors. Each result has its error and the
number of products. Guide: docs/how-to/curvature.md.
"""

from tensorgrad.curvature.estimates import Density, MonteCarloEstimate, density, diagonal, trace
from tensorgrad.curvature.lanczos import Eigenpairs, eigenpairs
from tensorgrad.curvature.models import model_fisher, model_gauss_newton, model_hessian
from tensorgrad.curvature.operators import Operator

__all__ = [
    "Density",
    "Eigenpairs",
    "MonteCarloEstimate",
    "Operator",
    "density",
    "diagonal",
    "eigenpairs",
    "model_fisher",
    "model_gauss_newton",
    "model_hessian",
    "trace",
]
