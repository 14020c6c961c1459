"""Modules and parameters: those of minitorch, whose parameters hold any value."""

from __future__ import annotations

from typing import Any

__all__ = ["Module", "Parameter"]


class Parameter:
    """A value that an optimizer replaces.

    Args:
        x: the value: a Tensor, a Scalar, or any other.
        name: given to the value, where it can have a gradient.
    """

    def __init__(self, x: Any, name: str | None = None) -> None:
        self.name = name
        self.update(x)

    def update(self, x: Any) -> None:
        """Replace the value."""
        self.value = x
        if hasattr(x, "requires_grad_"):
            x.requires_grad_(True)
            if self.name:
                x.name = self.name

    def __repr__(self) -> str:
        return repr(self.value)


class Module:
    """A tree of modules and parameters, which are assigned as attributes."""

    def __init__(self) -> None:
        self._modules: dict[str, Module] = {}
        self._parameters: dict[str, Parameter] = {}
        self.training = True

    def __setattr__(self, key: str, val: Any) -> None:
        if isinstance(val, Parameter):
            self._parameters[key] = val
        elif isinstance(val, Module):
            self._modules[key] = val
        else:
            super().__setattr__(key, val)

    def __getattr__(self, key: str) -> Any:
        """Return a parameter or module; None where there is none, as in minitorch."""
        attributes = self.__dict__
        parameter = attributes.get("_parameters", {}).get(key)
        return parameter or attributes.get("_modules", {}).get(key)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the subclass's `forward` does."""
        return self.forward(*args, **kwargs)

    def modules(self) -> list[Module]:
        """Return the modules of this one, without theirs."""
        return list(self._modules.values())

    def train(self) -> None:
        """Set the training mode, here and below."""
        self._set_mode(True)

    def eval(self) -> None:
        """Set the evaluation mode, here and below."""
        self._set_mode(False)

    def _set_mode(self, training: bool) -> None:
        self.training = training
        for module in self.modules():
            module._set_mode(training)

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """Return the parameters, here and below, with their dotted names."""
        inner_parameters = [
            (f"{name}.{inner}", parameter)
            for name, module in self._modules.items()
            for inner, parameter in module.named_parameters()
        ]
        return [*self._parameters.items(), *inner_parameters]

    def parameters(self) -> list[Parameter]:
        """Return the parameters, here and below."""
        return [parameter for _, parameter in self.named_parameters()]

    def add_parameter(self, k: str, v: Any) -> Parameter:
        """Add a parameter with this name and value, and return it."""
        self._parameters[k] = Parameter(v, k)
        return self._parameters[k]

    def __repr__(self) -> str:
        lines = [f"({name}): {module!r}" for name, module in self._modules.items()]
        inner = "".join(f"\n{line}" for line in lines).replace("\n", "\n  ")
        return f"{type(self).__name__}({inner}\n)" if inner else f"{type(self).__name__}()"
