"""Random numbers of torch, drawn apart from its global generators."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_OF_TENSORS = (
    *("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_"),
    *("multinomial", "normal_", "random_", "uniform_"),
)
_DRAWING = {
    *(getattr(Tensor, name) for name in _OF_TENSORS),
    *(torch.bernoulli, torch.multinomial, torch.normal, torch.poisson),
    *(torch.rand, torch.randint, torch.randn, torch.randperm),
    *(
        function
        for _, function in inspect.getmembers(torch.nn.init, inspect.isfunction)
        if "generator" in inspect.signature(function).parameters
    ),
}
_DROPOUTS = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
    *(F.alpha_dropout, F.feature_alpha_dropout, F.rrelu),
}
_LIKE: dict[Any, Callable[..., Any]] = {  # these take no generator
    torch.rand_like: torch.rand,
    torch.randn_like: torch.randn,
    torch.randint_like: torch.randint,
}


class IsolatedRandom(TorchFunctionMode):
    """Inside, in this thread, what torch draws comes from generators of its own, one per device.

    Made for the making of modules: their layers, `torch.nn.init`, and the functions that a
    definition may call itself; dropout, tried on an input, does nothing.  The global generators are
    neither read nor moved.  Beware of what draws inside of other functions of torch
    (`torch.binomial`, `gumbel_softmax`, some distributions): it moves them.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            kwargs["training"] = False
        if func in _LIKE:
            like, *args = (kwargs.pop("input"), *args) if "input" in kwargs else args
            for name in ("dtype", "device"):
                kwargs[name] = kwargs.get(name) or getattr(like, name)
            kwargs.pop("memory_format", None)
            func, kwargs["size"] = _LIKE[func], like.shape
        if func in _DRAWING and kwargs.get("generator") is None:
            kwargs["generator"] = self._generator(args, kwargs)
        return func(*args, **kwargs)

    def _generator(self, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Generator:
        """Of the device on which the numbers will be."""
        tensors = (v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
        given = kwargs.get("device") or next((t.device for t in tensors), None)
        device = torch.empty(0, device=given).device  # the default's, if none is given
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self.generators[device]
