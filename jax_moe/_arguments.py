"""What arguments of the public functions must be: a wrong one is refused by its name."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def integer(name: str, value: Any, least: int | None = None) -> int:
    """The value as an int, numpy's included; with `least` a size, which fits an int32.

    Raises:
      TypeError: it is no integer.
      ValueError: it is no such size.
    """
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None:
        raise TypeError(f"{name}={value!r}: must be an integer.")
    if least is not None and not least <= found < 2**31:
        raise ValueError(f"{name}={found}: must be at least {least} and less than 2**31.")
    return found


def integers(**values: Any) -> list[int]:
    """The values as sizes of at least 1, by their names; see `integer`."""
    return [integer(name, value, 1) for name, value in values.items()]


def number(name: str, value: Any) -> float:
    """The value as a float.

    Raises:
      TypeError: it is no real number; a string of one is none.
    """
    try:
        found = None if isinstance(value, bool) else value.__float__()
    except (AttributeError, OverflowError, TypeError):
        found = None
    if found is None:
        raise TypeError(f"{name}={value!r}: must be a number.")
    return found


def array(name: str, value: Any) -> jax.Array:
    """The value as an array of JAX, whether it is one, one of numpy's, or lists of numbers.

    Raises:
      TypeError: it is none of these.
      ValueError: it has integers that the type in which JAX holds them has not.
    """
    try:
        found = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is a {type(value).__name__}: must be an array.") from error
    except OverflowError as error:
        raise ValueError(f"{name} has integers that do not fit an int32.") from error
    integers_of_numpy = isinstance(value, np.ndarray) and value.dtype.kind in "iu"
    if integers_of_numpy and np.any(value.astype(found.dtype) != value):
        raise ValueError(f"{name} is {value.dtype} with integers that no {found.dtype} has.")
    return found


def arrays(**values: Any) -> list[jax.Array]:
    """The values as arrays, by their names; see `array`."""
    return [array(name, value) for name, value in values.items()]


def float_dtype(name: str, value: Any) -> Any:
    """The value as a dtype.

    Raises:
      TypeError: it is none, or not of floating point.
    """
    try:
        found = None if value is None else jnp.dtype(value)  # NumPy's None is float64
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"{name}={value!r}: must be a floating-point type, such as jnp.bfloat16.")
    return found


def payload_dtypes(implementation: str) -> tuple[str, ...]:
    """The types of rows that an implementation carries."""
    narrow = "float32", "bfloat16"
    return narrow if implementation in ("cpu", "ptx") else (*narrow, "float64")


def payload_dtype(name: str, value: Any, implementation: str) -> Any:
    """The value as a dtype of rows.

    Raises:
      TypeError: it is no floating-point type.
      ValueError: the implementation does not carry it.
    """
    found, allowed = float_dtype(name, value), payload_dtypes(implementation)
    if found.name not in allowed:
        raise ValueError(
            f'{name}={found}: implementation="{implementation}" carries {" or ".join(allowed)}; '
            "take bfloat16 in place of float16."
        )
    return found


def instance(name: str, value: Any, kinds: Any, wanted: str) -> None:
    """Refuses a value that is no instance of `kinds`.

    Raises:
      TypeError: it is none; the message ends with what is `wanted`.
    """
    if not isinstance(value, kinds):
        raise TypeError(f"{name} is a {type(value).__name__}: must be {wanted}.")
