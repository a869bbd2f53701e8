"""The random number generators of a process as one live object of the saved state."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ckptfmt.errors import InvalidInput, Mismatch

_Setter = Callable[[], None]


class Rng:
    """The process's random number generators: read at each save, set at each restore.

    Covers Python's ``random``, numpy's global generator and torch's CPU and CUDA generators, as far
    as these libraries are imported (CUDA: initialised) when the state is read, and any further
    ``generators`` by name: ``random.Random``, ``numpy.random.Generator``,
    ``numpy.random.RandomState`` or ``torch.Generator``.

    Raises ``InvalidInput`` for a generator of another type.
    """

    def __init__(self, generators: Mapping[str, Any] | None = None) -> None:
        self._generators: dict[str, Any] = dict(generators or {})
        for name, generator in self._generators.items():
            if not isinstance(name, str):
                raise InvalidInput(f"Rng(generators=...): the name {name!r} must be a str")
            if _kind_of(generator) is None:
                raise InvalidInput(
                    f"Rng(generators={{{name!r}: ...}}): {type(generator).__name__} is no generator; pass a "
                    "random.Random, numpy.random.Generator, numpy.random.RandomState or torch.Generator"
                )

    def state(self) -> dict[str, Any]:
        """Return the state of every generator, as fresh plain values, numpy arrays and CPU uint8 tensors."""
        found: dict[str, Any] = {"python": random.getstate()}
        numpy_random = _numpy_random()
        if numpy_random is not None:
            found["numpy"] = numpy_random.get_state(legacy=False)
        torch = sys.modules.get("torch")
        if torch is not None:
            found["torch"] = torch.random.get_rng_state()
            # Not get_rng_state_all(): it would initialise CUDA in a process that does without.
            if torch.cuda.is_initialized():
                found["cuda"] = [torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count())]
        if self._generators:
            found["generators"] = {
                name: {"kind": _kind_of(generator), "state": _read(generator)}
                for name, generator in self._generators.items()
            }
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the generators from what ``state`` returned.

        Everything is checked first: raises ``Mismatch`` listing each saved part that this process
        lacks, or that does not fit, with all generators as they were. A generator of this process
        that was not saved (its library was not in use then) keeps its state.
        """
        for setter in self._setters(state):
            setter()

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise what ``restore(state)`` would raise, and set nothing."""
        self._setters(state)

    def _setters(self, state: Mapping[str, Any]) -> list[_Setter]:
        problems: list[str] = []
        setters: list[_Setter] = []
        parts = {
            "python": self._python,
            "numpy": self._numpy,
            "torch": self._torch,
            "cuda": self._cuda,
            "generators": self._extra,
        }
        for name, saved in state.items():
            part = parts.get(name)
            if part is None:
                problems.append(f"{name}: a part of the random state that this version of ckptfmt does not know")
            else:
                part(saved, setters, problems)
        if problems:
            raise Mismatch(
                "the saved random state does not fit this process; import the libraries and make the generators "
                "that were in use when it was saved, or leave the Rng out of the restore",
                tuple(problems),
            )
        return setters

    def _python(self, saved: Any, setters: list[_Setter], problems: list[str]) -> None:
        _check("python", _set_python(random.Random(), saved), problems)
        setters.append(_set_python(random, saved))

    def _numpy(self, saved: Any, setters: list[_Setter], problems: list[str]) -> None:
        numpy = sys.modules.get("numpy")
        if numpy is None:
            problems.append("numpy: the state of numpy's global generator was saved, but numpy is not imported here")
            return
        make = type(numpy.random.get_bit_generator())
        _check("numpy", lambda: numpy.random.RandomState(make()).set_state(saved), problems)
        setters.append(lambda: numpy.random.set_state(saved))

    def _torch(self, saved: Any, setters: list[_Setter], problems: list[str]) -> None:
        torch = sys.modules.get("torch")
        if torch is None:
            problems.append("torch: the state of torch's CPU generator was saved, but torch is not imported here")
            return
        _check("torch", lambda: torch.Generator().set_state(saved), problems)
        setters.append(lambda: torch.random.set_rng_state(saved))

    def _cuda(self, saved: Any, setters: list[_Setter], problems: list[str]) -> None:
        torch = sys.modules.get("torch")
        count = torch.cuda.device_count() if torch is not None and torch.cuda.is_available() else 0
        if torch is None or len(saved) != count:
            problems.append(
                f"cuda: generators of {len(saved)} devices were saved, but {count} CUDA devices are visible here"
            )
            return
        for index, one in enumerate(saved):
            setters.append(partial(torch.cuda.set_rng_state, one, index))

    def _extra(self, saved: Any, setters: list[_Setter], problems: list[str]) -> None:
        for name in sorted(self._generators.keys() - saved.keys()):
            problems.append(f"generators.{name}: registered with this Rng, but not in the saved state")
        for name, entry in saved.items():
            generator = self._generators.get(name)
            if generator is None:
                problems.append(f"generators.{name}: saved, but not registered with this Rng")
            elif _kind_of(generator) != entry["kind"]:
                problems.append(f"generators.{name}: saved as {entry['kind']}, but here it is {_kind_of(generator)}")
            else:
                _check(f"generators.{name}", partial(_try_on_twin, generator, entry["state"]), problems)
                setters.append(_set(generator, entry["state"]))


def _numpy_random() -> Any | None:
    """numpy.random if it is loaded: numpy loads it at first use, so until then nothing was drawn from it."""
    return sys.modules.get("numpy.random")


def _kind_of(generator: Any) -> str | None:
    if isinstance(generator, random.SystemRandom):
        return None  # it has no state to save
    if isinstance(generator, random.Random):
        return "random.Random"
    numpy_random, torch = _numpy_random(), sys.modules.get("torch")
    if numpy_random is not None and isinstance(generator, numpy_random.Generator):
        return "numpy.random.Generator"
    if numpy_random is not None and isinstance(generator, numpy_random.RandomState):
        return "numpy.random.RandomState"
    if torch is not None and isinstance(generator, torch.Generator):
        return "torch.Generator"
    return None


def _read(generator: Any) -> Any:
    kind = _kind_of(generator)
    if kind == "random.Random":
        return generator.getstate()
    if kind == "numpy.random.Generator":
        return generator.bit_generator.state
    if kind == "numpy.random.RandomState":
        return generator.get_state(legacy=False)
    return generator.get_state()


def _set(generator: Any, saved: Any) -> _Setter:
    kind = _kind_of(generator)
    if kind == "random.Random":
        return _set_python(generator, saved)
    if kind == "numpy.random.Generator":
        return lambda: setattr(generator.bit_generator, "state", saved)
    return lambda: generator.set_state(saved)


def _set_python(generator: Any, saved: Any) -> _Setter:
    return lambda: generator.setstate(saved)


def _try_on_twin(generator: Any, saved: Any) -> None:
    _set(_twin(generator), saved)()


def _twin(generator: Any) -> Any:
    """A second generator of the same make, on which a saved state is tried."""
    kind = _kind_of(generator)
    if kind == "random.Random":
        return type(generator)()
    if kind == "torch.Generator":
        return type(generator)(device=generator.device)
    if kind == "numpy.random.Generator":
        return type(generator)(type(generator.bit_generator)())
    name = generator.get_state(legacy=False)["bit_generator"]
    return type(generator)(getattr(sys.modules["numpy.random"], name)())


def _check(name: str, trial: _Setter, problems: list[str]) -> None:
    try:
        trial()
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        problems.append(f"{name}: the saved state is refused: {error}")
