"""Calls as one program each: outside `jax.jit` every operation of a call is compiled by itself,
and so is what a test does with a result that is no array of NumPy."""

import functools
import inspect

import jax

import jrl

KNOWN = str | bool | int | tuple | None
DECIDING = ("fraction", "quantile")
"""Numbers with a point whose value decides what is compiled."""


def is_known(name, value):
    """True if a setting is known while its program is compiled."""
    return isinstance(value, KNOWN) or (name in DECIDING and isinstance(value, float))


@functools.lru_cache(maxsize=None, typed=True)
def program(function, **settings):
    """A function with these settings, known while it is compiled, as one program."""
    return jax.jit(functools.partial(function, **settings))


def compiled(function):
    """`function` as one program for each choice of the settings that are no numbers with a point,
    with results on the host."""

    def call(*arrays, **settings):
        known = {name: x for name, x in settings.items() if is_known(name, x)}
        inputs = {name: x for name, x in settings.items() if name not in known}
        return jax.device_get(program(function, **known)(*arrays, **inputs))

    return call


@functools.cache
def with_slope(loss):
    """The value of a loss, what it has beside that, and the gradient by its first argument."""
    return compiled(jax.value_and_grad(loss, has_aux=True))


class Programs:
    """The functions of a module under their names, each `compiled`."""

    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        result = getattr(self._module, name)
        return Programs(result) if inspect.ismodule(result) else compiled(result)


jitted = Programs(jrl)
